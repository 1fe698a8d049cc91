"""A sequence that is restored from a backup continues exactly, on stages with other spans."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import mlx.core as mx
import msgpack
import numpy as np
import pytest

from mtp.device import DEVICES
from mtp.head.drafter import HeadState
from mtp.layers.kv_cache import PairKV, PlainKV, QuantizedKV
from mtp.layers.layer import KVFormat, Member
from mtp.layers.sparse_attention import IndexedKV
from proto.backup import LayerState, by_layer
from proto.errors import ProtocolError
from proto.frame import Admit, BackUp, Evict, Outcome, RestoreBackup, RestorePrefix, SavePrefix
from proto.params import SamplingParams
from tests.conftest import Checkpoints
from tests.support.stages.chain import Chain, Script, random_tokens, same
from worker.engine.stage_backups import LayerArrays, ReceivedBackup, SequenceBackup, layer_states
from worker.engine.state_codec import (
    decode_arrays,
    decode_state,
    head_arrays,
    head_from,
    host_array,
    joined_bytes,
    plain_array,
)

SAVED, EARLIER, LONG = 11, 5, 17
"""Tokens of the backup, of an earlier backup that it continues, and of the prompt."""

PARAMS = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.4, logprobs=2)


def read_states(backups: Iterable[SequenceBackup]) -> list[LayerState]:
    """Return the states of the backups of all stages."""
    states = []
    for newest in backups:
        read: list[LayerState] = []
        while more := layer_states(newest, len(read), limit=1500):
            read += more
        states += read
    return states


def continued(chain: Chain, script: Script) -> list[Outcome]:
    """Feed the rest of the prompt, then decode with drafts. Return all outcomes."""
    outcomes = [script.run(chain, script.chunk(LONG, drafts=3))]
    return outcomes + [script.run(chain, script.next_window(drafts=3)) for _ in range(6)]


@pytest.mark.parametrize("bits", [None, 4])
def test_a_restored_backup_equals_a_prefill(checkpoints: Checkpoints, bits: int | None) -> None:
    """Tokens, drafts, log-probabilities and states are bit-equal, after two backups and a change of all spans.

    Each backup is read after the tokens that follow it.
    """
    path, text, form = checkpoints(layers=4), random_tokens(LONG), KVFormat(bits, 32)
    source, script = Chain(path, (2,), form), Script(0, text, PARAMS)
    kept: dict[int, list[LayerState]] = defaultdict(list)
    script.run(source, script.chunk(EARLIER, sample=False))
    for start, end, following in ((0, EARLIER, SAVED), (EARLIER, SAVED, LONG)):
        source.send(ops=[BackUp(0, start)])
        made = [engine.backups.take_backup(0) for engine in source.engines]
        script.run(source, script.chunk(following - end, sample=False))
        for state in read_states(made):
            if not state.appends:
                kept[state.layer].clear()
            kept[state.layer].append(state)
    assert sorted(kept) == [0, 1, 2, 3, 4], "every layer, and the MTP head"

    target, restored = Chain(path, (1, 3), form), Script(7, text, PARAMS)
    for engine in target.engines:
        states = by_layer(state for layer in kept.values() for state in layer)
        engine.receive_backup(7, ReceivedBackup(tuple(text[:SAVED]), states))
    restored.scheduled = SAVED
    restored.ops += [RestoreBackup(7, SAVED), SavePrefix(7, 0)]
    fresh, reader = Chain(path, (1, 3), form), Script(7, text, PARAMS)
    reader.run(fresh, reader.chunk(EARLIER, sample=False))
    reader.run(fresh, reader.chunk(SAVED - EARLIER, sample=False))
    restored.number = reader.number
    answer = continued(fresh, reader)
    assert continued(target, restored) == answer
    assert same(target.state(7), fresh.state(7))
    assert same(target.head_state(7), fresh.head_state(7))
    assert mx.array_equal(target.logits[7], fresh.logits[7])
    assert all(engine.backups.received == {} for engine in target.engines)
    again = Script(8, text, PARAMS)
    again.ops.append(RestorePrefix(8, 0))
    again.scheduled, again.number = SAVED, 2
    assert [o.token for o in continued(target, again)] == [o.token for o in answer]
    assert same(target.state(8), fresh.state(7))


@pytest.mark.parametrize("empty", [PairKV(), PlainKV(), QuantizedKV(32, 4), IndexedKV(4)])
def test_a_head_of_every_cache_is_restored(empty: PairKV | PlainKV | QuantizedKV | IndexedKV) -> None:
    """The state of an MTP head has the same keys and values again, whatever its layer holds them in."""
    rows = [mx.random.normal((1, 2, SAVED, 32)) for _ in range(2)]
    cache = copy.deepcopy(empty)
    if isinstance(cache, IndexedKV):
        cache.append_index(mx.random.normal((SAVED, 32)))
        cache.update_and_fetch(*rows)
        cache.block_keys(lambda keys, _: keys[::4])
    else:
        cache.update_and_fetch(*rows)
    backup = SequenceBackup(0, SAVED, [LayerArrays(4, False, partial(head_arrays, HeadState(cache)))])
    stored = decode_state([layer_states(backup, 0)[0].data], Member())
    found = head_from(stored, HeadState(empty), Member())
    assert found.cache.offset == SAVED
    held, wanted = (one.backup_arrays(0) for one in (found.cache, cache))
    assert all(map(mx.array_equal, held, wanted))


def test_bytes_of_an_earlier_version_are_decoded() -> None:
    """msgpack has three kinds of bytes by their length. A part of a state, or more than one, is malformed."""
    shapes = [(3,), (2, 200), (70_000,), (0,)]
    arrays = [mx.random.randint(0, 99, shape).astype(mx.uint32) for shape in shapes]
    earlier = msgpack.packb([("uint32", one.shape, np.array(one).tobytes()) for one in arrays])
    for data in (earlier, bytearray(joined_bytes(arrays))):
        assert all(map(mx.array_equal, decode_arrays(data), arrays))
    for wrong in (*(earlier[:n] for n in range(0, 2000, 7)), earlier[:-1], earlier + b"0", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError, match="malformed"):
            decode_arrays(wrong)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint32])
def test_the_host_reads_other_memory_on_cuda(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX moves what the host reads there, and a running sequence may share the memory. The bytes are the same."""
    x = mx.random.normal((3, 5), key=mx.random.key(0)).astype(dtype)
    expected = bytes(plain_array(x))
    monkeypatch.setattr("worker.engine.state_codec.this_device", lambda: DEVICES["cuda"])
    found = host_array(x)
    assert bytes(found) == expected
    assert np.array(found, copy=False).ctypes.data != np.array(plain_array(x), copy=False).ctypes.data


def test_a_backup_that_does_not_fit_is_refused(checkpoints: Checkpoints) -> None:
    """A missing layer fails the frame, malformed bytes fail before it, and Evict drops a backup that waits."""
    chain = Chain(checkpoints(layers=4))
    (engine,) = chain.engines
    script = Script(0, random_tokens(4))
    script.run(chain, script.chunk(4))
    for data in ((), (b"x",), (b"\x90",)):
        layers = {layer: [data] if data else [] for layer in range(5)}
        with pytest.raises(ProtocolError, match="backup"):  # noqa: PT012 - bytes are decoded as they come
            engine.receive_backup(1, ReceivedBackup((1, 2), layers))
            engine.backups.restore_backup(RestoreBackup(1, 2), engine.stage.new_sequence(Admit(1, 100, 2)), None)
    engine.receive_backup(2, ReceivedBackup((1, 2), {}))
    chain.send(ops=[Evict(2)])
    assert engine.backups.received == {}
