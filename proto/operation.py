"""Operations: what a frame's header does to a stage's sequences, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from proto.errors import ProtocolError
from proto.params import SamplingParams
from proto.wire import check_int, check_list


@dataclass(frozen=True)
class Admit:
    """Create an empty sequence. `capacity` is the most tokens it will ever hold.

    The first `prompt` of them are the user's: presence and frequency penalties leave those out.
    """

    kind: ClassVar[str] = "admit"
    seq_id: int
    capacity: int
    prompt: int
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Commit:
    """Make the first `accepted_length` tokens of open window `window` permanent.

    Fewer than its width also drops the rest and every window opened after it. Saying it again changes
    nothing.
    """

    kind: ClassVar[str] = "commit"
    seq_id: int
    window: int
    accepted_length: int


@dataclass(frozen=True)
class Evict:
    """Forget a sequence and all it holds."""

    kind: ClassVar[str] = "evict"
    seq_id: int


@dataclass(frozen=True)
class SavePrefix:
    """Keep what sequence `seq_id` holds now, its windows all committed, as prefix entry `entry`."""

    kind: ClassVar[str] = "save"
    seq_id: int
    entry: int


@dataclass(frozen=True)
class RestorePrefix:
    """Start the just admitted, empty sequence `seq_id` from prefix entry `entry`."""

    kind: ClassVar[str] = "restore"
    seq_id: int
    entry: int


@dataclass(frozen=True)
class DropPrefix:
    """Forget prefix entry `entry`."""

    kind: ClassVar[str] = "drop"
    entry: int


Op = Admit | Commit | Evict | SavePrefix | RestorePrefix | DropPrefix

_FIELDS: dict[str, tuple[type[Op], tuple[str, ...]]] = {
    Admit.kind: (Admit, ("seq_id", "capacity", "prompt")),
    Commit.kind: (Commit, ("seq_id", "window", "accepted_length")),
    Evict.kind: (Evict, ("seq_id",)),
    SavePrefix.kind: (SavePrefix, ("seq_id", "entry")),
    RestorePrefix.kind: (RestorePrefix, ("seq_id", "entry")),
    DropPrefix.kind: (DropPrefix, ("entry",)),
}
"""The integers of each, in wire order. Admit's parameters follow them."""


def op_to_wire(op: Op) -> list[Any]:
    _, names = _FIELDS[op.kind]
    wire: list[Any] = [op.kind, *(check_int(getattr(op, name), name) for name in names)]
    if isinstance(op, Admit):
        wire.append(op.params.to_wire())
    return wire


def op_from_wire(wire: Any) -> Op:
    """Inverse of `op_to_wire`. Raises ProtocolError."""
    kind, *values = check_list(wire, "operation", 8) or [None]
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ProtocolError("operation of an unknown kind")
    op, names = _FIELDS[kind]
    arguments: list[Any] = list(values)
    if op is Admit and arguments:
        arguments[-1] = SamplingParams.from_wire(arguments[-1])
        names = (*names, "params")
    if len(arguments) != len(names):
        raise ProtocolError(f"{kind} takes {len(names)} values, got {len(arguments)}")
    for name, value in zip(names, values, strict=True):
        if name != "params":
            check_int(value, name)
    return op(*arguments)
