"""The backup of a sequence on one stage: the state of its layers as bytes, and these bytes as caches again.

All code of this module runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import msgpack
import numpy as np

from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.cut import WHOLE, Cut
from mtp.device import this_device
from mtp.head.drafter import HeadState
from mtp.layers.layer import LayerCache, Member
from proto.backup import LayerState, prefix_key
from proto.errors import NotReadyError, ProtocolError
from proto.frame import BackUp, RestoreBackup
from proto.span import Span
from proto.wire import STATE_NAMES
from worker.cache.sequence_cache import Border, LastStageState, SequenceCache

_DTYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in STATE_NAMES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

READ_BYTES = 2**25
"""Bytes. States that the engine thread copies at once, before the next frame may run. The copy takes about 10 ms. One
layer at a time would let every layer wait for a frame."""

Stored = tuple[bytes, ...] | bytes | list[mx.array]
"""A state in a `ReceivedBackup`: the bytes of all shares, or the bytes or arrays of this member."""


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
    """The state of a sequence after `tokens`, by layer number. It becomes caches when the sequence is admitted.

    The states of a layer are the bytes of all shares that were made together, as from `by_layer`. Those of a prefix on
    disk are bytes or arrays of this member, and its `border` is known. They may come from several disks.
    """

    tokens: tuple[int, ...]
    layers: Mapping[int, Sequence[Stored]]
    border: Border | None = None

    @classmethod
    def from_disk(cls, tokens: tuple[int, ...], states: Iterable[LayerState]) -> ReceivedBackup:
        """Return layers of the prefix `tokens` that another worker's disk had. They are the share of this member."""
        layers: dict[int, list[Stored]] = {}
        for state in states:
            layers.setdefault(state.layer, []).append(state.data)
        return cls(tokens, layers, Border(prefix_key(tokens), len(tokens)))

    def continues(self, tokens: Sequence[int]) -> bool:
        """Return whether these are layers of the prefix `tokens` from a disk."""
        return self.border is not None and self.tokens == tuple(tokens)


class StageBackups:
    """The backups that the stage of `span` made, or that the coordinator wrote. `config` is that of its layers."""

    def __init__(self, span: Span, config: ModelConfig) -> None:
        self.span = span
        self.config = config
        self.made: SequenceBackup | None = None
        """The newest backup, until it is read. The plan has room for the GDN states of one."""
        self.received: dict[int, ReceivedBackup] = {}
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

    def receive_backup(self, seq_id: int, backup: ReceivedBackup, sequences: int, kv_tokens: int) -> None:
        """Keep a backup, together with other layers of the same prefix.

        Raises ProtocolError when the backups exceed `sequences`, or `kv_tokens` in total.
        """
        before = self.received.pop(seq_id, None)
        if before is not None and backup.border is not None and before.continues(backup.tokens):
            backup = replace(backup, layers={**before.layers, **backup.layers})
        tokens = len(backup.tokens) + sum(len(b.tokens) for b in self.received.values())
        if len(self.received) >= sequences or tokens > kv_tokens:
            raise ProtocolError(f"backups of {tokens} tokens exceed the budget of this stage")
        self.received[seq_id] = backup

    def restore_backup(self, op: RestoreBackup, sequence: SequenceCache, last: LastStageState | None) -> Border | None:
        """Fill the empty caches of a sequence. Return the border of a prefix on disk. Raises ProtocolError."""
        backup = self.received.pop(op.seq_id, None)
        if backup is None or sequence.stack.length or len(backup.tokens) != op.length:
            raise ProtocolError(f"sequence {op.seq_id} has no backup of {op.length} tokens here")
        member = member_of(self.config)
        filled = []
        for n, empty in zip(self.span, sequence.layers, strict=True):
            states = [_arrays(stored, empty, member) for stored in backup.layers.get(n, ())]
            if not states:
                raise ProtocolError("the backup lacks a layer of this stage")
            filled.append(empty.with_backups(states, op.length))
        sequence.layers, sequence.stack.length = filled, op.length
        if last is not None:
            if last.head is not None and (data := backup.layers.get(self.span.end)):
                last.head = head_from(data[-1], last.head, member)
            last.append_tokens(backup.tokens)
        return backup.border


def member_of(config: ModelConfig) -> Member:
    """Return the member of a group that holds the layers of `config`."""
    return Member(config.cut.rank, config.cut.size, (config.whole or config).num_kv_heads)


def layer_states(backup: SequenceBackup, index: int, limit: int = READ_BYTES) -> list[LayerState]:
    """Return the states of layers from the `index`-th on, until they have `limit` bytes."""
    states: list[LayerState] = []
    total, member = 0, (backup.cut.rank, backup.cut.size)
    for found in backup.layers[index:]:
        arrays = found.read_arrays()
        plain = [np.array(host_array(array), copy=False) for array in arrays]
        parts = zip(arrays, plain, strict=True)
        data = msgpack.packb([(type_name(a), tuple(a.shape), p.tobytes()) for a, p in parts])
        states.append(LayerState(found.layer, found.appends, data, *member))
        total += len(data)
        if total >= limit:
            break
    return states


# ---- the state of the MTP head


def head_arrays(head: HeadState) -> list[mx.array]:
    """Return the state of the MTP head as arrays, of which the first has its numbers."""
    held = head.cache.backup_arrays(0) if head.cache.offset else []
    newest = [] if head.newest is None else [head.newest]
    waiting = [mx.concatenate(head.waiting_hidden)] if head.waiting_hidden else []
    counts = head.cache.offset, len(held), head.waiting_tokens, len(newest), head.successor
    numbers = mx.array(np.frombuffer(msgpack.packb(counts), np.uint8))
    return [numbers, *held, *newest, *waiting]


def head_from(data: Stored, empty: HeadState, member: Member) -> HeadState:
    """Return the state of the head in `data`. Raises ProtocolError if it is malformed."""
    try:
        mine = not isinstance(data, tuple)
        if isinstance(data, list):
            shares = [data]
        else:
            made = data if isinstance(data, tuple) else (data,)
            shares = [[array_of(*wire) for wire in _unpack(one)] for one in made]
        numbers, *arrays = shares[0]  # as on all members, but for the heads of the cache
        offset, count, tokens, newest, successor = _unpack(np.array(numbers).tobytes())
        own, rest = arrays[:count], arrays[count:]
        if own and not mine:
            own = [*empty.cache.own_share([share[1 : 1 + count] for share in shares], member)]
        cache = empty.cache.with_backups([own], offset) if own else empty.cache
        found = rest.pop(0) if newest else None
        return HeadState(cache, found, successor, rest, [int(token) for token in tokens])
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ProtocolError(f"malformed backup of the MTP head: {error}") from error


# ---- arrays


def plain_array(array: mx.array) -> mx.array:
    """Return `array` as a type that numpy has. Evaluate both together, or `to_bytes` waits for the GPU once more."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def host_array(array: mx.array) -> mx.array:
    """Return the bits of `array` for numpy. On CUDA a read moves memory that others may share, so they are a copy."""
    plain = plain_array(array)
    if this_device().backend != "cuda":
        return plain
    words = plain.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[plain.itemsize])
    return mx.bitwise_or(words, mx.array(0, words.dtype))


def type_name(array: mx.array) -> str:
    """Return the name of an array's type on the wire and on disk."""
    return _NAMES[array.dtype]


def array_of(name: str, shape: Sequence[int], data: Any) -> mx.array:
    """Return the array of type `name` in the buffer `data`."""
    dtype = _DTYPES[name]
    plain = "uint16" if dtype == mx.bfloat16 else name
    array = mx.array(np.frombuffer(data, dtype=plain).reshape(shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array


def _arrays(data: Stored, empty: LayerCache, member: Member) -> Sequence[mx.array]:
    """Return the arrays of the layer of `empty` as this member holds them."""
    if isinstance(data, list):
        return data
    try:
        if isinstance(data, bytes):
            return [array_of(*wire) for wire in _unpack(data)]
        # In a group of the same size, each member needs its own share only.
        own = data if len(data) != member.size else data[member.rank : member.rank + 1]
        shares = [[array_of(*wire) for wire in _unpack(one)] for one in own]
        return shares[0] if own is not data else empty.own_share(shares, member)
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"malformed backup of a layer: {error}") from error


def _unpack(data: bytes) -> Any:
    # Every element of an array takes at least one byte, so the length of the data bounds the memory.
    return msgpack.unpackb(data, max_bin_len=len(data), max_array_len=len(data))
