"""The bytes of hidden states: every dtype and layout survives the way over a hop."""

from __future__ import annotations

import mlx.core as mx
import pytest

from worker.engine.stage_backups import array_of, plain_array
from worker.engine.stage_engine import to_bytes


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "transposed", "every second column"])
def test_hidden_states_survive_the_hop(dtype: mx.Dtype, layout: str) -> None:
    """`array_of` gives the array of `to_bytes`, also if the array is not contiguous."""
    x = mx.random.normal((4, 6)).astype(dtype)
    x = {"rows": x, "transposed": x.T, "every second column": x[:, ::2]}[layout]
    name, shape, data = to_bytes(x, plain_array(x))
    assert data.nbytes == x.nbytes and shape == x.shape
    for received in (data, bytes(data)):
        y = array_of(name, shape, received)
        assert y.dtype == dtype
        assert mx.array_equal(x, y)
