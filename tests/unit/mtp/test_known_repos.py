"""Short names of models, as people type them for other programs."""

from __future__ import annotations

import pytest

from mtp.checkpoint.hub.known_repos import KNOWN, close_names, known_repo
from mtp.checkpoint.hub.published import MODELS, find_published
from mtp.checkpoint.hub.resolve import find_model
from proto.errors import CheckpointError

NAMES = {
    "qwen3.5:27b": "mlx-community/Qwen3.5-27B-4bit",
    "qwen3.5-27b-4bit": "mlx-community/Qwen3.5-27B-4bit",
    "qwen3.5-9b@4bit": "mlx-community/Qwen3.5-9B-4bit",
    "qwen3.6:35b": "mlx-community/Qwen3.6-35B-A3B-4bit",
    "qwen3.6:35b-a3b-q8_0": "mlx-community/Qwen3.6-35B-A3B-8bit",
    "Qwen3.6-35B-8bit": "mlx-community/Qwen3.6-35B-A3B-8bit",
    "qwen3.6:27b-mtp-q4_K_M": "kradih/Qwen3.6-27B-MTP-4bit-MLX",
    "qwen3.8-flash-next": "Jundot/Qwen3.8-Flash-Next-oQ4e-mtp",
    "qwen3.5:27b-bf16": "Qwen/Qwen3.5-27B",
    "qwen3.5:0.8b": "Qwen/Qwen3.5-0.8B",
}
"""Names of Ollama, LM Studio and Rapid-MLX, and the repos that are meant."""


@pytest.mark.parametrize(("text", "repo"), NAMES.items())
def test_a_short_name_means_a_repo(text: str, repo: str) -> None:
    known = known_repo(text)
    assert known is not None
    assert known.name == repo


@pytest.mark.parametrize("text", ["builtin", "Qwen/Qwen3.5-27B", "qwen3.7:27b", "llama3:8b", "", "qwen3.8:27b-6bit"])
def test_any_other_text_is_left_alone(text: str) -> None:
    assert known_repo(text) is None


def test_a_wrong_name_comes_with_close_ones() -> None:
    assert close_names("qwen3.6:28b")[0] == "qwen3.6:27b"
    with pytest.raises(CheckpointError, match=r"Did you mean .*qwen3\.6:27b"):
        find_model("qwen3.6:28b")


def test_every_known_repo_is_of_a_published_model() -> None:
    """`plan --bits` and `recommend` have the config of each, and each model has a short name or is Qwen3-Next."""
    models = {find_published(one.name) for one in KNOWN}
    assert None not in models
    assert {one.name for one in MODELS if one not in models} == {"Qwen3-Next-80B-A3B"}
