"""A shell completes the commands and options of `mtp-coord`, and `models` lists the models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtp.builtin import checkpoint_dir
from tests.support.processes.processes import WITHOUT_TORCH

MAIN = [sys.executable, "-c", f"{WITHOUT_TORCH}; from coordinator.cli import main; main()"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home with a checkpoint and a damaged one in LM Studio's folders."""
    shutil.copytree(checkpoint_dir(), tmp_path / ".lmstudio/models/mlx-community/Tiny-4bit")
    former = tmp_path / ".cache/lm-studio/models/mlx-community/Broken"
    former.mkdir(parents=True)
    (former / "config.json").write_text("{}")
    (former / "model.safetensors").touch()
    (tmp_path / ".lmstudio/models/someone/Other-GGUF").mkdir(parents=True)
    return tmp_path


def run(home: Path, *words: str, **variables: str) -> str:
    """Return the output of `mtp-coord` for a user with this home."""
    kept = {"PATH": os.environ["PATH"], "HOME": str(home), "COLUMNS": "160"}
    done = subprocess.run(
        [*MAIN, *words],
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mtp-coord mod", ["models"]),
        ("mtp-coord serve --share", ["--share-weights"]),
    ],
)
def test_a_shell_completes(home: Path, line: str, expected: list[str]) -> None:
    """The Tab key completes commands and options."""
    variables = {"_MTP_COORD_COMPLETE": "complete_bash", "COMP_WORDS": line}
    found = run(home, **variables, COMP_CWORD=str(line.count(" "))).splitlines()
    assert sorted(found) == expected


def test_the_list_of_models(home: Path) -> None:
    """`models` lists what can be served, and the problems of the rest."""
    lines = run(home, "models").splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["builtin", "mlx-community/Tiny-4bit"]
    assert lines[3].startswith("mlx-community/Broken cannot be served: ")


def test_a_model_of_lm_studio_runs_by_its_name(home: Path) -> None:
    """A checkpoint in LM Studio's folder runs by its name, without the network."""
    words = ("generate", "--model", "mlx-community/Tiny-4bit", "--raw", "--prompt", "def f(")
    assert run(home, *words, "--max-tokens", "3", HF_HUB_OFFLINE="1").strip()
