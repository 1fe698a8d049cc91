"""Names of models: short ones, directories, repos in the cache, and files that are no checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mtp.builtin import checkpoint_dir
from mtp.checkpoint.hub.known_repos import KNOWN, close_names, known_repo
from mtp.checkpoint.hub.published import MODELS, find_published
from mtp.checkpoint.hub.resolve import find_model, resolve_model
from proto.errors import CheckpointError
from tests.conftest import Checkpoints


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty hub cache and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def test_builtin_and_directories_resolve_to_themselves(tmp_path: Path) -> None:
    """`builtin` resolves to the package's model, and a directory to itself, with `~` expanded."""
    assert resolve_model("builtin") == checkpoint_dir()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("~") == Path.home()


@pytest.mark.parametrize("left", [["config.json"], ["config.json", "*1-of*", "*index*"]], ids=str)
def test_a_part_of_a_repo_in_the_cache_is_not_a_model(offline: Path, checkpoints: Checkpoints, left: list[str]) -> None:
    """A repo in the cache without config.json or without a shard of its index counts as missing."""
    snapshot = put_in_cache(offline, checkpoints(shards=2))
    for file in snapshot.iterdir():
        if not any(file.match(pattern) for pattern in left):
            file.unlink()
    assert find_model("someone/some-model") is None


def put_in_cache(cache: Path, model: Path) -> Path:
    """Create a repo in the cache as the hub's library stores it, and return the directory of its files."""
    commit = "0" * 40
    repo = cache / "models--someone--some-model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(model, repo / "snapshots" / commit))


def test_a_repo_that_cannot_be_had_says_what_to_do() -> None:
    """The error for a repo that is neither cached nor reachable has the name, the cause and the alternatives."""
    with pytest.raises(CheckpointError, match=r"someone/else.*is unavailable.*builtin"):
        resolve_model("someone/else")


@pytest.mark.parametrize("name", ["", "nothing-here", "./nothing/here", "/no/such/dir", "a/b/c", "a--b/c", "./x"])
def test_what_is_no_repo_is_never_asked_of_the_hub(name: str) -> None:
    """The error for a missing path names the path."""
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_model(name)


@pytest.mark.parametrize("form", ["model.gguf", "someone/some-GGUF", "folder"])
def test_gguf_is_refused_with_what_to_give_instead(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, folders and repos of GGUF files are named before anything is read."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder", "some-Q4_K_M.gguf").touch()
    with pytest.raises(CheckpointError, match=r"GGUF files are not read\. Give the checkpoint"):
        resolve_model(form)


def test_a_folder_of_safetensors_may_have_any_name(tmp_path: Path) -> None:
    """The files decide, also beside a GGUF file."""
    path = shutil.copytree(checkpoint_dir(), tmp_path / "once-a-gguf")
    (path / "other.gguf").touch()
    assert find_model(str(path)) == path


@pytest.mark.parametrize("rest", ["", "/", "/tree/main", "?library=mlx", "/blob/main/config.json"])
def test_the_address_of_a_page_is_its_repo(offline: Path, rest: str) -> None:
    """People paste the address of a model's page."""
    found = put_in_cache(offline, checkpoint_dir())
    assert find_model(f"https://hub.example/someone/some-model{rest}") == found


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
