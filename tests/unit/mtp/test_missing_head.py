"""The head of a converted checkpoint, fetched from the model that its card names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.missing_head import base_model, fetch_missing_head, with_fetched_head
from mtp.checkpoint.hub.resolve import resolve_model
from proto.errors import CheckpointError
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import assert_same_tensors, head_of
from tests.support.checkpoints.hub import Hub

CARD = "---\nlibrary_name: mlx\nlicense: apache-2.0\n{}tags:\n- mlx\n---\n\n# A model\n"
"""A card as mlx-lm's conversion writes it."""


@pytest.fixture
def hub(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a model, a conversion of it without a head, and a conversion of the conversion."""
    model, first = tmp_path / "model", tmp_path / "first"
    shutil.copytree(checkpoints(), model)
    (model / "README.md").write_text(CARD.format("base_model:\n- Qwen/Pretrained\n"))
    convert(Checkpoint.open(checkpoints(mtp=False)), first, Settings(Quantization(4, 64)))
    (first / "README.md").write_text(CARD.format("base_model: Qwen/Model\n"))
    second = tmp_path / "second"
    shutil.copytree(first, second)
    (second / "README.md").write_text(CARD.format("base_model: mlx-community/Model-4bit\n"))
    with Hub() as hub:
        hub.add("Qwen/Model", model)
        hub.add("mlx-community/Model-4bit", first)
        hub.add("someone/Model-4bit", second)
        hub.install(monkeypatch, tmp_path / "home")
        yield hub


@pytest.mark.parametrize("repo", ["mlx-community/Model-4bit", "someone/Model-4bit"])
def test_the_head_of_the_base_model_is_fetched_once(hub: Hub, tmp_path: Path, repo: str) -> None:
    """It is packed like the model, the files of the cache do not change, and the next start finds the copy."""
    path = resolve_model(repo)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert base_model(path) == "Qwen/Model"
    assert with_fetched_head(path) == path
    hub.sent.clear()
    copy = fetch_missing_head(path, lambda done, total: None)
    sizes = Checkpoint.open(tmp_path / "model").part_bytes()
    assert sizes["mtp"] <= hub.weights_sent < sizes["mtp"] * 1.1 + 100_000
    assert with_fetched_head(path) == copy != path
    assert fetch_missing_head(path, lambda done, total: None) == copy  # as two starts at once
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    checkpoint = Checkpoint.open(copy)
    assert checkpoint.mtp.complete
    kept = tmp_path / "kept"
    convert(Checkpoint.open(tmp_path / "model"), kept, Settings(Quantization(4, 64)))
    assert_same_tensors(head_of(checkpoint), head_of(Checkpoint.open(kept)))


def test_a_card_without_a_base_model_is_an_error(hub: Hub, tmp_path: Path) -> None:
    """Nothing is left behind that the next start would take for a copy."""
    (tmp_path / "first" / "README.md").write_text(CARD.format(""))
    path = resolve_model("mlx-community/Model-4bit")
    with pytest.raises(CheckpointError, match="names no base model that has an MTP head"):
        fetch_missing_head(path, lambda done, total: None)
    assert with_fetched_head(path) == path


def test_an_interrupted_download_is_repeated(hub: Hub) -> None:
    """A hub that fails leaves no copy, and the next attempt completes it."""
    path = resolve_model("mlx-community/Model-4bit")
    parent = hub.repos.pop("Qwen/Model")
    with pytest.raises(CheckpointError, match="Qwen/Model"):
        fetch_missing_head(path, lambda done, total: None)
    assert with_fetched_head(path) == path
    hub.repos["Qwen/Model"] = parent
    assert Checkpoint.open(fetch_missing_head(path, lambda done, total: None)).mtp.complete
