"""The replacement of reference layers by those in fused products, for Apple GPUs and CPUs, and the trials of kernels.

A trial compares a layer with a kernel and the same layer without it: their results and their times. Both compute the
same rows at the shapes of the model, on the machine that will serve. Which of them is faster there is unknown before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mtp.layers import gdn_windows, prepare_rows, window_attention
from mtp.layers.experts import fuse_experts, row_experts
from mtp.layers.fused.attention import FusedAttentionLayer, PreparedAttentionLayer, fused_projections
from mtp.layers.gdn_windows import WindowMixer
from mtp.layers.kv_cache import window_sides
from mtp.layers.layer import TOLERANCE, KernelTrial, KVFormat, Layer, Mixer, PlainMLP, Rows, difference
from mtp.layers.linear import Format, Fuse, FusedEnds, FusedLinear, FusedMLP
from mtp.layers.reference import ReferenceLayer
from mtp.layers.reference.gdn import GatedDelta, GDNLayer
from mtp.layers.source_kernel import MetalKernel
from mtp.layers.stream_rows import NORM_SOURCE
from mtp.layers.window_layer import EndArguments, WindowLayer

gated_delta_window = gdn_windows.window_kernel(MetalKernel)

Choose = Callable[[str, str, str, Callable[[], KernelTrial]], bool]
"""A function of a kernel's name, its shapes, its source and its trial. It returns whether to use the kernel."""


def fused_windows(
    module: Any, dtype: mx.Dtype, inputs: FusedLinear, mlp: FusedMLP | None, *, fuses_norm: bool
) -> WindowLayer:
    """Return a GatedDeltaNet layer in fused products, whose output projection can be one. See `FusedEnds`."""
    net, norm = module.linear_attn, module.input_layernorm
    out = FusedLinear.of([net.out_proj])
    assert out is not None
    ends = FusedEnds(inputs.format, out.format, mlp.formats if mlp else None, norm.eps, fuses_norm)
    after = out.weights, module.post_attention_layernorm.weight, mlp.weights if mlp else ()
    arguments = EndArguments((norm.weight, inputs.weights), after, has_mlp=mlp is not None)
    recurrence = gdn_windows.recurrence_of(gated_delta_window, net, dtype)
    return WindowLayer("window", module, recurrence, dtype, mlp or PlainMLP(module.mlp), ends, arguments, arguments)


class Fuser:
    """The layers of a stage in fused products. Its activations are `[rows, hidden]` of `dtype`.

    `choose` decides over each kernel, by a trial of one layer with it and without it. None is a device without kernels.
    `fuse` makes the products. Keys and values have `kv_format`.
    """

    def __init__(
        self,
        hidden: int,
        dtype: mx.Dtype,
        choose: Choose | None,
        fuse: Fuse = FusedLinear.of,
        kv_format: KVFormat | None = None,
    ) -> None:
        self._hidden, self._dtype, self._kv_format = hidden, dtype, kv_format or KVFormat()
        self._choose, self._fuse = choose, fuse

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` fused where its weights have one format, or itself."""
        module: Any = layer.module
        if self._choose is not None:  # on a CPU mlx-lm's own experts keep the bits of stock mlx-lm
            fused_experts = fuse_experts(module.mlp)
            module.mlp = row_experts(fused_experts, self._dtype, MetalKernel, self.picks)
        mlp = FusedMLP.of(module.mlp, self._fuse)
        replaced = self._gdn(layer, mlp) if isinstance(layer, GDNLayer) else self._attention(module, mlp)
        if replaced is None:
            layer.mlp = mlp or PlainMLP(module.mlp)
        return replaced or layer

    def _gdn(self, layer: GDNLayer, mlp: FusedMLP | None) -> Layer | None:
        module, net = layer.module, layer.mixer.net
        inputs = layer.mixer.input_product(self._fuse)
        if inputs is None:
            return None
        layer.mixer = layer.mixer.with_inputs(inputs)
        layer.mlp = mlp or PlainMLP(module.mlp)
        if not self._has_window_kernel(net, inputs):
            net.out_proj = self._fuse([net.out_proj]) or net.out_proj
            return layer
        window, normed = (fused_windows(module, self._dtype, inputs, mlp, fuses_norm=fuses) for fuses in (False, True))
        shapes = f"{net.num_k_heads} and {net.num_v_heads} heads"
        if not self._wins("gated_delta_window", shapes, gdn_windows.SOURCE, window, layer):
            return layer
        return normed if mlp and self._wins_norm(normed, window) else window

    def mixer(self, inner: Any) -> Mixer:
        """Return `inner` fused where its weights have one format, or itself."""
        if not isinstance(inner, GatedDelta):
            return cast(Mixer, inner.fuse(self._fuse))
        net = inner.net
        if inner.inputs is not None or (inputs := inner.input_product(self._fuse)) is None:
            return inner
        fused = inner.with_inputs(inputs)
        has_kernel = self._has_window_kernel(net, inputs)
        if (out := self._fuse([net.out_proj])) is not None:
            net.out_proj = out
        if out is None or not has_kernel:
            return fused
        recurrence = gdn_windows.recurrence_of(gated_delta_window, net, self._dtype, silu=inner.silu)
        window = WindowMixer(recurrence, self._dtype, inputs, out)
        shapes = f"{net.num_k_heads} and {net.num_v_heads} heads"
        shapes += "" if inner.silu else " with a sigmoid gate"
        shapes += " and a decay for each channel" if recurrence.shape.decays > 1 else ""
        sides = [PartTrial(mixer.mix, mixer.new_cache) for mixer in (window, fused)]
        won = self._wins("gated_delta_window", shapes, gdn_windows.SOURCE, *sides)
        return window if won else fused

    def _has_window_kernel(self, net: Any, inputs: Any) -> bool:
        return (
            self._choose is not None
            and gdn_windows.has_window_kernel(net)
            and inputs.dtype in (self._dtype, mx.uint8)
            and Format.of(net.out_proj) is not None
        )

    def _attention(self, module: Any, mlp: FusedMLP | None) -> Layer | None:
        attention = module.self_attn
        parts = fused_projections(attention, self._fuse)
        if parts is None:
            return None
        best = FusedAttentionLayer(module, parts, mlp, fuses_norm=False)
        if self._choose is None:
            return best
        if prepare_rows.can_prepare(attention):
            prepared = PreparedAttentionLayer(module, parts, mlp, fuses_norm=False)
            shapes = f"{attention.num_attention_heads} and {attention.num_key_value_heads} heads"
            if self._wins("attention_prepare", shapes, prepare_rows.SOURCE, prepared, best):
                best = prepared
        normed = type(best)(module, parts, mlp, fuses_norm=True)
        best = normed if mlp and self._wins_norm(normed, best) else best
        best.windows = self._windows(attention)
        return best

    def _windows(self, attention: Any) -> list[int]:
        """Return the measured widths of windows that the kernel for them attends faster."""
        heads, rows = attention.num_attention_heads, (attention.num_key_value_heads, attention.head_dim)
        if rows[1] not in window_attention.DIMS or self._choose is None:
            return []
        dtype, kv_format, source = self._dtype, self._kv_format, window_attention.SOURCE + window_attention.MERGE
        shapes = f"{heads} and {rows[0]} heads of {rows[1]} in {dtype}, keys in {kv_format.bits or 'as many'} bits"

        def trial(width: int) -> KernelTrial:
            parts = window_sides(heads, rows, dtype, kv_format)
            own, replaced = (PartTrial(lambda x, *_, part=part: part(x)) for part in parts)
            return try_layer(own, replaced, heads * rows[1], dtype, [(1, width)], WINDOW_SECONDS)

        name = "window_attention_{}".format
        return [w for w in window_attention.WIDTHS if self._choose(name(w), shapes, source, partial(trial, w))]

    def picks(self, kernel: str, shapes: str, source: str, width: int, own: Rows, replaced: Rows) -> bool:
        """Return whether to use `kernel`, by a trial of `own` and `replaced`."""
        if self._choose is None:
            return False
        first, second = (PartTrial(lambda x, *_, part=part: part(x)) for part in (own, replaced))
        trial = partial(try_layer, first, second, width, self._dtype)
        return self._choose(kernel, f"{shapes}, rows of {width} in {self._dtype}", source, trial)

    def _wins_norm(self, normed: Layer, without: Layer) -> bool:
        return self._wins("residual_norm", "any heads", NORM_SOURCE, normed, without)

    def _wins(self, kernel: str, shapes: str, source: str, with_kernel: Tried, without: Tried) -> bool:
        """Return whether a layer with `kernel` is right and not slower than the same layer without it."""
        assert self._choose is not None
        known = f"{shapes}, rows of {self._hidden} in {self._dtype}"
        trial = partial(try_layer, with_kernel, without, self._hidden, self._dtype)
        return self._choose(kernel, known, source, trial)


BATCHES = ((1, 1), (1, 4), (8, 1))
"""Sequences and tokens of each. They are those of plain decoding, of drafts and of several clients."""

STEPS = 8
"""Steps of one evaluation. Each needs the rows and the states of the one before, as in an answer."""

ROUNDS = 7
"""Evaluations of each batch with each layer, in turn. Their medians count."""

TRIAL_SECONDS = 2.0
"""Seconds of a trial after which no further round begins. More than ROUNDS follow while noise hides which layer is
faster, as on a machine that is busy at the start. A model has up to three trials."""

WINDOW_SECONDS = 0.25
"""Seconds of a trial of attention, of which a model has one for each measured width."""

INPUT = 0.03
"""Root mean square of the rows. Against larger ones, what a layer adds would be lost in their rounding."""


@dataclass(frozen=True)
class PartTrial:
    """A part of a layer that is tried as a layer: what it adds to rows, and its caches."""

    adds: Callable[..., mx.array]
    new_cache: Callable[[KVFormat], Any] = lambda _: None

    def forward(self, x: mx.array, *rest: Any) -> mx.array:
        return x + self.adds(x, *rest)


Tried = Layer | PartTrial


def try_layer(
    own: Tried,
    replaced: Tried,
    hidden: int,
    dtype: mx.Dtype,
    frames: Sequence[tuple[int, int]] = BATCHES,
    seconds: float | None = None,
) -> KernelTrial:
    """Return the trial of the kernel that `own` has and `replaced` has not, for rows `[…, hidden]` of `dtype`.

    `frames` are sequences and the tokens of each. `seconds` are TRIAL_SECONDS unless given.
    """
    due, rounds = time.monotonic() + (TRIAL_SECONDS if seconds is None else seconds), list[tuple[float, float]]()
    try:
        batches = list[tuple[mx.array, int]]()
        for sequences, tokens in frames:
            x = mx.random.normal((sequences * tokens, hidden), scale=INPUT, key=mx.random.key(5))
            batches.append((x.astype(dtype), sequences))
            found, expected = (_added(layer, *batches[-1], 2) for layer in (own, replaced))
            if problem := difference(found, expected, TOLERANCE[dtype]):
                return KernelTrial(problem=problem)
        while not rounds or (_is_open(rounds) and time.monotonic() < due):
            first, second = (own, replaced) if len(rounds) % 2 else (replaced, own)
            times = {id(first): 0.0, id(second): 0.0}
            for x, sequences in batches:
                for layer in (first, second):
                    began = time.perf_counter()
                    mx.eval(_added(layer, x, sequences, STEPS))
                    times[id(layer)] += time.perf_counter() - began
            rounds.append((times[id(own)] / STEPS, times[id(replaced)] / STEPS))
    except Exception as error:  # whatever the compiler of a machine finds wrong
        return KernelTrial(problem=str(error)[:300])
    return KernelTrial(*(statistics.median(side) for side in zip(*rounds, strict=True)))


def _is_open(rounds: list[tuple[float, float]]) -> bool:
    """Return whether there are fewer than ROUNDS, or neither side was faster in three quarters of them."""
    won = sum(mine <= other for mine, other in rounds) / len(rounds)
    return len(rounds) < ROUNDS or 0.25 < won < 0.75


def _added(layer: Tried, x: mx.array, sequences: int, steps: int) -> mx.array:
    """Return what `steps` steps of the layer add to `x`."""
    caches = [layer.new_cache(KVFormat()) for _ in range(sequences)]
    widths, start = [x.shape[0] // sequences] * sequences, x
    for _ in range(steps):
        x = layer.forward(x, caches, widths, [False] * sequences)
    return x - start
