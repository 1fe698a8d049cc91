"""Models of mlx-lm over spans of layers give the logits of mlx-lm, for each model type that mlx-lm has.

`python -m tests.parity.test_mlx_models` writes the results to `mtp/mlx_models/tested_types.json`, which decides over
the types that are served. A type is compared in fp32 with tiny random weights: over one, two and three spans to the
bit, with windows that are accepted, cut and dropped, with two sequences of different lengths together, also in one
array, and with copies and backups.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mtp.layers.layer import KVFormat
from mtp.mlx_models.caches import MlxLmCache
from mtp.mlx_models.layers import MlxLmSpan, Tail
from mtp.mlx_models.skeleton import Skeleton, make_model
from mtp.mlx_models.structure import ModelStructure, structure_of
from mtp.mlx_models.tested_types import FILE, TypeResult, known_results
from proto.errors import CheckpointError
from proto.span import Span
from tests.support.tiny_configs import MODEL_TYPES, tiny_config

NOT_TRIED = {
    "bitnet": "its kernels run on Apple GPUs alone, where no test has compared it",
    "muse_spark": "its kernels run on Apple GPUs alone, where no test has compared it",
    "phi3small": "mlx-lm's own class writes beyond its memory on a CPU",
    "olmo": "its module in mlx-lm ends the process without the package ai2-olmo",
    "longcat_flash_ngram": "its embedding reads the tokens before each row, which a stage does not keep",
    "prism_hadamard_qwen35": "its layers are packed in a form that only mlx-lm's own loader reads",
    "plamo3": "the masks of mlx-lm's own class depend on how a prompt is cut into pieces",
}
"""The types that are refused without a comparison, or whose comparison shows a fault that has this cause."""

CHUNKS = ((0, 9), (9, 10), (10, 11), (11, 14), (14, 15))
"""Rows of a prompt, of steps and of a window."""

WINDOWS = ((3, 1), (0, 2), (1, 3), (2, 0), (3, 3), (1, 1))
"""Accepted tokens of windows of three, of two sequences."""

CLOSE = 1e-5
"""The largest relative difference of logits after windows: their rows ran beside others."""


class Pair:
    """A model of mlx-lm, and spans of it with the same weights."""

    def __init__(self, model_type: str) -> None:
        self.config = tiny_config(model_type)
        self.plan: ModelStructure = structure_of(self.config)
        mx.random.seed(1)
        self.model: Any = make_model(self.config)
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

    def logits(self, chunks: Sequence[tuple[int, int]], text: int = 0) -> list[mx.array]:
        """Return mlx-lm's own logits of the rows of each chunk of a text."""
        cache = make_prompt_cache(self.model)
        found = [self.model(mx.array([self.texts[text][a:b]]), cache=cache)[0] for a, b in chunks]
        mx.eval(found)
        return found

    def spans(self, cuts: Sequence[int], *, together: bool = False, slots: bool = False) -> Stack:
        """Return the model over spans that end at `cuts`."""
        ends = [0, *cuts, len(self.plan.layers)]
        spans = []
        for start, end in pairwise(ends):
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


def restored(stack: Stack, sequence: Sequence_, length: int) -> Sequence_:
    """Return a sequence from backups of another, in two parts where they append."""
    found = []
    for span, caches in zip(stack.spans, sequence, strict=True):
        own = []
        for layer, cache in zip(span.layers, caches, strict=True):
            states = [cache.backup_arrays(0, 4), cache.backup_arrays(4, length)]
            own.append(layer.new_cache(KVFormat()).with_backups(states if cache.appends else states[1:], length))
        found.append(own)
    return found


def difference(found: mx.array, expected: mx.array) -> float:
    """Return the largest difference over the largest value, infinity for NaN."""
    apart = float(mx.abs(found - expected).max() / mx.maximum(mx.abs(expected).max(), 1e-9))
    return apart if apart == apart else float("inf")


def spans_differ(pair: Pair) -> bool:
    """Return whether the logits over one, two and three spans differ from mlx-lm's by a bit."""
    count = len(pair.plan.layers)
    expected = pair.logits(CHUNKS)
    for cuts in ([], [count // 2], [1], [count - 1], [1, count - 1]):
        stack = pair.spans(cuts)
        sequence = stack.new()
        for (start, end), rows in zip(CHUNKS, expected, strict=True):
            if not mx.array_equal(stack.logits([sequence], [pair.texts[0][start:end]]), rows).item():
                return True
    return False


def windows_differ(pair: Pair, **ways: bool) -> bool:
    """Return whether the logits after windows, copies and backups of two sequences differ from mlx-lm's."""
    stack = pair.spans([len(pair.plan.layers) // 2], **ways)
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
    copies = [[[cache.copy() for cache in own] for own in sequence] for sequence in both]
    backups = [restored(stack, sequence, at) for sequence, at in zip(both, lengths, strict=True)]
    nexts = [[text[at]] for text, at in zip(pair.texts, lengths, strict=True)]
    expected = mx.concatenate([pair.logits([(0, at), (at, at + 1)], number)[1] for number, at in enumerate(lengths)])
    return any(difference(stack.logits(each, nexts), expected) > CLOSE for each in (both, copies, backups))


def result_of(model_type: str) -> TypeResult:
    """Return the result of all comparisons for a type."""
    if reason := NOT_TRIED.get(model_type):
        return TypeResult(reason)
    try:
        pair = Pair(model_type)
    except CheckpointError as error:
        return TypeResult(str(error).split(":")[0] if "one by one" in str(error) else str(error).removesuffix("."))
    if spans_differ(pair):
        return TypeResult("its logits over two machines differ from mlx-lm's")
    if windows_differ(pair):
        return TypeResult("its logits after a rejected draft differ from mlx-lm's")
    return TypeResult("", runs_together(pair, together=True), runs_together(pair, slots=True))


def runs_together(pair: Pair, **ways: bool) -> bool:
    """Return whether sequences run together in one of the `ways`, and give the same as each alone."""
    spans = pair.spans([len(pair.plan.layers) // 2], **ways).spans
    return all(span.can_batch() for span in spans) and not windows_differ(pair, **ways)


USUAL = ("llama", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "lfm2", "mamba2", "gemma3_text", "nemotron_h")


@pytest.mark.parametrize(
    "model_type",
    [t if t in USUAL else pytest.param(t, marks=pytest.mark.thorough) for t in MODEL_TYPES if t not in NOT_TRIED],
)
def test_a_model_type_of_mlx_lm(model_type: str) -> None:
    """The table has what a comparison gives now."""
    assert result_of(model_type) == known_results()[model_type]


def test_keys_and_values_count_as_copied() -> None:
    """A frame that begins early copies what is written in place, and no recurrent state."""
    pair = Pair("jamba")
    stack = pair.spans([2])
    sequence = stack.new()
    stack.logits([sequence], [pair.texts[0][:9]])
    for caches in sequence:
        for cache in caches:
            assert cache.copied_nbytes(1) == (cache.nbytes if cache.appends else 0)


def test_the_table_covers_mlx_lm() -> None:
    """Each type has a result. Most are served, and each other one has its reason."""
    found = known_results()
    assert found.keys() == set(MODEL_TYPES) | set(NOT_TRIED)
    assert sum(not tested.refused for tested in found.values()) >= 70


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(asdict(result_of(sys.argv[1]))))
        sys.exit()
    results = {}
    for name in sorted({*MODEL_TYPES, *NOT_TRIED}):
        done = subprocess.run([sys.executable, "-m", __spec__.name, name], capture_output=True, text=True, check=False)
        results[name] = (
            json.loads(done.stdout) if done.returncode == 0 else {"refused": "mlx-lm's class ends the process"}
        )
        print(name, results[name], done.stderr[-300:] if done.returncode else "", flush=True)
    results = {name: {key: value for key, value in found.items() if value} for name, found in results.items()}
    FILE.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
