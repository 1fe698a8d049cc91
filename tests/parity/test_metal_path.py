"""The Metal path on a CPU: the runner of Metal kernels, the check of their address spaces, and what a Mac chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import Checkpoints
from tests.support.checkpoints import checkpoints as written
from tests.support.metal.address_spaces import AddressSpaceError
from tests.support.metal.metal_path import metal_path
from tests.support.metal.runner import MetalError, metal_kernel, reason_not_to_run, runs
from tests.support.stages.chain import Chain, Script

pytestmark = pytest.mark.skipif(reason_not_to_run() is not None, reason=reason_not_to_run() or "Metal kernels run")

REVERSE = """
  threadgroup float shared[64];
  const uint i = thread_index_in_threadgroup;
  shared[i] = x[i];
  BARRIER
  y[i] = shared[63 - i];
"""
"""A kernel that needs a barrier."""


@pytest.fixture(autouse=True)
def a_mac() -> Iterator[None]:
    """Run what a Mac would."""
    with metal_path():
        yield


def run(source: str, x: mx.array, **options: Any) -> mx.array:
    """Run a kernel with one input and one output of the same shape, one thread for each element."""
    kernel = metal_kernel("tried", ["x"], ["y"], source, **options)
    size = (x.size, 1, 1)
    arguments = {"grid": size, "threadgroup": size, "output_shapes": [x.shape]}
    return kernel(inputs=[x], output_dtypes=[x.dtype], **arguments)[0]


def test_a_missing_barrier_changes_the_result() -> None:
    """Threads run in a random order, so a kernel that needs a barrier fails without it in every launch."""
    x = mx.arange(64, dtype=mx.float32)
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    for _ in range(10):
        assert mx.array_equal(run(REVERSE.replace("BARRIER", barrier), x), x[::-1])
        assert not mx.array_equal(run(REVERSE.replace("BARRIER", ""), x), x[::-1])


TURNS = """
  threadgroup uint turn[1];
  const uint i = thread_index_in_threadgroup;
  if (i == 0) turn[0] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = turn[0]++;
"""
"""A kernel whose outputs are the order in which its threads run. Fibers change only where they wait."""


def test_every_launch_has_another_order() -> None:
    """Launches of one kernel run its threads in different orders, and all threads of each."""
    x = mx.zeros((64,), mx.int32)
    orders = [tuple(np.array(run(TURNS, x))) for _ in range(8)]
    assert len(set(orders)) == 8
    assert all(sorted(order) == list(range(64)) for order in orders)


WRONG = {
    "a barrier that half of the threads reach": (
        "if (thread_index_in_threadgroup < 32) threadgroup_barrier(mem_flags::mem_threadgroup);",
        "never come",
    ),
    "a shuffle beside a sum": (
        "if (thread_index_in_simdgroup < 16) y[0] = simd_sum(x[0]); else y[0] = simd_shuffle_xor(x[0], 1);",
        "different things",
    ),
    "a write behind the end": ("y[x_shape[0]] = x[0];", "outside an output"),
    "a name that Metal lacks": ("y[0] = warp_sum(x[0]);", "warp_sum"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_kernel_that_fails_on_a_mac_fails_here(kind: str) -> None:
    """Barriers that only some threads reach, writes outside outputs and unknown names are errors."""
    source, message = WRONG[kind]
    with pytest.raises((MetalError, AddressSpaceError), match=message):
        run(source, mx.zeros((64,)))


def test_an_output_that_is_not_written_is_nan() -> None:
    """A kernel cannot rely on zeros in its outputs or in the memory of its threadgroup."""
    shared = "threadgroup float held[64]; if (thread_index_in_threadgroup) y[0] = held[0];"
    assert mx.isnan(run(shared, mx.zeros((64,)))).all().item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.int32])
def test_every_type_is_passed_and_rounded_as_in_mlx(dtype: mx.Dtype) -> None:
    """Numbers reach a kernel unchanged, and results are rounded as MLX rounds them."""
    x = (mx.random.normal((64,), key=mx.random.key(1)) * 100).astype(dtype)
    source = "const uint i = thread_position_in_grid.x; y[i] = static_cast<T>(float(x[i]) / 3.0f);"
    kernel = metal_kernel("third", ["x"], ["y"], source)
    arguments = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "template": [("T", dtype)]}
    found = kernel(inputs=[x], output_shapes=[(64,)], output_dtypes=[dtype], **arguments)[0]
    assert mx.array_equal(found, (x.astype(mx.float32) / 3).astype(dtype))


@pytest.mark.parametrize(("space", "size"), [("device", 64), ("constant", 4)])
def test_a_pointer_needs_the_space_of_its_target(space: str, size: int) -> None:
    """MLX passes arrays of fewer than 8 elements as `constant`, and a pointer to `device` memory is refused then."""
    source = "const {} float* from = x; y[thread_position_in_grid.x] = from[0];"
    x = mx.ones((size,))
    assert mx.array_equal(run(source.format(space), x), x)
    other = {"device": "constant", "constant": "device"}[space]
    with pytest.raises(AddressSpaceError, match=r"const .* float\* from = x"):
        run(source.format(other), x)


@pytest.mark.parametrize(("dim", "kernel"), [(128, "gated_delta_window"), (32, "gated_delta_step")])
def test_a_stage_runs_a_kernel(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, dim: int, kernel: str
) -> None:
    """Each of three GDN layers launches a kernel once for a prompt: ours, or mlx-lm's for other dimensions."""
    monkeypatch.setattr(written, "GDN_DIM", dim)
    chain = Chain(checkpoints(layers=4, seed=dim))
    script = Script(0, [1, 2, 3])
    count = runs[kernel]
    script.run(chain, script.chunk(3))
    assert runs[kernel] == count + 3
