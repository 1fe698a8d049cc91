"""The decoder layers of a model of mlx-lm behind this project's interface, for rows of several sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mtp.layers.exact import ExactProducts
from mtp.layers.layer import Hole, KVFormat, Layer, LayerCache
from mtp.mlx_models.caches import MlxLmCache, after, is_ragged, is_trimmed, let_ragged, together
from mtp.mlx_models.skeleton import Call, Skeleton, attention_modules, module_name
from mtp.mlx_models.slots import FrameLengths, compile_kernels, slotted
from mtp.mlx_models.structure import LayerStructure, ModelStructure
from mtp.mlx_models.tested_types import TypeResult, known_results
from proto.errors import UsageError
from proto.span import Span


@dataclass(frozen=True)
class _Group:
    """Sequences of a frame that run together, by their number, with their rows and the calls of all layers."""

    sequences: Sequence[int]
    rows: Sequence[slice]
    width: int
    hidden: mx.array
    calls: Sequence[Call]


class MlxLmSpan:
    """The layers of one stage, which share what the model says about a frame.

    A layer takes its masks and positions from caches of its own kind. A layer of another stage has a cache of this
    stage of its kind in its place, or an empty one where only other stages have this kind.
    """

    together: bool
    """True if sequences of different lengths may run together."""
    slots: bool
    """True if they may with the keys and values of all of them in one array."""

    def __init__(self, skeleton: Skeleton, plan: ModelStructure, span: Span, dtype: mx.Dtype) -> None:
        self.skeleton, self.plan, self.span, self.dtype = skeleton, plan, span, dtype
        let_ragged(attention_modules(skeleton.model))
        self.empty = skeleton.new_caches()
        plain = {kind for kind, cache in zip(plan.kinds, self.empty, strict=True) if type(cache) is KVCache}
        self._positions = plain
        """The kinds of caches that say after how many tokens a row is, also to layers of other kinds."""
        self.layers = [MlxLmLayer(self, index, plan.layers[index]) for index in span]
        self.groups: list[_Group] = []
        tested = known_results().get(module_name(plan.model_type), TypeResult())
        self.together, self.slots = tested.together, tested.slots
        if not self.can_batch():
            self.together = self.slots = False
        if self.slots:
            compile_kernels(dtype)

    def can_batch(self) -> bool:
        """Return whether sequences run together as `together` and `slots` say. Nothing is computed."""
        if not (self.together or self.slots):
            return False
        caches = [[layer.new_cache(KVFormat()) for layer in self.layers] for _ in range(2)]
        try:
            for rows, tokens in ((slice(0, 1), 3), (slice(1, 2), 2), (slice(0, 2), 1), (slice(0, 2), 2)):
                x = mx.zeros((len(caches[rows]) * tokens, self.plan.hidden), self.dtype)
                if self.span.start == 0:
                    x = mx.zeros((x.shape[0], 1), mx.uint32)
                self.enter(x, caches[rows], [tokens] * len(caches[rows]))
                for number, layer in enumerate(self.layers):
                    x = layer.forward(x, [own[number] for own in caches[rows]], [tokens] * len(caches[rows]))
        except Exception:  # whatever a class does with an array that it does not get
            return False
        return True

    def enter(self, x: mx.array, sequences: Sequence[Sequence[MlxLmCache]], widths: Sequence[int]) -> None:
        """Ask the model for the calls of its layers. `sequences` have the caches of all layers of the stage."""
        self.groups = []
        ends = list(accumulate(widths))
        for members, places in self._together(sequences, widths):
            rows = [slice(ends[i] - widths[i], ends[i]) for i in members]
            width = widths[members[0]]
            entry = self.skeleton.enter(self._tokens(x, rows, width), places)
            self.groups.append(_Group(members, rows, width, entry.hidden, entry.calls))

    def _together(
        self, sequences: Sequence[Sequence[MlxLmCache]], widths: Sequence[int]
    ) -> Iterator[tuple[list[int], list[Any]]]:
        """Yield the numbers of sequences that run together and their caches: of one width, and all new or none."""
        found: dict[tuple[int, bool], list[int]] = {}
        for number, (caches, width) in enumerate(zip(sequences, widths, strict=True)):
            is_new = all(held.empty() for cache in caches for held in cache.held)
            found.setdefault((width, is_new), []).append(number)
        for (width, _), members in found.items():
            if self.together or self.slots:
                places = self._places([sequences[i] for i in members], width)
                if self.together or len(members) == 1 or not any(map(is_ragged, places)):
                    yield members, places
                    continue
            yield from (([number], self._places([sequences[number]], width)) for number in members)

    def _tokens(self, x: mx.array, rows: Sequence[slice], width: int) -> mx.array:
        """Return the tokens `[n, w]` of the first stage, any others where the rows of `x` are hidden states."""
        if self.span.start > 0:
            return mx.zeros((len(rows), width), mx.int32)
        return _rows_of(x, rows)[:, 0].reshape(len(rows), width)

    def _places(self, sequences: Sequence[Sequence[MlxLmCache]], width: int) -> list[Any]:
        """Return a cache for each place of the model."""
        own: dict[int, Any] = {}
        frame = FrameLengths(width)
        for number, layer in enumerate(self.layers):
            for index, place in enumerate(layer.plan.places):
                own[place] = together([caches[number].held[index] for caches in sequences], frame)
        return self._filled(own, [caches[0].length for caches in sequences])

    def _filled(self, own: dict[int, Any], lengths: Sequence[int]) -> list[Any]:
        """Return the caches `own` by their places, and one for each other place, after `lengths` tokens."""
        kinds = {self.plan.kinds[place]: cache for place, cache in reversed(own.items())}
        for kind in self._positions - kinds.keys():
            kinds[kind] = together([after(length) for length in lengths], FrameLengths(0))
        return [own.get(place, kinds.get(kind, self.empty[place])) for place, kind in enumerate(self.plan.kinds)]

    def run_again(self, layer: MlxLmLayer, rows: mx.array, held: Sequence[Any], length: int) -> None:
        """Advance the caches `held` of one layer over rows `[w, hidden]` that ran before, after `length` tokens."""
        places = self._filled(dict(zip(layer.plan.places, held, strict=True)), [length])
        entry = self.skeleton.enter(mx.zeros((1, rows.shape[0]), mx.int32), places)
        self.skeleton.run(layer.index, rows[None], entry.calls[layer.index])


class MlxLmLayer(Layer):
    """Layer `index` of the model. Rows of the first stage are tokens `[rows, 1]` until its first layer has run."""

    kind = "mlx-lm"
    mlp = None  # type: ignore[assignment]

    def __init__(self, span: MlxLmSpan, index: int, plan: LayerStructure) -> None:
        self.span, self.index, self.plan = span, index, plan
        self.dtype = span.dtype

    @property
    def module(self) -> nn.Module:
        """The layer of mlx-lm."""
        return self.span.skeleton.layers[self.index]

    def new_cache(self, kv_format: KVFormat) -> MlxLmCache:
        fresh = self.span.skeleton.new_caches()
        held = [fresh[place] for place in self.plan.places]
        if self.span.slots and all(map(is_trimmed, held)):
            held = list(map(slotted, held))
        return MlxLmCache(lambda rows, *state: self.span.run_again(self, rows, *state), held)

    def share(self, communicator: Any) -> None:
        """Do nothing: a group is refused before."""

    def pin_exact(self, products: ExactProducts) -> None:
        raise UsageError(f"--exact is not supported for {self.span.plan.model_type}. Leave it out.")

    def enter(self, x: mx.array, sequences: Sequence[Sequence[LayerCache]], widths: Sequence[int]) -> None:
        self.span.enter(x, sequences, widths)  # type: ignore[arg-type]

    def forward(
        self,
        x: mx.array,
        caches: Sequence[MlxLmCache],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        groups = self.span.groups
        outputs: list[mx.array | None] = [None] * len(widths)
        for group in groups:
            if self.index == 0:
                rows = group.hidden
            elif x.ndim == 3:
                rows = x
            else:
                rows = _rows_of(x, group.rows).reshape(len(group.sequences), group.width, -1)
            for place, number in enumerate(group.sequences):
                cache = caches[number]
                if stay_open and stay_open[number]:
                    cache.open_window(rows, place)
                cache.length += group.width
            y = self.span.skeleton.run(self.index, rows, group.calls[self.index])
            if len(groups) == 1:
                # Each reshape of a layer takes the host some microseconds, so layers keep the model's own form.
                return mx.reshape(y, (-1, y.shape[-1])) if self is self.span.layers[-1] else y
            for place, number in enumerate(group.sequences):
                outputs[number] = y[place]
        return mx.concatenate([output for output in outputs if output is not None])


class Tail:
    """The rest of the model after its layers: the final norm and lm_head, with their factors and caps."""

    def __init__(self, skeleton: Skeleton, module: nn.Module | None = None) -> None:
        """Take the rest of `skeleton`. `module` is its lm_head, or the embedding that lm_head is tied to."""
        self._skeleton, self._caches, self.module = skeleton, skeleton.new_caches(), module

    def __call__(self, rows: mx.array) -> mx.array:
        """Return the logits `[rows, vocabulary]` of `rows [rows, hidden]`."""
        return self._skeleton.leave(rows[None], self._caches)[0]


def _rows_of(x: mx.array, rows: Sequence[slice]) -> mx.array:
    if len(rows) == 1 or all(a.stop == b.start for a, b in pairwise(rows)):
        whole = slice(rows[0].start, rows[-1].stop)
        return x if whole == slice(0, x.shape[0]) else x[whole]
    return mx.concatenate([x[one] for one in rows])
