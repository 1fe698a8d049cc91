"""The trial of a model type that no test has compared: mlx-lm's class against spans of it, small, with random weights.

`tests/parity/test_mlx_models.py` compares the types of mlx-lm with the same spans, and more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mtp.checkpoint.families.fields import Text
from mtp.layers.layer import KVFormat
from mtp.mlx_models.caches import MlxLmCache
from mtp.mlx_models.layers import MlxLmSpan, Tail
from mtp.mlx_models.skeleton import Skeleton, make_model
from mtp.mlx_models.structure import ModelStructure, structure_of
from mtp.mlx_models.weights import parameter_place
from proto.errors import CheckpointError
from proto.span import Span

CHUNKS = ((0, 9), (9, 10), (10, 11), (11, 14), (14, 15))
"""Rows of a prompt, of steps and of a window."""

WINDOWS = ((3, 1), (0, 2), (1, 3), (2, 0), (3, 3), (1, 1))
"""Accepted tokens of windows of three, of two sequences."""

CLOSE = 1e-5
"""The largest relative difference of logits after windows: their rows ran beside others."""

MOST_VALUES = 2**22
"""Weights of a model that is tried: 16 MiB in fp32."""

MOST_TRIES = 150
"""Configs that are tried to find a small one. Each takes some hundredths of a second."""

MOST_LAYERS = 16
"""Layers of a model that is tried."""

_SHORT = ("window", "chunk", "topk")
"""Words in the names of fields whose bound on tokens a trial should exceed, and this bound."""
_FEW = 8


class Pair:
    """A model of mlx-lm in fp32 with random weights, and spans of it with the same weights."""

    def __init__(self, config: Text) -> None:
        self.config, self.plan = config, structure_of(config)
        mx.random.seed(1)
        self.model: Any = make_model(config)
        self.model.update(
            tree_map(
                lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w, self.model.parameters()
            )
        )
        self.weights: Any = tree_flatten(self.model.parameters())
        mx.eval(self.model.parameters())
        words = min(self.plan.vocabulary, 100)
        self.texts = [[(7 * i + 3 * k + 1) % words for i in range(40)] for k in range(2)]
        self.wrong = words - 1

    def logits(self, chunks: Sequence[Sequence[int]]) -> list[mx.array]:
        """Return mlx-lm's own logits of the rows of each chunk of a text."""
        cache = make_prompt_cache(self.model)
        found = [self.model(mx.array([chunk]), cache=cache)[0] for chunk in chunks]
        mx.eval(found)
        return found

    def spans(self, cuts: Sequence[int], *, together: bool = False, slots: bool = False) -> Stack:
        """Return the model over spans that end at `cuts`."""
        spans = []
        for start, end in pairwise([0, *cuts, len(self.plan.layers)]):
            skeleton = Skeleton(self.config)
            skeleton.model.load_weights(list(self.weights))
            span = MlxLmSpan(skeleton, self.plan, Span(start, end), mx.float32)
            span.together, span.slots = together, slots
            spans.append(span)
        return Stack(spans)


Sequence_ = list[list[MlxLmCache]]
"""The caches of a sequence by span and layer."""


class Stack:
    """Spans that follow each other."""

    def __init__(self, spans: list[MlxLmSpan]) -> None:
        self.spans, self.tail = spans, Tail(spans[-1].skeleton)

    def new(self) -> Sequence_:
        """Return the caches of a new sequence."""
        return [[layer.new_cache(KVFormat()) for layer in span.layers] for span in self.spans]

    def logits(
        self, sequences: Sequence[Sequence_], rows: Sequence[Sequence[int]], *, is_open: bool = False
    ) -> mx.array:
        """Return the logits of the rows of several sequences, which run in one frame."""
        x, widths = mx.array([token for own in rows for token in own], mx.uint32)[:, None], [len(own) for own in rows]
        for number, span in enumerate(self.spans):
            caches = [sequence[number] for sequence in sequences]
            span.enter(x, caches, widths)
            for index, layer in enumerate(span.layers):
                x = layer.forward(x, [own[index] for own in caches], widths, [is_open] * len(widths))
        found = self.tail(x)
        mx.eval(found)
        return found


def commit(sequence: Sequence_, accepted: int, width: int) -> None:
    """Accept the first tokens of the only open window."""
    for cache in (cache for own in sequence for cache in own):
        if accepted == width:
            cache.apply_commit(1, None, 0)
        else:
            cache.apply_commit(0, accepted, width - accepted)


def difference(found: mx.array, expected: mx.array) -> float:
    """Return the largest difference over the largest value, infinity for NaN."""
    apart = float(mx.abs(found - expected).max() / mx.maximum(mx.abs(expected).max(), 1e-9))
    return apart if apart == apart else float("inf")


def spans_differ(pair: Pair, cuts: Sequence[int]) -> bool:
    """Return whether the logits over spans differ from mlx-lm's by a bit."""
    chunks = [pair.texts[0][start:end] for start, end in CHUNKS]
    stack = pair.spans(cuts)
    sequence = stack.new()
    pairs = zip(chunks, pair.logits(chunks), strict=True)
    return not all(mx.array_equal(stack.logits([sequence], [rows]), own).item() for rows, own in pairs)


def run_windows(pair: Pair, stack: Stack) -> tuple[list[Sequence_], list[list[int]], mx.array]:
    """Run two texts through WINDOWS. Return their caches, their next tokens and mlx-lm's logits of these."""
    both, lengths = [stack.new(), stack.new()], [12, 5]
    stack.logits(both, [text[:length] for text, length in zip(pair.texts, lengths, strict=True)])
    for accepted in WINDOWS:
        rows = [
            [*text[at : at + count], *[pair.wrong] * (3 - count)]
            for text, at, count in zip(pair.texts, lengths, accepted, strict=True)
        ]
        stack.logits(both, rows, is_open=True)
        for sequence, count in zip(both, accepted, strict=True):
            commit(sequence, count, 3)
        lengths = [at + count for at, count in zip(lengths, accepted, strict=True)]
    ends = [(text[:at], text[at : at + 1]) for text, at in zip(pair.texts, lengths, strict=True)]
    return both, [end for _, end in ends], mx.concatenate([pair.logits(end)[1] for end in ends])


@lru_cache(maxsize=8)
def trial_problem(config: str) -> str:
    """Return why the model of a config as JSON cannot be served, empty if it can."""
    try:
        with mx.stream(mx.cpu):
            pair = Pair(small_config(json.loads(config)))
            for cuts in ([], [len(pair.plan.layers) // 2]):
                if spans_differ(pair, cuts):
                    return "its logits over machines differ from mlx-lm's"
                stack = pair.spans(cuts)
                both, nexts, expected = run_windows(pair, stack)
                if difference(stack.logits(both, nexts), expected) > CLOSE:
                    return "its logits after a rejected draft differ from mlx-lm's"
    except Exception as error:  # whatever a class does
        return f"a small model of it could not be compared with mlx-lm: {error!s:.200}"
    return ""


# ---- small models


def small_config(config: Text) -> Text:
    """Return a config whose few narrow layers have all kinds of layers of `config`. Raises CheckpointError."""
    return _narrowed(_shortened(config))


def _shortened(config: Text) -> Text:
    """Return `config` with the first layers alone, of which each kind is one."""
    every = _layer_kinds(structure_of(config))
    for count in range(min(4, len(every)), min(len(every), MOST_LAYERS) + 1):
        found: Text = _with_layers(config, len(every), count)
        with suppress(Exception):  # whatever a class does
            kinds = _layer_kinds(structure_of(found))
            if len(kinds) == count and set(kinds) == set(every):
                return found
    raise CheckpointError(f"no config of up to {MOST_LAYERS} layers has all kinds of its layers")


def _with_layers(value: Any, layers: int, count: int, name: str = "") -> Any:
    """Return a field with `count` in the place of the number of layers, and for lists of an entry for each layer."""
    if isinstance(value, dict):
        return {name: _with_layers(inner, layers, count, name) for name, inner in value.items()}
    if isinstance(value, list) or (isinstance(value, str) and "pattern" in name):
        return value[:count] if len(value) == layers else value
    return count if type(value) is int and value == layers and "layer" in name else value


def _narrowed(config: Text) -> Text:
    """Return `config` with smaller sizes, the largest first."""
    found, tries = config, iter(range(MOST_TRIES))
    for name, value in sorted(set(_integers(config)), key=lambda field: -field[1]):
        is_short = any(word in name for word in _SHORT) and "layer" not in name
        for divisor in (value // _FEW,) if is_short else (64, 32, 16, 8, 4, 2):
            is_wanted = is_short or _size(structure_of(found)) > MOST_VALUES
            if divisor < 2 or value % divisor or not is_wanted or next(tries, None) is None:
                continue
            tried = _with_size(found, name, value, value // divisor)
            saved = _saved_values(found, tried)
            if saved is not None and (saved > 0 or is_short):
                found = tried
            if saved is not None:
                break
    if (size := _size(structure_of(found))) > MOST_VALUES:
        raise CheckpointError(f"its smallest model has {size:,} weights, above {MOST_VALUES:,}")
    return found


def _with_size(config: Text, name: str, old: int, new: int) -> Text:
    """Return `config` with another size in each field of this name and size."""
    sizes = {its: _with_size(value, name, old, new) for its, value in config.items() if isinstance(value, dict)}
    return config | sizes | ({name: new} if config.get(name) == old else {})


def _integers(config: Text) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _integers(value)
        elif type(value) is int and value > 1:
            yield name, value


def _layer_kinds(plan: ModelStructure) -> list[tuple[Any, ...]]:
    """Return for each layer its caches, and the names of its parameters."""
    names: dict[str, list[str]] = {}
    for name, _ in plan.shapes:
        part, within = parameter_place(plan, name) or ("", name)
        names.setdefault(part, []).append(within)
    return [
        (tuple(plan.kinds[place] for place in layer.places), *names.get(f"layers.{index}", ()))
        for index, layer in enumerate(plan.layers)
    ]


def _size(plan: ModelStructure) -> int:
    return sum(prod(shape) for _, shape in plan.shapes)


def _saved_values(old: Text, new: Text) -> int | None:
    """Return how many weights fewer `new` has, None if it cannot be made or has layers of other kinds."""
    try:
        before, after = structure_of(old), structure_of(new)
    except Exception:  # whatever a class does with sizes that do not fit
        return None
    names = [[kind.partition(" ")[0] for kind in plan.kinds] for plan in (before, after)]
    is_alike = names[0] == names[1] and len(before.layers) == len(after.layers)
    return _size(before) - _size(after) if is_alike else None
