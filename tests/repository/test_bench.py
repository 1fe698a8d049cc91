"""The parts that the benches share: the random model, the published figures, and the ratios."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.generation.request import GenerationRequest
from coordinator.text.tokenizer import Tokenizer
from tests.bench import checkpoints, report, servers
from tests.bench.random_model import prompt_of, words, write_random_model
from tests.support.stages.local_run import run


def test_the_random_model_says_words_to_the_end(tmp_path: Path) -> None:
    """Prompts have the requested length; every token of an answer is visible at once, and none is an end token."""
    model = write_random_model(tmp_path / "random", hidden=64, layers=2, dtype=mx.bfloat16)
    assert (model / "model.safetensors.index.json").exists()
    tokenizer = Tokenizer.load(model)
    prompt = tokenizer.encode(prompt_of(tokenizer, 50, seed=1))
    assert len(prompt) == 50
    (answer,) = run(model, [GenerationRequest(prompt, 40)])
    assert len(answer.tokens) == 40
    assert set(answer.tokens) <= set(words(tokenizer))


def test_prompts_of_two_seeds_share_nothing(tmp_path: Path) -> None:
    """Prompts of two seeds share no prefix, so that a server's prefix cache cannot help."""
    model = write_random_model(tmp_path / "random", hidden=64, layers=2, dtype=mx.bfloat16)
    tokenizer = Tokenizer.load(model)
    one, other = (tokenizer.encode(prompt_of(tokenizer, 20, seed)) for seed in (1, 2))
    assert one[:2] != other[:2]


def test_figures_and_chart_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench writes one JSON file with the hardware and one PNG, under its name."""
    monkeypatch.setattr(report, "FOLDER", tmp_path / "bench")
    report.publish("name", {"a": 1.5}, {"title": report.bars({"a": 1.5}, "s")})
    written = json.loads((tmp_path / "bench" / "name.json").read_text())
    assert written["figures"] == {"a": 1.5}
    assert "cores" in written["machine"]
    assert (tmp_path / "bench" / "name.png").read_bytes().startswith(b"\x89PNG")


def test_the_bench_of_checkpoints_leaves_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bench writes every printed row into its JSON file, and a chart."""
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    checkpoints.show([checkpoints.Row("convert", 4, 6, 0.5), checkpoints.Row("add", 2, 2, 1.0)], 9)
    figures = json.loads((tmp_path / "checkpoints.json").read_text())["figures"]
    assert figures["checkpoint"] == 9
    assert figures["rows"][0] == {"what": "convert", "size": 4, "cost": 6, "seconds": 0.5}
    assert (tmp_path / "checkpoints.png").exists()


def test_ratios_are_taken_within_a_round() -> None:
    """A speed-up is the median of the ratios within the rounds; for seconds the smaller value is faster."""
    rounds = {
        "first token": {servers.OURS: [1.0, 2.0, 4.0], servers.ONE: [2.0, 6.0, 4.0]},
        "one stream": {servers.OURS: [1.0, 2.0, 4.0], servers.ONE: [2.0, 6.0, 4.0]},
    }
    found = servers.speedups(rounds)
    assert found["first token"] == {servers.ONE: 2.0}
    assert found["one stream"] == {servers.ONE: 0.5}
