"""The GPU computes what the CPU computes, within tolerances. `MTP_TEST_GPU=1` runs these tests where MLX has a GPU.

All other tests use the CPU, whose rows are bit-equal in any batch. A GPU rounds differently for different numbers of
rows, and some round fp32 products to TF32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.conftest import Checkpoints
from tests.support.stages.chain import Chain, Script, random_tokens

GPU = "MTP_TEST_GPU"

WIDTHS = (21, 1, 2, 3, 4, 5, 8, 1)
"""Rows of each frame: a prompt, then every width of a window that the planner may choose, and a single row."""

TOLERANCE = 0.02
"""Largest difference of logits over the largest logit. TF32 has 10 bits of mantissa, and 8 layers add to its error."""


@pytest.fixture(scope="module", autouse=True)
def _gpu_required() -> None:
    if os.environ.get(GPU) != "1":
        pytest.skip(f"{GPU}=1 is not set")
    if mx.device_count(mx.gpu) == 0:
        pytest.skip("MLX has no GPU here")


@contextmanager
def computing_on(device: mx.DeviceType) -> Iterator[None]:
    """Make `device` MLX's default inside the block."""
    before = mx.default_device()
    mx.set_default_device(mx.Device(device))
    try:
        yield
    finally:
        mx.set_default_device(before)


def chain_logits(path: Path, cuts: tuple[int, ...], widths: tuple[int, ...]) -> list[mx.array]:
    """Return the logits after each frame of `widths` rows of one fixed text, in fp32."""
    chain, script = Chain(path, cuts), Script(0, random_tokens(sum(widths)))
    found = []
    for width in widths:
        chain.send(script.chunk(width), ops=script.due())
        found.append(chain.logits[0][0].astype(mx.float32))
    mx.eval(found)
    return found


def largest_error(found: list[mx.array], expected: list[mx.array]) -> float:
    """Return the largest difference over the largest expected value."""
    return max(_largest(a - b) for a, b in zip(found, expected, strict=True)) / max(map(_largest, expected))


def _largest(x: mx.array) -> float:
    value = mx.abs(x).max().item()
    assert isinstance(value, float)
    return value


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    # MLX 0.32.4 multiplies 64 inputs in one group of 64 wrongly on CUDA, from two rows on.
    "4 bit": {"layout": "mlx", "quantize": 4, "hidden": 128},
    "experts": {"moe": True},
}


@pytest.mark.parametrize("cuts", [(), (2, 5)], ids=["whole", "cut"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_gpu_logits_are_near_those_of_the_cpu(
    checkpoints: Checkpoints, options: dict[str, Any], cuts: tuple[int, ...]
) -> None:
    """Logits on the GPU differ from the CPU's by at most TOLERANCE, for every number of rows."""
    path = checkpoints(**options)
    with computing_on(mx.cpu):
        expected = chain_logits(path, cuts, WIDTHS)
    with computing_on(mx.gpu):
        found = chain_logits(path, cuts, WIDTHS)
    assert largest_error(found, expected) < TOLERANCE


def test_a_text_does_not_depend_on_the_frames_within_tolerance(checkpoints: Checkpoints) -> None:
    """On the GPU the logits after a text are the same, within TOLERANCE, for one frame and for many."""
    path = checkpoints()
    with computing_on(mx.gpu):
        at_once = chain_logits(path, (), (sum(WIDTHS),))[-1:]
        in_parts = chain_logits(path, (), WIDTHS)[-1:]
    assert largest_error(in_parts, at_once) < TOLERANCE
