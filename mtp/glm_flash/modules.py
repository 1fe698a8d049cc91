"""The modules of GLM-5.3-Flash, by the names of its checkpoints and the arithmetic of transformers' `glm5_next`.

Rows between layers have all residual streams side by side: `[rows, streams x hidden]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import TextModelArgs
from mlx_lm.models.switch_layers import SwitchGLU

from mtp.glm_flash.args import GlmArgs
from mtp.layers.experts import FusedExperts, Routing, gated_units
from mtp.layers.reference.gdn import SigmoidGatedNorm


class Taps(nn.Module):
    """The weights `[channels, kernel]` of a convolution of each channel by itself."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, kernel))


class DeltaAttention(nn.Module):
    """Kimi Delta Attention (KDA): a gated delta rule whose decay has one value for each channel of the keys."""

    def __init__(self, args: GlmArgs) -> None:
        super().__init__()
        self.args = sizes = args.delta
        hidden, width = args.hidden, sizes.heads * sizes.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Taps(width, sizes.kernel) for _ in range(3))
        self.f_a_proj, self.g_a_proj = (nn.Linear(hidden, sizes.head_dim, bias=False) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (nn.Linear(sizes.head_dim, width, bias=False) for _ in range(2))
        self.b_proj = nn.Linear(hidden, sizes.heads, bias=False)
        self.A_log, self.dt_bias = mx.zeros((sizes.heads,)), mx.zeros((width,))
        self.o_norm = SigmoidGatedNorm(sizes.head_dim, args.eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)


class Indexer(nn.Module):
    """The projections of the indexer, and the weights by which the keys of a block become one."""

    def __init__(self, args: GlmArgs) -> None:
        super().__init__()
        sizes = args.indexer
        self.wq_b = nn.Linear(args.latent.q_rank, sizes.heads * sizes.head_dim, bias=False)
        self.wk = nn.Linear(args.hidden, sizes.head_dim, bias=False)
        self.weights_proj = nn.Linear(args.hidden, sizes.heads, bias=False)
        self.k_norm = nn.LayerNorm(sizes.head_dim, eps=1e-6)
        self.index_kpool_compress_ape = mx.zeros((sizes.block, sizes.head_dim))
        self.index_kpool_compress_gate = mx.zeros((sizes.head_dim, args.hidden))


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA) without RoPE: all heads read one latent for each token."""

    def __init__(self, args: GlmArgs) -> None:
        super().__init__()
        sizes = args.latent
        self.q_a_proj = nn.Linear(args.hidden, sizes.q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(sizes.q_rank, eps=args.eps)
        self.q_b_proj = nn.Linear(sizes.q_rank, sizes.heads * sizes.key_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(args.hidden, sizes.rank, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(sizes.rank, eps=args.eps)
        self.kv_b_proj = nn.Linear(sizes.rank, sizes.heads * (sizes.key_dim + sizes.value_dim), bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.value_dim, args.hidden, bias=False)
        self.indexer = Indexer(args)


def _units(limit: float, up: mx.array, gate: mx.array) -> mx.array:
    return gated_units(gate, up, limit)


class GatedMLP(nn.Module):
    """A dense MLP of `inner` columns, or the shared expert."""

    def __init__(self, args: GlmArgs, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(args.hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, args.hidden, bias=False)
        self._limit = args.limit

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(gated_units(self.gate_proj(x), self.up_proj(x), self._limit))
        return y


class Router(nn.Module):
    """The router, which stays unquantized. The correction decides who is chosen, and not their weights."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = mx.zeros((experts, hidden))
        self.e_score_correction_bias = mx.zeros((experts,))


class Experts(nn.Module):
    """The experts of a layer, and the one that all rows share."""

    def __init__(self, args: GlmArgs) -> None:
        super().__init__()
        sizes = args.experts
        self._sizes, self._limit = sizes, args.limit
        self.gate = Router(args.hidden, sizes.count)
        units: Any = partial(_units, args.limit)
        self.switch_mlp = SwitchGLU(args.hidden, sizes.inner, sizes.count, activation=units)
        self.shared_experts = GatedMLP(args, sizes.inner)

    def fused(self) -> Any:
        """Return the experts in fused products, or themselves where parts have several formats. Call it once."""
        router = nn.Linear(1, 1, bias=False)
        router.weight = self.gate.weight = self.gate.weight.astype(mx.float32)
        return FusedExperts.of(self._routing, [router], self.switch_mlp, self.shared_experts, self._limit) or self

    @property
    def _routing(self) -> Routing:
        sizes = self._sizes
        return Routing(sizes.count, sizes.chosen, self.gate.e_score_correction_bias, sizes.factor)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the sum of the chosen experts and the shared one for `x [rows, hidden]`."""
        chosen, shares, _ = self._routing(x.astype(mx.float32) @ self.gate.weight.T)
        routed = (self.switch_mlp(x, chosen) * shares[..., None].astype(x.dtype)).sum(axis=-2)
        return routed + self.shared_experts(x)


class DecoderLayer(nn.Module):
    """A layer: KDA or MLA, and an MLP. Without `streams` it is that of the MTP head, which has one residual stream."""

    def __init__(self, args: GlmArgs, index: int, *, linear: bool, streams: bool = True) -> None:
        super().__init__()
        self.args = args
        self.is_linear = linear
        self.self_attn: Any = DeltaAttention(args) if linear else LatentAttention(args)
        self.mlp: Any = GatedMLP(args, args.inner) if streams and index in args.dense else Experts(args)
        self.input_layernorm = nn.RMSNorm(args.hidden, eps=args.eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden, eps=args.eps)
        if streams:
            logits = (2 + args.streams) * args.streams
            self.hc_attn_fn, self.hc_ffn_fn = (mx.zeros((logits, args.streams * args.hidden)) for _ in range(2))
            self.hc_attn_base, self.hc_ffn_base = (mx.zeros((logits,)) for _ in range(2))
            self.hc_attn_scale, self.hc_ffn_scale = (mx.zeros((3,)) for _ in range(2))


class StreamMean(nn.Module):
    """The final norm, of the mean of the streams."""

    def __init__(self, args: GlmArgs) -> None:
        super().__init__()
        self.weight = mx.ones((args.hidden,))
        self._streams, self._eps = args.streams, args.eps

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x [rows, streams x hidden]` as `[rows, hidden]`."""
        mean = x.reshape(x.shape[0], self._streams, -1).mean(axis=1)
        return mx.fast.rms_norm(mean, self.weight, self._eps)


class GlmModel(nn.Module):
    """All modules, with the names of a converted checkpoint, for the conversion. It computes nothing."""

    def __init__(self, fields: TextModelArgs, args: GlmArgs, linear: list[bool]) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(fields.vocab_size, fields.hidden_size)
        self.model.layers = [DecoderLayer(args, layer, linear=kind) for layer, kind in enumerate(linear)]
        self.model.norm = StreamMean(args)
        if not fields.tie_word_embeddings:
            self.lm_head = nn.Linear(fields.hidden_size, fields.vocab_size, bias=False)

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool]:
        """Return True for all modules: those that stay unquantized have no quantized form."""
        return lambda path, module: True
