"""The kernels of this project in Metal against their reference in MLX's operations.

They run on a CPU, or on the GPU of a Mac where `MTP_TEST_GPU=1` is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest

from mtp.layers.fused.attention import prepare_rows
from mtp.layers.fused.fuse import gated_delta_window
from mtp.layers.gdn_windows import HEAD_DIM, TAPS, GatedDeltaShape, WindowKernel
from mtp.layers.linear import add_norm
from mtp.layers.prepare_rows import AttentionShape
from mtp.layers.source_kernel import MetalKernel
from tests.parity.test_gpu import GPU, computing_on
from tests.support.metal.metal_path import metal_path
from tests.support.metal.runner import reason_not_to_run
from tests.support.stages import reference_kernels, row_kernels
from tests.support.stages.row_kernels import TOLERANCE, error

ON_MAC = os.environ.get(GPU) == "1" and mx.metal.is_available()
"""True if the kernels run on a Mac's GPU, and not on a CPU."""

REASON = None if ON_MAC else reason_not_to_run()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "Metal kernels run")


@pytest.fixture(autouse=True)
def a_mac() -> Iterator[None]:
    """Run the kernels that a Mac runs."""
    with computing_on(mx.gpu) if ON_MAC else metal_path():
        yield


SHAPE = GatedDeltaShape(2, 4)
DELTA = GatedDeltaShape(3, 3, silu=False, decays=HEAD_DIM)
"""Kimi Delta Attention."""
TYPES = [mx.bfloat16, mx.float16, mx.float32]
Arrays = tuple[mx.array, ...]


class Case:
    """A layer of random weights with `slots` states, and rows of the past and of now."""

    def __init__(self, dtype: mx.Dtype, slots: int, shape: GatedDeltaShape = SHAPE, bound: float = 0.0) -> None:
        mx.random.seed(slots)
        self.shape = shape
        normal = mx.random.normal
        self.rows = normal((64, shape.row)).astype(dtype)
        self.past = normal((40, shape.row)).astype(dtype)
        self.conv = normal((slots, TAPS - 1, shape.channels)).astype(dtype)
        self.state = 0.1 * normal((slots, shape.value_heads, HEAD_DIM, HEAD_DIM))
        self.constants: Arrays = (
            (0.3 * normal((shape.channels, TAPS))).astype(dtype),
            0.5 * normal((shape.value_heads,)),
            0.5 * normal((shape.value_heads * shape.decays,)),
            (1 + 0.1 * normal((HEAD_DIM,))).astype(dtype),
            mx.array([1e-6, bound]),
        )

    def run(self, spans: Sequence[tuple[int, ...]], kernel: WindowKernel = gated_delta_window) -> Arrays:
        """Return outputs and saved states of `kernel`."""
        held = mx.array(list(spans), dtype=mx.int32)
        return kernel(self.shape, self.rows, self.past, self.conv, self.state, held, self.constants)


@pytest.mark.parametrize(
    ("batch", "shape", "bound"), [*((n, SHAPE, 0.0) for n in range(1, 9)), (3, DELTA, -5.0), (2, DELTA, 0.0)]
)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_window_equals_the_reference(dtype: mx.Dtype, batch: int, shape: GatedDeltaShape, bound: float) -> None:
    """Sequences of one launch have their own slot, past, width and place where the state is saved."""
    case = Case(dtype, batch, shape, bound)
    spans, start = [], 0
    for i in range(batch):
        past, width = (3 * i) % 5, 1 + (5 * i + batch) % 7
        saved = past if i % 2 else past + width
        spans.append((batch - 1 - i, 4 * i, past, start, width, saved))
        start += width
    found, expected = case.run(spans), case.run(spans, reference_kernels.gated_delta_window)
    limit = TOLERANCE[dtype]
    assert error(found[0][:start], expected[0][:start]) < limit
    assert mx.array_equal(found[1], expected[1])
    assert error(found[2], expected[2]) < limit


@pytest.mark.parametrize("width", range(1, 17))
@pytest.mark.parametrize("dtype", TYPES)
def test_steps_are_a_window(dtype: mx.Dtype, width: int) -> None:
    """Outputs and states of T tokens at once are those of T single steps, bit for bit, alone and in a batch."""
    case = Case(dtype, 3)
    conv, state, outputs = case.conv[2:], case.state[2:], []
    for i in range(width):
        span = mx.array([[0, 0, 0, i, 1, 1]], dtype=mx.int32)
        out, conv, state = gated_delta_window(SHAPE, case.rows, case.past, conv, state, span, case.constants)
        outputs.append(out[i : i + 1])
    at_once = case.run([(1, 2, 3, width, 5, 8), (2, 0, 0, 0, width, width)])
    assert mx.array_equal(at_once[0][:width], mx.concatenate(outputs))
    assert mx.array_equal(at_once[1][1], conv[0]) and mx.array_equal(at_once[2][1], state[0])


def test_a_replay_saves_the_state_of_the_accepted_tokens() -> None:
    """The past rows of a window, run again as far as they were accepted, give the state of these tokens alone."""
    case = Case(mx.bfloat16, 1)
    case.past = case.rows
    for accepted in range(6):
        replayed = case.run([(0, 0, accepted, 5, 1, accepted)])
        alone = case.run([(0, 0, 0, 0, accepted, accepted)])
        assert mx.array_equal(replayed[1], alone[1]) and mx.array_equal(replayed[2], alone[2])


HEADS = AttentionShape(4, 2, 64)
WIDE = 256


@pytest.mark.parametrize("rows", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", TYPES)
def test_prepared_heads_equal_the_reference(dtype: mx.Dtype, rows: int) -> None:
    """Rows of any positions are normed and rotated as by MLX's operations in fp32, and values are copied."""
    mx.random.seed(rows)
    q, kv, gate = (mx.random.normal((rows, n, WIDE)).astype(dtype) for n in (4, 4, 4))
    norms = tuple((1 + 0.1 * mx.random.normal((WIDE,))).astype(dtype) for _ in range(2))
    constants = (*norms, mx.power(1e7, -mx.arange(0, 64, 2) / 64), mx.array([1e-6]))
    places = mx.array([(0, 7 * row * row + row % 2) for row in range(rows)], dtype=mx.int32)
    x = mx.concatenate([t.reshape(rows, -1) for t in (q, kv, gate)], axis=1)
    found_q, found = prepare_rows(HEADS, x, places, constants)
    # On an NVIDIA GPU a row has query and gate of each head in turn.
    both = mx.concatenate([q, gate], axis=2).reshape(rows, -1)
    rows_there = mx.concatenate([both, kv.reshape(rows, -1)], axis=1)
    expected_q, expected = reference_kernels.prepare_rows(HEADS, rows_there, places, constants)
    assert error(found_q, expected_q) < TOLERANCE[dtype]
    assert error(found[0], expected[0]) < TOLERANCE[dtype]
    assert mx.array_equal(found[1], expected[1])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_residual_and_its_norm_equal_mlxs(dtype: mx.Dtype, rows: int) -> None:
    """The sum has MLX's bits, and the norm its value, for widths that threads do not divide."""
    x, y = (mx.random.normal((rows, 1100)).astype(dtype) for _ in range(2))
    weight = mx.random.normal((1100,)).astype(dtype)
    total, normed = add_norm(x, y, weight, 1e-6, True)
    assert mx.array_equal(total, x + y)
    assert error(normed, mx.fast.rms_norm(x + y, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        pytest.param(dtype, rows, marks=() if (number, rows) in {(0, 1), (1, 3)} else pytest.mark.slow)
        for rows in (1, 3)
        for number, dtype in enumerate(TYPES)
    ],
)
def test_experts_and_streams_equal_the_operations(dtype: mx.Dtype, rows: int) -> None:
    """The sources that NVIDIA GPUs share compute what MLX's operations do."""
    row_kernels.check_experts(MetalKernel, dtype, rows)
    row_kernels.check_streams(MetalKernel, dtype, rows)
    row_kernels.check_hyper_connections(MetalKernel, dtype, 4 * rows - 1)


@pytest.mark.parametrize(("columns", "count"), [(512, 512), (70_000, 512)])
def test_the_choice_of_blocks_equals_two_sorts(columns: int, count: int) -> None:
    """Equal ranks keep their order, also where a thread reads many of them."""
    row_kernels.check_choice(MetalKernel, columns, count)


@pytest.mark.parametrize(("weighted", "rejected"), [(False, None), (True, None), (True, 0), (False, 2)])
def test_queries_read_the_tokens_of_chosen_blocks(weighted: bool, rejected: int | None) -> None:
    """They are those that MLX's operations choose."""
    row_kernels.check_reads(MetalKernel, weighted=weighted, rejected=rejected)
