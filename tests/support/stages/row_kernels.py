"""Checks of the kernels of few rows, in any language that this machine runs."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mtp.checkpoint.hub.published import FIELDS
from mtp.glm_flash.args import GlmArgs
from mtp.glm_flash.family import GlmFlash
from mtp.glm_flash.layers import DeltaNet, KimiDelta
from mtp.glm_flash.modules import DecoderLayer, DeltaAttention
from mtp.glm_flash.streams import HyperConnection
from mtp.layers.block_choice import lowest
from mtp.layers.experts import FusedExperts, Routing, RowExperts, fuse_experts, has_row_kernels
from mtp.layers.layer import Hole
from mtp.layers.reference.gdn import GatedDelta
from mtp.layers.source_kernel import SourceKernel
from mtp.layers.sparse_attention import IndexerArgs, SparseReads
from mtp.layers.stream_rows import add_and_norm
from tests.unit.mtp.test_experts import block_of

GLM = FIELDS["glm5_next"]
TOLERANCE = {mx.bfloat16: 1e-2, mx.float16: 2e-3, mx.float32: 1e-5}
"""Difference from the reference over the largest value. Outputs are rounded to the type, states are fp32."""


def error(found: mx.array, expected: mx.array) -> float:
    """Return the largest difference over the largest expected value."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()  # type: ignore[return-value]


def check_experts(language: type[SourceKernel], dtype: mx.Dtype, rows: int) -> None:
    """Check that the chosen experts, their shares and the shared expert are those of MLX, and rows alone.

    Once with the logits of a router, once with equal ones, of which the lower experts are chosen, and once with a
    correction and a limit, and so many units that a block holds those of some experts at a time.
    """
    for equal in (False, True):
        _check_experts(language, dtype, rows, equal=equal)
    corrected = Routing(64, 4, mx.random.normal((64,), key=mx.random.key(4)) * 0.1, 2.5)
    _check_experts(language, dtype, rows, routing=corrected, inner=2048)


def _check_experts(
    language: type[SourceKernel],
    dtype: mx.Dtype,
    rows: int,
    *,
    equal: bool = False,
    routing: Routing | None = None,
    inner: int = 192,
) -> None:
    block, exact = (block_of(4, dtype, 64, inner, equal=equal) for _ in range(2))
    block = fuse_experts(block)
    exact.set_dtype(mx.float32)
    exact = fuse_experts(exact)
    assert isinstance(block, FusedExperts) and has_row_kernels(block, dtype)
    if routing is not None:
        block.routing = exact.routing = routing
        block.limit = exact.limit = 0.5
    # Rounded logits may choose others, so both take the same.
    router = block.router
    most = language.alone_rows
    exact.router = lambda x: router.multiply_alone(x.astype(dtype), most).astype(mx.float32)
    own = RowExperts(block, language)
    x = mx.random.normal((rows, 128), key=mx.random.key(rows)).astype(dtype)
    found = own(x)
    assert error(found, exact(x.astype(mx.float32))) < TOLERANCE[dtype]
    assert all(mx.array_equal(found[i : i + 1], own(x[i : i + 1])) for i in range(rows))


def check_streams(language: type[SourceKernel], dtype: mx.Dtype, rows: int) -> None:
    """Check that the gated sum of four streams and their norm are those of MLX's operations in fp32."""
    mx.random.seed(rows)
    x, block, gates = (mx.random.normal((rows, n)).astype(dtype) for n in (4 * 192, 192, 8))
    weight = mx.random.normal((4 * 192,)).astype(dtype)
    found = add_and_norm(language, x, (block, gates), weight, mx.array([1e-6]), (4, 3))
    wide, out, logits = (held.astype(mx.float32) for held in (x, block, gates[:, 3:7]))
    total = wide.reshape(rows, 4, 192) + 2 * mx.sigmoid(logits / 4)[..., None] * out[:, None]
    normed = mx.fast.rms_norm(total, None, 1e-6).reshape(rows, -1) * weight
    assert error(found[0], total.reshape(rows, -1)) < TOLERANCE[dtype]
    assert error(found[1], normed) < TOLERANCE[dtype]


def check_choice(language: type[SourceKernel], columns: int, count: int) -> None:
    """Check that the lowest ranks are those of MLX's sorts: random ones, equal ones, zeros of both signs, infinities.

    Halves of small integers are often equal.
    """
    mx.random.seed(columns)
    random = mx.random.normal((1, columns))
    halves = mx.random.randint(-3, 3, (1, columns)) / 2
    late = mx.where(mx.arange(columns) < columns - count // 2, mx.inf, random)
    zeros = mx.where(random < 0, -0.0, 0.0)
    ranks = mx.concatenate([random, halves, -halves, late, zeros, mx.full((1, columns), mx.inf)])
    expected = lowest(None, ranks, count)
    assert lowest(language, ranks, count).tolist() == expected.tolist()


def check_reads(language: type[SourceKernel], *, weighted: bool, rejected: int | None) -> None:
    """Check that queries read the tokens that MLX's operations choose, with or without rejected rows before one.

    Small integers have exact products, and many scores are equal.
    """
    tokens, rows = 299, 1 if rejected is not None else 3
    mx.random.seed(tokens)
    blocks, queries, weights = (
        mx.random.randint(-2, 3, shape).astype(mx.float32) for shape in ((74, 8), (rows, 4, 8), (rows, 4))
    )
    hole = None if rejected is None else Hole(tokens - 2, mx.array([rejected]), 3)
    keys = mx.zeros((1, 1, tokens, 8))
    args, used = IndexerArgs(4, 8, 64, 4), weights if weighted else None
    # In the middle of the text a query sees few blocks, or fewer than it reads.
    for offset in (tokens - rows, 38, 101, 150, 201) if hole is None else (tokens - 1,):
        reads = SparseReads(keys, keys, keys, queries, blocks, offset, args, 1.0, used, hole)
        own = slice(0, rows)
        (found, sees), (expected, seen) = (reads._replace(language=one).tokens(own) for one in (language, None))
        assert sees.tolist() == seen.tolist() and mx.all(found < tokens).item()
        assert mx.where(sees, found, 0).tolist() == mx.where(seen, expected, 0).tolist()


DELTA_HIDDEN = 512


def delta_mixer(dtype: mx.Dtype, bound: float | None) -> GatedDelta:
    """Return a Kimi Delta Attention of two heads in 4 bits, which MLX's operations compute."""
    mx.random.seed(3)
    delta = GLM["linear_attn_config"] | {"num_heads": 2}
    args = GlmArgs.of(GlmFlash().named_fields(GLM | {"hidden_size": DELTA_HIDDEN, "linear_attn_config": delta}))
    module = DeltaAttention(replace(args, delta=replace(args.delta, bound=bound)))
    for taps in (module.q_conv1d, module.k_conv1d, module.v_conv1d):
        taps.weight = mx.random.normal(taps.weight.shape) * 0.5
    module.dt_bias = mx.random.normal(module.dt_bias.shape)
    module.set_dtype(dtype)
    nn.quantize(module, 64, 4)
    return KimiDelta(DeltaNet(module, dtype), dtype, silu=False)


def check_hyper_connections(language: type[SourceKernel], dtype: mx.Dtype, rows: int) -> None:
    """Check that the streams, the block's inputs and what becomes of its output are those of MLX, and of rows alone."""
    mx.random.seed(rows)
    layer = DecoderLayer(GlmArgs.of(GlmFlash().named_fields(GLM | {"hidden_size": 320})), 0, linear=True)
    layer.update({n: mx.random.normal(w.shape) * w.shape[-1] ** -0.5 for n, w in layer.items() if n.startswith("hc_")})
    norm = nn.RMSNorm(320)
    norm.weight = mx.random.normal((320,)).astype(dtype)
    both = [HyperConnection(layer, block, norm) for block in ("attn", "ffn")]
    x, block = (mx.random.normal((rows, n)).astype(dtype) for n in (4 * 320, 320))

    def run(x: mx.array, block: mx.array) -> list[mx.array]:
        read, inputs, gates = both[0].read(x)
        spread, others, more = both[1].read(x, block, gates)
        return [read, inputs, spread, others, both[1].spread(spread, block, more)]

    expected = run(x, block)
    both[0].language = both[1].language = language
    found = run(x, block)
    assert all(error(one, other) < TOLERANCE[dtype] for one, other in zip(found, expected, strict=True))
    for i in range(rows):
        alone = run(x[i : i + 1], block[i : i + 1])
        assert all(mx.array_equal(one[i : i + 1], other) for one, other in zip(found, alone, strict=True))
