"""The layers of GLM-5.3-Flash: residual streams around Kimi Delta Attention, latent attention, and MLPs; its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.qwen3_5 import TextModelArgs

from mtp.glm_flash.args import GlmArgs
from mtp.glm_flash.modules import DecoderLayer, DeltaAttention, Experts, LatentAttention
from mtp.glm_flash.streams import HyperConnection
from mtp.head.drafter import MTPHead
from mtp.layers.layer import Hole, KVFormat, Layer, Mixer
from mtp.layers.linear import Format, FusedLinear, InputRows, side_by_side
from mtp.layers.reference.gdn import GatedDelta
from mtp.layers.sparse_attention import BlockReader, LatentKV, SparseReads, full_attention, sparse_attention
from mtp.layers.stream_layer import Connection, Residual, StreamLayer
from proto.errors import CheckpointError


class DeltaNet:
    """A KDA by the names of mlx-lm's `GatedDeltaNet`. Its decay has a value for each channel of a key."""

    def __init__(self, module: DeltaAttention, dtype: mx.Dtype) -> None:
        self.module, sizes = module, module.args
        self.num_k_heads = self.num_v_heads = sizes.heads
        self.head_k_dim = self.head_v_dim = sizes.head_dim
        self.key_dim = self.value_dim = sizes.heads * sizes.head_dim
        self.conv_dim, self.conv_kernel_size = 3 * self.key_dim, sizes.kernel
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, sizes.kernel, groups=self.conv_dim, bias=False)
        taps = mx.concatenate([module.q_conv1d.weight, module.k_conv1d.weight, module.v_conv1d.weight])
        self.conv1d.weight = taps.astype(dtype)[..., None]
        self.A_log, self.dt_bias, self.bound = module.A_log, module.dt_bias, sizes.bound
        self.norm, self.out_proj = module.o_norm, module.o_proj
        self.products = [module.q_proj, module.k_proj, module.v_proj]

    def in_proj_qkv(self, x: mx.array) -> mx.array:
        """Return q, k and v before the convolution: `[rows, conv_dim]`."""
        return mx.concatenate([product(x) for product in self.products], axis=-1)

    def in_proj_z(self, x: mx.array) -> mx.array:
        """Return the inputs of the gates of the output: `[rows, value_dim]`."""
        z: mx.array = self.module.g_b_proj(self.module.g_a_proj(x))
        return z

    def in_proj_b(self, x: mx.array) -> mx.array:
        """Return the inputs of the rates of writing: `[rows, heads]`."""
        b: mx.array = self.module.b_proj(x)
        return b

    def in_proj_a(self, x: mx.array) -> mx.array:
        """Return the inputs of the decays: `[rows, key_dim]`."""
        a: mx.array = self.module.f_b_proj(self.module.f_a_proj(x))
        return a


@dataclass(frozen=True)
class DeltaInputs:
    """All products of the inputs of a KDA: one of the rows, and two of the narrow ones among its outputs."""

    first: Any
    second: Sequence[Any]
    ends: list[int]

    def __post_init__(self) -> None:
        # A part of one row is a view, and `multiply_rows` reads its rows by 16 bytes.
        assert all(end % 8 == 0 for end in self.ends[:2]), self.ends

    @property
    def dtype(self) -> mx.Dtype:
        """The type of dense weights or of scales."""
        found: mx.Dtype = self.first.dtype
        return found

    def __call__(self, x: mx.array) -> mx.array:
        """Return q, k, v, z, b and a `[rows, any]` of `x [rows, hidden]`."""
        qkv, z, a, b, *_ = mx.split(self.first(x), self.ends, axis=-1)
        z, a = (product(mx.contiguous(part)) for product, part in zip(self.second, (z, a), strict=True))
        return mx.concatenate([qkv, z, b, a], axis=-1)


class KimiDelta(GatedDelta):
    """The computation of a KDA, whose net is a `DeltaNet`."""

    def input_product(self, fuse: Callable[[Sequence[Any]], Any]) -> DeltaInputs | None:
        net, module = self.net, self.net.module
        second = [fuse([product]) for product in (module.g_b_proj, module.f_b_proj)]
        # Last, because several modules that are fused lose their weights.
        first = None if None in second else fuse([*net.products, module.g_a_proj, module.f_a_proj, module.b_proj])
        ends = accumulate((net.conv_dim, net.head_v_dim, net.head_k_dim, net.num_v_heads))
        return None if first is None else DeltaInputs(first, second, list(ends))

    def advance_state(self, *inputs: mx.array) -> tuple[mx.array, mx.array]:
        q, k, v, a, b, state = inputs
        net, heads, dim = self.net, self.net.num_k_heads, self.net.head_k_dim
        a, bias = a.reshape(*a.shape[:2], heads, dim), net.dt_bias.reshape(heads, dim)
        found: tuple[mx.array, mx.array] = gated_delta_update(
            q, k, v, a, b, net.A_log[:, None], bias, state, lower_bound=net.bound
        )
        return found


class _HeadProducts:
    """`kv_b_proj` as products of each head: a key of a latent, transposed onto the query, and a value of a latent."""

    def __init__(self, product: Any, heads: int, key_dim: int) -> None:
        """Take the weights of `product`, which loses them. Raises CheckpointError for a packing that has no parts."""
        form = Format.of(product)
        if form is None:
            raise CheckpointError("self_attn.kv_b_proj has a bias or a global scale, which is not supported")
        names = [name for name in ("weight", "scales", "biases") if name in product]
        whole = [product[name].reshape(heads, -1, product[name].shape[-1]) for name in names]
        self._keys = InputRows(form, tuple(mx.contiguous(part[:, :key_dim]) for part in whole))
        self._values = FusedLinear(form, tuple(mx.contiguous(part[:, key_dim:]) for part in whole))
        mx.eval(self._keys.weights, self._values.weights)
        for name in names:
            del product[name]

    def latent_queries(self, q: mx.array) -> mx.array:
        """Return `q [heads, rows, key_dim]` times the keys' weights: `[heads, rows, rank]`."""
        return self._keys(q)

    def values(self, read: mx.array) -> mx.array:
        """Return the values `[heads, rows, value_dim]` of the latents `read [heads, rows, rank]`."""
        return self._values(read)


class LatentMixer(BlockReader):
    """The computation of an MLA over flat rows of many sequences, in the space of the latents."""

    def __init__(self, module: LatentAttention, layer: DecoderLayer) -> None:
        self.module, self.indexer = module, module.indexer
        self.latent, self.sizes = layer.args.latent, layer.args.indexer
        self._heads = _HeadProducts(module.kv_b_proj, self.latent.heads, self.latent.key_dim)
        self._scale = self.latent.key_dim**-0.5
        self.fuse(lambda _: None)

    def fuse(self, fuse: Callable[[Sequence[Any]], Any]) -> LatentMixer:
        """Make one product of those with the same inputs, by a function such as `FusedLinear.of`. Return itself."""
        module, indexer = self.module, self.indexer
        inputs = [module.q_a_proj, module.kv_a_proj_with_mqa, indexer.wk, indexer.weights_proj]
        groups = inputs, [module.q_b_proj, indexer.wq_b], [module.o_proj]
        self._inputs, self._queries, self._out = (side_by_side(group, fuse) for group in groups)
        return self

    def new_cache(self, kv_format: KVFormat) -> LatentKV:
        # The raw keys of the indexer are a key and a gate.
        return LatentKV(self.sizes.block, 2 * self.sizes.head_dim).with_rows(1, self.latent.rank)

    def mix(
        self,
        inputs: mx.array,
        caches: Sequence[LatentKV],
        widths: Sequence[int],
        stay_open: Sequence[bool],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """See `Mixer.mix`."""
        module, indexer, sizes = self.module, self.indexer, self.sizes
        rows = inputs.shape[0]
        low, latents, keys, weights = self._inputs(inputs)
        q, asked = self._queries(module.q_a_layernorm(low))
        q = self._heads.latent_queries(q.reshape(rows, self.latent.heads, -1).swapaxes(0, 1))
        latents = module.kv_a_layernorm(latents)
        asked = asked.reshape(rows, sizes.heads, sizes.head_dim)
        raw = mx.concatenate([indexer.k_norm(keys), inputs @ indexer.index_kpool_compress_gate.T], axis=-1)
        weights = weights.astype(mx.float32) * (sizes.heads * sizes.head_dim) ** -0.5
        outputs, start = [], 0
        for i, (cache, width) in enumerate(zip(caches, widths, strict=True)):
            own = slice(start, start + width)
            hole = holes[i] if holes else None
            outputs.append(self._read((q, latents, raw, asked, weights), own, cache, hole))
            start += width
        read = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        values = self._heads.values(read[0]).swapaxes(0, 1).reshape(rows, -1)
        return self._out(values)[0]

    def _read(self, rows: Sequence[mx.array], own: slice, cache: LatentKV, hole: Hole | None) -> mx.array:
        """Append the latents of a sequence, whose rows are `own`. Return what its queries read: `[1, heads, w, rank]`.

        `rows` are the queries `[heads, rows, rank]`, and `[rows, …]` the latents, and the keys, queries and weights of
        the indexer.
        """
        q, latents, raw, asked, weights = rows
        q, offset = q[None, :, own], cache.offset
        cache.append_index(raw[own])
        held = cache.append(latents[own])
        if cache.offset // self.sizes.block <= self.sizes.budget // self.sizes.block:
            # The last token reads all others.
            return full_attention(q, held, held, offset, self._scale, hole)
        blocks = cache.block_keys(self._pooled, hole)
        sizes, scale, asked, weights = self.sizes, self._scale, asked[own], weights[own]
        reads = SparseReads(q, held, held, asked, blocks, offset, sizes, scale, weights, hole, self.language)
        return sparse_attention(reads)

    def _pooled(self, raw: mx.array, first: int) -> mx.array:
        """Return the keys of blocks: their tokens' keys, weighted in each channel by a softmax of the gates."""
        both = raw.reshape(-1, self.sizes.block, raw.shape[-1])
        keys, gates = mx.split(both, 2, axis=-1)
        places = self.indexer.index_kpool_compress_ape.astype(mx.float32)
        shares = mx.softmax(gates.astype(mx.float32) + places, axis=1)
        return (keys * shares.astype(keys.dtype)).sum(axis=1)


class GlmLayer(StreamLayer):
    """A layer: norms, a mixer of tokens and an MLP. Around both pass the streams, or one residual in the MTP head."""

    kind = "glm-flash"
    model = "GLM-5.3-Flash"

    def __init__(self, layer: DecoderLayer) -> None:
        norms, dtype = (layer.input_layernorm, layer.post_attention_layernorm), layer.input_layernorm.weight.dtype
        experts = layer.mlp.fused() if isinstance(layer.mlp, Experts) else layer.mlp
        mixer: Mixer = (
            KimiDelta(DeltaNet(layer.self_attn, dtype), dtype, silu=False)
            if layer.is_linear
            else LatentMixer(layer.self_attn, layer)
        )
        connections: list[Connection] = [Residual(norm) for norm in norms]
        if "hc_attn_fn" in layer:
            connections = [HyperConnection(layer, *block) for block in zip(("attn", "ffn"), norms, strict=True)]
        super().__init__(mixer, experts, connections, dtype)


class GlmHead(MTPHead):
    """The MTP head: a layer of latent attention and experts with one residual stream.

    Its input is the model's state after the final norm, and in a chain of drafts its own output, as in vLLM and SGLang.
    """

    def __init__(self, fields: TextModelArgs, args: GlmArgs) -> None:
        super().__init__(fields, DecoderLayer(args, 0, linear=False, streams=False))

    def _reference(self) -> Layer:
        self._block = GlmLayer(self.layers[0])
        return self._block
