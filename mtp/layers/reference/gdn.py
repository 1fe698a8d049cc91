"""GatedDeltaNet over flat rows: many sequences in one pass, each with its own state.

The module and its weights are mlx-lm's (`qwen3_5.GatedDeltaNet`). This project has its own forward pass, which runs
rows of several sequences at once and records the tape of each open window.

MLX arrays are immutable, so a reference to the state before a window is a snapshot. It costs memory, but no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.device import this_device
from mtp.layers.exact import ExactProducts
from mtp.layers.layer import (
    HEADS,
    MLP,
    REFERENCE,
    CutAxis,
    Hole,
    KVFormat,
    Layer,
    LayerCache,
    PlainMLP,
    checked_state,
)


@dataclass(frozen=True)
class Tape:
    """The inputs to advance a state over tokens of a window again, without the projections.

    `conv_before` and `state_before` are the snapshot. `qkv [1, w, conv_dim]` are the inputs of the convolution. `k`,
    `v`, `a` and `b` are those of the recurrence, `[1, w, heads, dim]` and `[1, w, v_heads]`.
    """

    conv_before: mx.array
    state_before: mx.array
    qkv: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array


@dataclass
class GDNCache(LayerCache):
    """The present state and the tapes of the open windows, oldest first.

    `conv [1, kernel - 1, conv_dim]` are the last inputs of the convolution. `state [1, v_heads, v_dim, k_dim]` is fp32.
    """

    mixer: GatedDelta
    conv: mx.array
    state: mx.array
    tapes: list[Tape] = field(default_factory=list)

    @classmethod
    def empty(cls, mixer: GatedDelta) -> GDNCache:
        """Return the state of `mixer` before the first token."""
        net, dtype = mixer.net, mixer.dtype
        conv = mx.zeros((1, net.conv_kernel_size - 1, net.conv_dim), dtype)
        shape = (1, net.num_v_heads, net.head_v_dim, net.head_k_dim)
        return cls(mixer, conv, mx.zeros(shape, mx.float32))

    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        """Remove the tapes of `whole` accepted windows. With `cut`, keep `cut` tokens of the next window.

        The state then becomes the snapshot of this window, advanced over its first `cut` tokens. This runs only the
        recurrence, with the same arithmetic. All tapes are removed.
        """
        if cut is None:
            del self.tapes[:whole]
            return
        tape = self.tapes[whole]
        self.tapes.clear()
        self.conv, self.state = tape.conv_before, tape.state_before
        if cut == 0:
            return
        self.conv = mx.concatenate([self.conv, tape.qkv[:, :cut]], axis=1)[:, cut:]
        k = tape.k[:, :cut]  # also in place of q, which only the output depends on
        inputs = k, k, tape.v[:, :cut], tape.a[:, :cut], tape.b[:, :cut]
        _, self.state = self.mixer.advance_state(*inputs, self.state)

    def copy(self) -> GDNCache:
        """Return an independent copy in its own memory. Rows that ran together share their memory."""
        return GDNCache(self.mixer, mx.contiguous(self.conv), mx.contiguous(self.state))

    def arrays(self) -> list[mx.array]:
        return [self.conv, self.state]

    def backup_arrays(self, start: int, end: int | None = None) -> list[mx.array]:
        return self.copy().arrays()

    def with_backups(self, states: Sequence[Sequence[mx.array]], length: int) -> GDNCache:
        conv, state = checked_state(states[-1], self.arrays())
        return replace(self, conv=conv, state=state, tapes=[])

    @property
    def cut_axes(self) -> tuple[CutAxis | None, ...]:
        net = self.mixer.net
        keys, values = net.num_k_heads * net.head_k_dim, net.num_v_heads * net.head_v_dim
        return CutAxis(2, (keys, keys, values)), HEADS


class GDNLayer(Layer):
    """A GatedDeltaNet layer that runs the modules of mlx-lm, perhaps with fused products."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.module = layer
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.dtype: mx.Dtype = layer.input_layernorm.weight.dtype
        self.mixer: GatedDelta = GatedDelta(layer.linear_attn, self.dtype)
        self.mlp: MLP = PlainMLP(layer.mlp)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.mixer.kind

    def new_cache(self, kv_format: KVFormat) -> GDNCache:
        return self.mixer.new_cache(kv_format)

    def pin_exact(self, products: ExactProducts) -> None:
        self.mixer.pin_exact(products)
        self.mlp.pin_exact(products)

    def forward(
        self,
        x: mx.array,
        caches: Sequence[GDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        mixed = self.mixer.mix(self.norm(x), caches, widths, stay_open)
        return self.mlp.add_output(x + self.communicator.sum(mixed), self.mlp_norm)


class GatedDelta:
    """A GatedDeltaNet by the modules of mlx-lm, without the layer around it. See `Mixer`.

    The gate of its output is `silu` or sigmoid. `inputs` is the fused product of its inputs.
    """

    def __init__(self, net: Any, dtype: mx.Dtype, *, silu: bool = True, inputs: Any = None) -> None:
        self.net, self.dtype, self.silu, self.inputs = net, dtype, silu, inputs
        self._together = True
        self._ends = list(accumulate((net.conv_dim, net.value_dim, net.num_v_heads)))

    @property
    def kind(self) -> str:
        """The variant, as `Layer.kind`."""
        return REFERENCE if self.inputs is None else "fused"

    def with_inputs(self, inputs: Any) -> Self:
        """Return the mixer with the product `inputs`, one of `input_product`."""
        return type(self)(self.net, self.dtype, silu=self.silu, inputs=inputs)

    def input_product(self, fuse: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the product that has q, k, v, z, b and a of a row in one, of modules that `fuse` joins.

        Returns None if `fuse` returns it, as for modules of different formats.
        """
        net = self.net
        return fuse([net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a])

    def advance_state(self, *inputs: mx.array) -> tuple[mx.array, mx.array]:
        """Advance the state, the last of `inputs`, over its rows. See the function of this name."""
        q, k, v, a, b, state = inputs
        return advance_state(q, k, v, a, b, self.net.A_log, self.net.dt_bias, state)

    def new_cache(self, kv_format: KVFormat) -> GDNCache:
        return GDNCache.empty(self)

    def pin_exact(self, products: ExactProducts) -> None:
        """See `Layer.pin_exact`."""
        products.replace_children(self.net)
        self._together = products.queries is None

    def mix(
        self,
        inputs: mx.array,
        caches: Sequence[GDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """Return the outputs of the GatedDeltaNet for normalized `inputs [rows, hidden]`, and advance the caches.

        Neighbours of equal width run together, unless the layer is exact.
        """
        qkv, z, b, a = self._project(inputs)
        outputs = []
        start = 0
        every = list(zip(caches, widths, stay_open, strict=True))
        groups = [list(group) for _, group in groupby(every, key=lambda row: row[1])]
        for rows in groups if self._together else [[row] for row in every]:
            width = rows[0][1]
            end = start + width * len(rows)
            inner = [t[start:end].reshape(len(rows), width, -1) for t in (qkv, a, b)]
            keep = [row[2] for row in rows]
            if any(keep) and not all(stay_open):
                # In a frame with prompt chunks, a tape of views would keep the rows of the chunks in memory.
                inner = [mx.contiguous(part) for part in inner]
            out = self.advance([row[0] for row in rows], keep, *inner)
            outputs.append(out.reshape(-1, self.net.num_v_heads, self.net.head_v_dim))
            start = end
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return self._finish(out, z, inputs.dtype)

    def advance(
        self,
        caches: Sequence[GDNCache],
        keep: Sequence[bool],
        qkv: mx.array,
        a: mx.array,
        b: mx.array,
    ) -> mx.array:
        """Advance n sequences over `[n, w, …]` inputs. Returns their outputs `[n, w, v_heads, v_dim]`."""
        count, width = qkv.shape[:2]
        held = _concatenated([c.conv for c in caches])
        qkv = qkv.astype(held.dtype)
        conv_input = mx.concatenate([held, qkv], axis=1)
        q, k, v = self._convolve(conv_input)
        before = _concatenated([c.state for c in caches])
        out, state = self.advance_state(q, k, v, a, b, before)
        # A contiguous copy, since a view of three rows would keep the inputs of the whole chunk in memory.
        conv = mx.contiguous(conv_input[:, width:])
        for i, cache in enumerate(caches):
            own = slice(i, i + 1)
            if keep[i]:
                rows = (t[own] for t in (qkv, k, v, a, b))
                cache.tapes.append(Tape(cache.conv, cache.state, *rows))
            cache.conv, cache.state = (conv, state) if count == 1 else (conv[own], state[own])
        return out

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return qkv, z, b and a of `x [rows, hidden]`."""
        net = self.net
        if self.inputs is None:
            return net.in_proj_qkv(x), net.in_proj_z(x), net.in_proj_b(x), net.in_proj_a(x)
        qkv, z, b, a = mx.split(self.inputs(x), self._ends, axis=-1)
        return qkv, z, b, a

    def _convolve(self, conv_input: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return q, k and v `[n, w, heads, dim]` of `conv_input [n, w + 3, channels]`, q and k normalized."""
        net = self.net
        conv_out = nn.silu(net.conv1d(conv_input))
        q, k, v = mx.split(conv_out, [net.key_dim, 2 * net.key_dim], axis=-1)
        rows = conv_out.shape[:2]
        q = q.reshape(*rows, net.num_k_heads, net.head_k_dim)
        k = k.reshape(*rows, net.num_k_heads, net.head_k_dim)
        v = v.reshape(*rows, net.num_v_heads, net.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=net.head_k_dim**-0.5, eps=1e-6)
        return q, k, v

    def _finish(self, out: mx.array, z: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the output projection of `out [rows, v_heads, v_dim]`, normalized and gated by `z`."""
        normed = self.net.norm(out, z.reshape(out.shape))
        y: mx.array = self.net.out_proj(normed.reshape(z.shape[0], -1))
        return y


class SigmoidGatedNorm(nn.Module):
    """RMSNorm with a sigmoid gate, in place of silu."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((hidden,))
        self.eps = eps

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        """Return `x` normalized and gated."""
        normed = mx.fast.rms_norm(x.astype(mx.float32), self.weight, self.eps)
        return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


def _concatenated(states: Sequence[mx.array]) -> mx.array:
    """Return the states `[1, …]` of n sequences as one `[n, …]`."""
    return states[0] if len(states) == 1 else mx.concatenate(list(states))


def advance_state(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Advance `state [n, v_heads, v_dim, k_dim]` over `w` tokens. Return the outputs `[n, w, v_heads, v_dim]` and it.

    `q` and `k` are `[n, w, k_heads, k_dim]` after `normalize_qk`, `v` is `[n, w, v_heads, v_dim]`, `a` and `b` are
    `[n, w, v_heads]`. On the CPU this takes fewer operations than mlx-lm's function, with the same arithmetic.
    """
    if not this_device().computes_on_host:
        found: tuple[mx.array, mx.array] = gated_delta_update(q, k, v, a, b, a_log, dt_bias, state)
        return found
    rows = (q, k, v, a, b)
    if q.shape[1] == 1:
        y, state = _step([x.squeeze(1) for x in rows], a_log, dt_bias, state)
        return y[:, None], state
    outputs = []
    for t in range(q.shape[1]):
        y, state = _step([x[:, t] for x in rows], a_log, dt_bias, state)
        outputs.append(y)
    return mx.stack(outputs, axis=1), state


@mx.compile
def _step(row: list[mx.array], a_log: mx.array, dt_bias: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """Advance the state over one token. A key head serves several value heads without being copied."""
    q, k, v, a, b = row
    count, heads, values, keys = state.shape
    shared = (count, q.shape[1], heads // q.shape[1])
    decay = mx.exp(-mx.exp(a_log.astype(mx.float32)) * nn.softplus(a + dt_bias))
    q, k = q[:, :, None, None], k[:, :, None, None]
    wide = state.reshape(*shared, values, keys) * decay.reshape(*shared, 1, 1)
    memory = (wide * k).sum(axis=-1)
    delta = (v.reshape(*shared, values) - memory) * mx.sigmoid(b).reshape(*shared, 1)
    wide = wide + k * delta[..., None]
    y = (wide * q).sum(axis=-1)
    return y.reshape(count, heads, values).astype(q.dtype), wide.reshape(state.shape)
