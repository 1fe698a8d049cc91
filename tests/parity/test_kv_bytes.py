"""A step writes the K/V of its own tokens and copies no cache, whatever refers to the cache.

MLX writes into the memory of an array if nothing else refers to it. Otherwise it copies the array, to another address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.cuda.row_attention import InPlaceKV
from mtp.layers.kv_cache import KVRows
from mtp.layers.layer import KVFormat
from proto.frame import Admit, Segment
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints import checkpoints as written
from tests.support.metal.metal_path import metal_path
from tests.support.metal.runner import reason_not_to_run
from tests.support.stages.reference_kernels import reference_kernels
from worker.cache.sequence_cache import SequenceCache, arrays_of, copies_of
from worker.model.loader import load_stage
from worker.model.stage import StageForward

PROMPT = 40
CAPACITY = 128
WIDTH = 3


PATHS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "cpu": nullcontext,
    "metal": metal_path,
    "cuda": reference_kernels,
}
"""The choice of the layers of each backend. Operations of the CPU stand for the CUDA kernels."""


@pytest.fixture(params=PATHS)
def stage(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StageForward]:
    """Four layers, the last with attention, as a CPU, a Mac or an NVIDIA GPU runs them."""
    if request.param == "metal" and (reason := reason_not_to_run()):
        pytest.skip(reason)
    monkeypatch.setattr(written, "GDN_DIM", 128)
    monkeypatch.setattr(written, "HEAD_DIM", 256)
    form: dict[str, Any] = {"layout": "mlx", "quantize": 4, "hidden": 128, "dtype": mx.float16}
    path = checkpoints(layers=4, seed=4, **(form if request.param == "cuda" else {}))
    with PATHS[request.param]():
        modules = load_stage(Checkpoint.open(path), Span(0, 4), first=True, last=True, dtype=None, with_head=False)
        stage = StageForward(modules, KVFormat())
        assert request.param != "cuda" or stage.variants.summary == "4 packed"
        yield stage


def kv_of(sequence: SequenceCache) -> list[mx.array]:
    """Return the arrays of keys and values."""
    arrays = [a for c in sequence.layers if isinstance(c, KVRows) for a in c.arrays()]
    return [array for array in arrays if array.ndim > 1]


def places(sequences: list[SequenceCache]) -> list[tuple[int, int]]:
    """Return address and size of every array of keys and values."""
    arrays = [array for sequence in sequences for array in kv_of(sequence)]
    mx.eval(arrays)
    return [(np.array(a, copy=False).__array_interface__["data"][0], a.nbytes) for a in arrays]


class Texts:
    """Two sequences that run together."""

    def __init__(self, stage: StageForward) -> None:
        self.stage = stage
        self.sequences = [stage.new_sequence(Admit(i, CAPACITY, 6)) for i in range(2)]
        self.number = 0
        self.run(PROMPT, stays_open=False)

    def run(self, width: int, *, stays_open: bool) -> int:
        """Run a window of every sequence. Return the bytes of K/V that this wrote."""
        before = places(self.sequences)
        self.number += 1
        runs = []
        for i, sequence in enumerate(self.sequences):
            tokens = tuple(range(i + 1, i + 1 + width))
            place = sequence.stack.length
            runs.append((sequence, Segment(i, self.number, place, tokens, open=stays_open)))
        x = self.stage.embed(mx.array([t for _, segment in runs for t in segment.tokens]))
        mx.eval(self.stage.forward(x, runs))
        return sum(
            self.token_bytes * width if was == now else now[1]
            for was, now in zip(before, places(self.sequences), strict=False)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one array of keys and values."""
        array = kv_of(self.sequences[0])[0]
        return array.nbytes // array.shape[2]

    @property
    def step_bytes(self) -> int:
        """Bytes of the K/V of a token of both sequences."""
        return self.token_bytes * len(kv_of(self.sequences[0])) * len(self.sequences)

    def commit(self, number: int, accepted: int) -> None:
        for sequence in self.sequences:
            sequence.commit_window(number, accepted, in_header=True)


def test_a_plain_step_writes_its_token(stage: StageForward) -> None:
    """Steps that stay within the room of a cache write in place."""
    texts = Texts(stage)
    found = [texts.run(1, stays_open=False) for _ in range(3)]
    assert found == [texts.step_bytes] * 3


def test_open_and_rejected_windows_copy_nothing(stage: StageForward) -> None:
    """Windows that build on open windows, and windows after a rejection, write their own tokens."""
    texts = Texts(stage)
    expected = WIDTH * texts.step_bytes
    assert [texts.run(WIDTH, stays_open=True) for _ in range(3)] == [expected] * 3
    texts.commit(2, 3)
    texts.commit(3, 1)
    assert texts.run(WIDTH, stays_open=True) == expected


@pytest.mark.parametrize("kind", ["prefix", "backup"])
def test_a_copy_of_the_state_does_not_make_the_next_step_copy(stage: StageForward, kind: str) -> None:
    """A prefix entry or a backup holds memory of its own, so steps write in place while it lives."""
    texts = Texts(stage)
    held: list[Any] = []
    for sequence in texts.sequences:
        if kind == "prefix":
            held += arrays_of(copies_of(sequence.layers))
        else:
            held += [a for c in sequence.layers for a in c.backup_arrays(8)]
    mx.eval(held)
    kept = [np.array(array) for array in held]
    found = [texts.run(1, stays_open=False) for _ in range(2)]
    assert found == [texts.step_bytes] * 2
    assert all(np.array_equal(a, b) for a, b in zip(kept, held, strict=True))


def test_a_cache_that_something_refers_to_is_copied(stage: StageForward) -> None:
    """The count shows it. A kernel for NVIDIA GPUs writes in place all the same, behind the tokens that are read."""
    texts = Texts(stage)
    caches = [cast(KVRows, s.layers[3]) for s in texts.sequences]
    held = [[part[:, :, :8] for part in kv_of(sequence)] for sequence in texts.sequences]
    mx.eval(held)
    found = texts.run(1, stays_open=False)
    in_place = isinstance(caches[0], InPlaceKV)
    assert found == texts.step_bytes if in_place else found > 8 * texts.step_bytes
