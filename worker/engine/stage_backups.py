"""The backups of sequences on one stage: those that it made, and those that it received from memory or from a disk.

All code of this module runs on the engine thread, but for `in_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx

from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.cut import WHOLE, Cut
from mtp.layers.layer import Member
from proto.backup import LayerState, by_layer, prefix_key
from proto.errors import NotReadyError, ProtocolError
from proto.frame import BackUp, RestoreBackup
from proto.span import Span
from worker.cache.sequence_cache import Border, LastStageState, SequenceCache
from worker.engine.state_codec import Bytes, Stored, decode_state, head_arrays, head_from, joined_bytes

STATE_BYTES = 2**25
"""Bytes. States that the engine thread encodes or decodes at once, at least a layer, before the next frame may run. It
takes about 10 ms. One layer at a time would let every layer wait for a frame."""


@dataclass(frozen=True)
class LayerArrays:
    """The state of layer number `layer`. With `appends` it continues that of an earlier backup.

    `read_arrays` copies keys and values only when they are sent, so a backup keeps no second copy of them.
    """

    layer: int
    appends: bool
    read_arrays: Callable[[], list[mx.array]]


@dataclass(frozen=True)
class SequenceBackup:
    """The state of a sequence after `length` tokens. On the last stage the MTP head counts as a layer after the others.

    In a group the states are the shares of the member that `cut` names.
    """

    seq_id: int
    length: int
    layers: list[LayerArrays]
    cut: Cut = WHOLE


@dataclass(frozen=True)
class ReceivedBackup:
    """The state of a sequence after `tokens`, by layer number: the oldest first, each the bytes of all shares.

    Layers of a prefix on disk have its `border`, and are the share of this member. They may come from several disks.
    """

    tokens: tuple[int, ...]
    layers: Mapping[int, Sequence[tuple[Bytes, ...]]]
    border: Border | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], states: Iterable[LayerState], *, from_disk: bool = False) -> ReceivedBackup:
        """Return the backup of `states`, in the order in which they were made. Raises ProtocolError."""
        border = Border(prefix_key(tokens), len(tokens)) if from_disk else None
        return cls(tuple(tokens), by_layer(states), border)

    def in_parts(self) -> Iterator[ReceivedBackup]:
        """Yield the layers in parts of about STATE_BYTES, at least one part."""
        part, total = dict[int, Sequence[tuple[Bytes, ...]]](), 0
        for layer, states in self.layers.items():
            part[layer] = states
            total += sum(len(data) for shares in states for data in shares)
            if total >= STATE_BYTES:
                yield replace(self, layers=part)
                part, total = {}, 0
        yield replace(self, layers=part)


@dataclass(frozen=True)
class KeptBackup:
    """The parts of a backup that were received, decoded."""

    tokens: tuple[int, ...]
    border: Border | None
    layers: dict[int, list[Stored]] = field(default_factory=dict)


class StageBackups:
    """The backups that the stage of `span` made, or that the coordinator wrote. `config` is that of its layers."""

    def __init__(self, span: Span, config: ModelConfig) -> None:
        self.span = span
        self.config = config
        self.made: SequenceBackup | None = None
        """The newest backup, until it is read. The plan has room for the GDN states of one."""
        self.received: dict[int, KeptBackup] = {}
        """By sequence, until the sequence is admitted."""

    def make_backup(self, op: BackUp, sequence: SequenceCache, last: LastStageState | None) -> None:
        """Back up a sequence. Raises ProtocolError while it is empty or one of its windows is open."""
        stack = sequence.stack
        if stack.windows or not stack.length or op.start > stack.length:
            raise ProtocolError(f"sequence {op.seq_id} cannot be backed up from token {op.start}")
        self.made = None
        layers, copied = list[LayerArrays](), list[list[mx.array]]()
        for layer, cache in zip(self.span, sequence.layers, strict=True):
            read = partial(cache.backup_arrays, op.start, stack.length)
            if not cache.appends:
                copied.append(read())
                read = partial(list, copied[-1])
            layers.append(LayerArrays(layer, cache.appends, read))
        if last is not None and last.head is not None:
            copied.append(head_arrays(last.head))
            layers.append(LayerArrays(self.span.end, False, partial(list, copied[-1])))
        mx.async_eval(copied)  # lazy copies keep the caches in memory
        self.made = SequenceBackup(op.seq_id, stack.length, layers, self.config.cut)

    def take_backup(self, seq_id: int) -> SequenceBackup:
        """Remove the newest backup, and return it. Raises NotReadyError unless it is one of sequence `seq_id`."""
        backup, self.made = self.made, None
        if backup is None or backup.seq_id != seq_id:
            raise NotReadyError(f"sequence {seq_id} has no backup here")
        return backup

    def begin_reading(self, seq_id: int) -> tuple[SequenceBackup, list[LayerState]]:
        """Return what `take_backup` returns, and its first states."""
        backup = self.take_backup(seq_id)
        return backup, layer_states(backup, 0)

    def forget_sequence(self, seq_id: int) -> None:
        """Drop the backups of a sequence that is evicted."""
        if self.made is not None and self.made.seq_id == seq_id:
            self.made = None
        self.received.pop(seq_id, None)

    def layers_of(self, seq_id: int, tokens: Sequence[int]) -> set[int]:
        """Return the layers of the prefix `tokens` that other workers' disks have given to a sequence."""
        kept = self.received.get(seq_id)
        return {*kept.layers} if kept and kept.border and kept.tokens == tuple(tokens) else set()

    def receive_backup(self, seq_id: int, backup: ReceivedBackup, sequences: int, kv_tokens: int) -> None:
        """Keep a part of a backup, together with the parts that came before.

        Raises ProtocolError when the backups exceed `sequences`, or `kv_tokens` in total, and for malformed bytes.
        """
        before = self.received.pop(seq_id, None)
        tokens = len(backup.tokens) + sum(len(b.tokens) for b in self.received.values())
        if len(self.received) >= sequences or tokens > kv_tokens:
            raise ProtocolError(f"backups of {tokens} tokens exceed the budget of this stage")
        if before is None or (before.tokens, before.border) != (backup.tokens, backup.border):
            before = KeptBackup(backup.tokens, backup.border)
        own = backup.border is not None
        before.layers.update({n: [self.decode(one, own=own) for one in made] for n, made in backup.layers.items()})
        self.received[seq_id] = before

    def decode(self, shares: Sequence[Bytes], *, own: bool) -> Stored:
        """See `decode_state`."""
        return decode_state(shares, member_of(self.config), own=own)

    def restore_backup(self, op: RestoreBackup, sequence: SequenceCache, last: LastStageState | None) -> Border | None:
        """Fill the empty caches of a sequence. Return the border of a prefix on disk. Raises ProtocolError."""
        backup = self.received.pop(op.seq_id, None)
        if backup is None or sequence.stack.length or len(backup.tokens) != op.length:
            raise ProtocolError(f"sequence {op.seq_id} has no backup of {op.length} tokens here")
        member = member_of(self.config)
        filled = []
        for n, empty in zip(self.span, sequence.layers, strict=True):
            if not (states := backup.layers.get(n)):
                raise ProtocolError("the backup lacks a layer of this stage")
            own = [one if isinstance(one, list) else empty.own_share(one, member) for one in states]
            filled.append(empty.with_backups(own, op.length))
        sequence.layers, sequence.stack.length = filled, op.length
        if last is not None:
            if last.head is not None and (states := backup.layers.get(self.span.end)):
                last.head = head_from(states[-1], last.head, member)
            last.append_tokens(backup.tokens)
        return backup.border


def member_of(config: ModelConfig) -> Member:
    """Return the member of a group that holds the layers of `config`."""
    return Member(config.cut.rank, config.cut.size, (config.whole or config).num_kv_heads)


def layer_states(backup: SequenceBackup, index: int, limit: int = STATE_BYTES) -> list[LayerState]:
    """Return the states of layers from the `index`-th on, until they have `limit` bytes."""
    states: list[LayerState] = []
    total, member = 0, (backup.cut.rank, backup.cut.size)
    for found in backup.layers[index:]:
        data = joined_bytes(found.read_arrays())
        states.append(LayerState(found.layer, found.appends, data, *member))
        total += len(data)
        if total >= limit:
            break
    return states
