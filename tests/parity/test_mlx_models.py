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
from dataclasses import asdict

import pytest

from mtp.layers.layer import KVFormat
from mtp.mlx_models.tested_types import FILE, TypeResult, known_results
from mtp.mlx_models.trial import CLOSE, Pair, Sequence_, Stack, difference, run_windows, spans_differ
from proto.errors import CheckpointError
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


def windows_differ(pair: Pair, **ways: bool) -> bool:
    """Return whether the logits after windows, copies and backups of two sequences differ from mlx-lm's."""
    stack = pair.spans([len(pair.plan.layers) // 2], **ways)
    both, nexts, expected = run_windows(pair, stack)
    copies = [[[cache.copy() for cache in own] for own in sequence] for sequence in both]
    backups = [restored(stack, sequence, sequence[0][0].length) for sequence in both]
    return any(difference(stack.logits(each, nexts), expected) > CLOSE for each in (both, copies, backups))


def result_of(model_type: str) -> TypeResult:
    """Return the result of all comparisons for a type."""
    if reason := NOT_TRIED.get(model_type):
        return TypeResult(reason)
    try:
        pair = Pair(tiny_config(model_type))
    except CheckpointError as error:
        return TypeResult(str(error).split(":")[0] if "one by one" in str(error) else str(error).removesuffix("."))
    count = len(pair.plan.layers)
    if any(spans_differ(pair, cuts) for cuts in ([], [count // 2], [1], [count - 1], [1, count - 1])):
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
    pair = Pair(tiny_config("jamba"))
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
