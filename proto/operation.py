"""The operations in a frame's header, which every stage applies to its sequences in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proto.errors import ProtocolError
from proto.params import SamplingParams
from proto.wire import check_int, check_ints, check_list

_COMMIT_NAMES = ("seq_id", "window", "accepted_length")


@dataclass(frozen=True, slots=True)
class Admit:
    """The creation of an empty sequence that holds at most `capacity` tokens.

    The first `prompt` tokens are the user's. Presence and frequency penalties do not count them, and grammars do not
    read them. `vocabulary` is the tokenizer's vocabulary, packed. The first sequence of an epoch that has a grammar
    brings it, because the last stage has no tokenizer. Raises ProtocolError for a value out of range.
    """

    kind: ClassVar[str] = "admit"
    seq_id: int
    capacity: int
    prompt: int
    params: SamplingParams = field(default_factory=SamplingParams)
    vocabulary: bytes = b""

    def __post_init__(self) -> None:
        check_int(self.seq_id, "seq_id")
        check_int(self.capacity, "capacity")
        check_int(self.prompt, "prompt")
        if not isinstance(self.vocabulary, bytes):
            raise ProtocolError("the vocabulary of an admit is not bytes")


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of the first `accepted_length` tokens of the open window `window`.

    An `accepted_length` below the window's width also drops the window's other tokens and every later
    window. Applying a commit twice changes nothing. Raises ProtocolError for a value out of range.
    """

    kind: ClassVar[str] = "commit"
    seq_id: int
    window: int
    accepted_length: int

    def __post_init__(self) -> None:
        check_ints((self.seq_id, self.window, self.accepted_length), _COMMIT_NAMES)


@dataclass(frozen=True, slots=True)
class Evict:
    """The removal of a sequence and of everything it holds."""

    kind: ClassVar[str] = "evict"
    seq_id: int

    def __post_init__(self) -> None:
        check_int(self.seq_id, "seq_id")


@dataclass(frozen=True, slots=True)
class SavePrefix:
    """The saving of sequence `seq_id`, all of whose windows are committed, as prefix entry `entry`."""

    kind: ClassVar[str] = "save"
    seq_id: int
    entry: int

    def __post_init__(self) -> None:
        check_int(self.seq_id, "seq_id")
        check_int(self.entry, "entry")


@dataclass(frozen=True, slots=True)
class RestorePrefix:
    """The start of the newly admitted, empty sequence `seq_id` from prefix entry `entry`."""

    kind: ClassVar[str] = "restore"
    seq_id: int
    entry: int

    def __post_init__(self) -> None:
        check_int(self.seq_id, "seq_id")
        check_int(self.entry, "entry")


@dataclass(frozen=True, slots=True)
class DropPrefix:
    """The removal of prefix entry `entry`."""

    kind: ClassVar[str] = "drop"
    entry: int

    def __post_init__(self) -> None:
        check_int(self.entry, "entry")


@dataclass(frozen=True, slots=True)
class BackUp:
    """The backup of sequence `seq_id`, all of whose windows are committed, for the coordinator to read.

    The coordinator has the K/V of the first `start` tokens from an earlier backup. Raises ProtocolError for a value out
    of range.
    """

    kind: ClassVar[str] = "back_up"
    seq_id: int
    start: int

    def __post_init__(self) -> None:
        check_int(self.seq_id, "seq_id")
        check_int(self.start, "start")


@dataclass(frozen=True, slots=True)
class RestoreBackup:
    """The start of the newly admitted, empty sequence `seq_id` from its backup of `length` tokens."""

    kind: ClassVar[str] = "restore_backup"
    seq_id: int
    length: int

    def __post_init__(self) -> None:
        check_int(self.seq_id, "seq_id")
        check_int(self.length, "length")


Op = Admit | Commit | Evict | SavePrefix | RestorePrefix | DropPrefix | BackUp | RestoreBackup

_FIELDS: dict[str, tuple[type[Op], tuple[str, ...]]] = {
    Admit.kind: (Admit, ("seq_id", "capacity", "prompt")),
    Commit.kind: (Commit, ("seq_id", "window", "accepted_length")),
    Evict.kind: (Evict, ("seq_id",)),
    SavePrefix.kind: (SavePrefix, ("seq_id", "entry")),
    RestorePrefix.kind: (RestorePrefix, ("seq_id", "entry")),
    DropPrefix.kind: (DropPrefix, ("entry",)),
    BackUp.kind: (BackUp, ("seq_id", "start")),
    RestoreBackup.kind: (RestoreBackup, ("seq_id", "length")),
}
"""The class of each kind and its integer fields in wire order. Parameters and vocabulary of Admit follow them."""


def op_to_wire(op: Op) -> Sequence[Any]:
    """Return `op` as the row that msgpack encodes."""
    if type(op) is Commit:  # nearly all operations
        return Commit.kind, op.seq_id, op.window, op.accepted_length
    _, names = _FIELDS[op.kind]
    wire: list[Any] = [op.kind, *(getattr(op, name) for name in names)]
    if isinstance(op, Admit):
        wire += [op.params.to_wire(), op.vocabulary]
    return wire


def op_from_wire(wire: Any) -> Op:
    """Invert `op_to_wire`. Raises ProtocolError for a malformed operation."""
    kind, *values = check_list(wire, "operation", 8) or [None]
    if kind == Commit.kind and len(values) == 3:  # nearly all operations
        return Commit(*values)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ProtocolError("operation of an unknown kind")
    op, names = _FIELDS[kind]
    arguments: list[Any] = list(values)
    if op is Admit:
        names = (*names, "params", "vocabulary")
        if len(arguments) == len(names):
            arguments[-2] = SamplingParams.from_wire(arguments[-2])
    if len(arguments) != len(names):
        raise ProtocolError(f"{kind} takes {len(names)} values, got {len(arguments)}")
    return op(*arguments)
