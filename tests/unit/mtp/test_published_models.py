"""The shapes of published models that mlx-lm's classes serve, against the figures of their publishers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.checkpoint.hub.known_repos import MLX_LM_MODELS, MlxLmModel, known_repo
from mtp.checkpoint.hub.published import converted_headers, find_published

each_model = pytest.mark.parametrize("model", MLX_LM_MODELS, ids=lambda model: model.name)

GB, GIB = 1e9, 2**30

DOWNLOADS: dict[tuple[str, int | None], float] = {
    ("Mistral-Small-24B", 4): 13.3 * GB,
    ("NVIDIA-Nemotron-3-Nano-30B-A3B", 4): 17.793 * GB,
    ("gpt-oss-120b", 8): 63.4 * GB,
    ("gpt-oss-120b", None): 65.3 * GB,  # OpenAI's own files
    ("Mistral-Large", 4): 69.0 * GB,
    ("MiniMax-M2.7", 4): 119.85 * GIB,  # that of M2.5
    ("Qwen3-235B-A22B", 4): 132 * GB,
    ("GLM-4.7", 4): 199 * GB,  # that of 4.6
    ("Qwen3-Coder-480B-A35B", 4): 251.54 * GIB,
    ("DeepSeek-V3.2", 4): 352 * GIB,  # that of V3, whose layers have no indexer
}
"""Bytes of published files by the lists of models in other programs, by the number of bits."""


def model_of(name: str) -> MlxLmModel:
    """Return a model by its name."""
    return next(model for model in MLX_LM_MODELS if model.name == name)


@each_model
def test_parameters_are_those_that_publishers_name(model: MlxLmModel) -> None:
    """All parameters come within a hundredth, and those that a token reads, as the planner counts them, in a tenth.

    Some publishers count the embedding as active.
    """
    checkpoint = converted_headers(replace(model, experts_mode=""), None)
    sizes = checkpoint.part_bytes()
    read = 0.0
    for part in checkpoint.plans:
        routed = checkpoint.routed_tensors(part)
        stored = checkpoint.stored_bytes(part) if part != "embed" else {}
        read += sum(n * (checkpoint.config.shape.routed_share if name in routed else 1) for name, n in stored.items())
    assert sum(sizes.values()) / 2e9 == pytest.approx(model.parameters, rel=0.01)
    error = min(abs(active / 2e9 / model.active - 1) for active in (read, read + sizes["embed"]))
    assert error < 0.1


@each_model
def test_a_conversion_is_complete(model: MlxLmModel) -> None:
    checkpoint = converted_headers(model, 4)
    assert missing_from_backbone(checkpoint) == ()
    assert checkpoint.unknown == ()


@pytest.mark.parametrize(("name", "bits"), DOWNLOADS, ids=str)
def test_files_have_the_published_size(name: str, bits: int | None) -> None:
    found = sum(converted_headers(model_of(name), bits).part_bytes().values())
    assert found == pytest.approx(DOWNLOADS[name, bits], rel=0.01)


def test_keys_and_values_have_the_published_size() -> None:
    """DeepSeek's paper on V3's hardware has 70.272 KB a token, and 327.68 for the layers of a dense 70B.

    mlx-lm keeps the keys of an indexer twice. A layer with a window holds the same bytes for any context.
    """
    shapes = {name: converted_headers(model_of(name), 4).config.shape for name in ("Llama-3.3-70B", "gpt-oss-120b")}
    latent, sparse = (converted_headers(model_of(name), 4).config.shape for name in ("Kimi-K2", "DeepSeek-V3.2"))
    tokens = [sum(layer.token_values for layer in shape.layers) * 2 for shape in (shapes["Llama-3.3-70B"], latent)]
    assert tokens == [327_680, 70_272]
    assert sum(layer.token_values for layer in sparse.layers) * 2 == 70_272 + 61 * 2 * 128 * 2
    windows = shapes["gpt-oss-120b"].layers[::2]
    assert {layer.kind for layer in windows} == {"window"}
    assert sum(layer.sequence_bytes(2) for layer in windows) == 18 * 128 * 2 * 8 * 64 * 2
    assert sum(layer.token_values for layer in windows) == 0


NAMES = {
    "glm-4.7": "GLM-4.7",
    "glm4.7:355b": "GLM-4.7",
    "gpt-oss-120b": "gpt-oss-120b",
    "llama3.3:70b-q4": "Llama-3.3-70B",
    "qwen3:235b": "Qwen3-235B-A22B",
    "Kimi-K2-Thinking": "Kimi-K2",
}


@pytest.mark.parametrize(("text", "name"), NAMES.items())
def test_people_name_a_model_in_many_ways(text: str, name: str) -> None:
    model, known = model_of(name), known_repo(text)
    assert find_published(text) is model
    assert known is not None and known.name == model.repo


@each_model
def test_the_repo_and_the_short_name_mean_the_model(model: MlxLmModel) -> None:
    assert find_published(model.repo) is find_published(model.short) is model
    assert find_published(f"someone/{model.name}-Instruct-8bit") is model


@pytest.mark.parametrize("text", ["glm-4.7-flash", "kimi-k2.5", "gpt-oss:20b", "llama3.1:70b", "mistral-small:22b"])
def test_a_model_with_a_similar_name_is_another(text: str) -> None:
    assert find_published(text) is None
    assert known_repo(text) is None


@pytest.mark.parametrize("text", ["glm-4.7-8bit", "glm-4.7-bf16", "gpt-oss:120b-q8"])
def test_other_bits_name_no_repo(text: str) -> None:
    """A plan knows the shape, but the repo in 4 bits is not what was asked for."""
    assert find_published(text) is not None
    assert known_repo(text) is None
