"""The layers for MLX's CPU backend give the bits of mlx-lm's modules in fp32, and the same row in any frame in bf16."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers import rope
from mtp.layers.fused import fuse
from mtp.layers.fused.fuse import ColumnLinear, FusedMLP, Fuser, RowNorm
from mtp.layers.layer import Hole, KVFormat, Layer
from mtp.layers.reference import reference_layer
from mtp.layers.reference.gdn import advance_state
from proto.span import Span
from tests.conftest import Checkpoints
from worker.model.loader import load_stage
from worker.model.stage import Stage

HIDDEN = 48
WIDTHS = (1, 3, 3, 1, 8)
"""Rows of the sequences of a frame."""

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu) or sys.platform == "darwin",
    reason="these layers are for the reference BLAS of MLX on Linux",
)


def layer_of(*, linear: bool) -> Any:
    """Return a decoder layer of random weights. Equal calls give equal weights."""
    mx.random.seed(4)
    args = TextModelArgs(
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    layer = DecoderLayer(args, layer_idx=0 if linear else args.full_attention_interval - 1)
    layer.update({"input_layernorm": {"weight": mx.random.normal((HIDDEN,))}})
    mx.eval(layer.parameters())
    return layer.eval()


def rows_of(count: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((count, HIDDEN), key=mx.random.key(count)).astype(dtype)


def fused(layer: Any) -> Layer:
    """Return a fused layer of random weights."""
    found = Fuser(mx.float32, model_bytes=0).layer(reference_layer(layer))
    assert found.kind == "fused"
    return found


def gdn_frames(layer: Layer, cuts: Sequence[int | None]) -> list[mx.array]:
    """Return the outputs and states of frames of open windows. Each of `cuts` follows one of the frames."""
    caches = [layer.new_cache(KVFormat()) for _ in WIDTHS]
    found = []
    for cut in cuts:
        taped = [True] * len(WIDTHS)
        found.append(layer.forward(rows_of(sum(WIDTHS)), caches, WIDTHS, taped))
        for cache in caches:
            cache.apply_commit(1 if cut is None else 0, cut, 0)
            found += cache.arrays()
    return found


def test_a_joined_gdn_layer_has_the_bits_of_the_reference() -> None:
    """Outputs and states are equal over frames of several widths, whole windows and windows that are cut."""
    cuts = (None, 1, None, 0, None)
    frames = (gdn_frames(make(layer_of(linear=True)), cuts) for make in (fused, reference_layer))
    assert all(mx.array_equal(a, b) for a, b in zip(*frames, strict=True))


@pytest.mark.parametrize("width", [1, 5])
def test_the_recurrence_has_the_bits_of_the_reference(width: int) -> None:
    """Outputs and states of two sequences are those of mlx-lm's function."""
    net = layer_of(linear=True).linear_attn
    rows = mx.random.normal((2, width, 4, 4, 32), key=mx.random.key(3))
    q, k, v = rows[:, :, 0, :2], rows[:, :, 1, :2], rows[:, :, 2]
    a, b, state = rows[:, :, 3, :, 0], rows[:, :, 3, :, 1], mx.ones((2, 4, 32, 32))
    arguments = (q, k, v, a, b, net.A_log, net.dt_bias, state)
    pairs = zip(advance_state(*arguments), gated_delta_update(*arguments), strict=True)
    assert all(mx.array_equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("first", [2, 4096], ids=["longer than the table", "within the table"])
def test_a_joined_attention_layer_has_the_bits_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Outputs are equal over frames of several widths, and for rows behind a hole."""
    monkeypatch.setattr(rope, "FIRST_POSITIONS", first)
    found = []
    for layer in (reference_layer(layer_of(linear=False)), fused(layer_of(linear=False))):
        caches = [layer.new_cache(KVFormat()) for _ in WIDTHS]
        frames = [layer.forward(rows_of(sum(WIDTHS)), caches, WIDTHS) for _ in range(3)]
        holes = [Hole(cache.offset, mx.array([1])) for cache in caches]
        ones = [1] * len(WIDTHS)
        found.append([*frames, layer.forward(rows_of(len(WIDTHS)), caches, ones, holes=holes)])
    assert all(mx.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_norms_and_mlps_have_the_bits_of_the_reference() -> None:
    """The norm and the MLP of one row, and of many, are those of mlx-lm."""
    layer = layer_of(linear=True)
    norm, mlp = layer.input_layernorm, layer.mlp
    joined_mlp = FusedMLP(layer_of(linear=True).mlp)
    for count in (1, 2, 33):
        x = rows_of(count)
        assert mx.array_equal(RowNorm(norm)(x), norm(x))
        assert mx.array_equal(joined_mlp(x), mlp(x))


def test_a_half_precision_row_has_the_same_bits_in_any_frame(checkpoints: Checkpoints) -> None:
    """A product with widened weights does not depend on the rows beside it, and keeps the type of its input."""
    linear = nn.Linear(HIDDEN, 40)
    linear.set_dtype(mx.bfloat16)
    expected, x = linear(rows_of(33, mx.bfloat16)), rows_of(33, mx.bfloat16)
    columns = ColumnLinear.from_modules([linear])
    together = columns(x)
    alone = mx.concatenate([columns(x[i : i + 1]) for i in range(33)])
    assert together.dtype == mx.bfloat16
    assert mx.array_equal(together, alone)
    assert mx.allclose(together, expected, rtol=0.02, atol=0.02)


def joined_stage(checkpoints: Checkpoints, **options: Any) -> Stage:
    """Return a stage of a whole model."""
    checkpoint = Checkpoint.open(checkpoints(**options))
    span = Span(0, checkpoint.config.num_layers)
    return Stage(load_stage(checkpoint, span, first=True, last=True, dtype=None), KVFormat())


def test_a_large_half_precision_checkpoint_is_not_widened(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints
) -> None:
    """Half-precision weights become fp32 up to a size of the checkpoint. Caches keep the stored type."""
    small = joined_stage(checkpoints, dtype=mx.bfloat16, tie=False)
    assert small.variants.summary == f"{len(small.modules.layers)} fused"
    attention_layer = small.modules.layers[3]
    assert isinstance(attention_layer, fuse.FusedAttentionLayer)
    assert attention_layer.attention.dtype == mx.bfloat16
    monkeypatch.setattr(fuse, "WIDENED_BYTES", small.modules.model_bytes - 1)
    large = joined_stage(checkpoints, dtype=mx.bfloat16, tie=False)
    assert large.modules.layers[3].kind == "reference"
    assert type(large.modules.lm_head) is nn.Linear
