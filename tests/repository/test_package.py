"""The distribution, its pinned versions, and the Makefile."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path
from shutil import which

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {"proto", "mtp", "worker", "coordinator"}


def pinned() -> dict[str, str]:
    """Return constraints.txt as a dict from canonical name to version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): exact for name, exact in pairs}


def requirements() -> list[Requirement]:
    """Return the requirements of pyproject.toml, with the extras and without our own package."""
    extras = PROJECT["optional-dependencies"].values()
    asked = [Requirement(text) for group in [PROJECT["dependencies"], *extras] for text in group]
    return [requirement for requirement in asked if requirement.name != PROJECT["name"]]


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_constraints_lock_everything_that_an_installation_brings() -> None:
    """The requirements of requirements are locked too. pip does not list setuptools, and CI installs no CUDA."""
    locked, seen = pinned(), set[tuple[str, str]]()
    waiting = requirements()
    while waiting:
        asked = waiting.pop()
        for extra in asked.extras or {""}:
            if (key := (canonicalize_name(asked.name), extra)) in seen:
                continue
            seen.add(key)
            with suppress(PackageNotFoundError):  # for another system
                needed = map(Requirement, requires(asked.name) or [])
                waiting += [r for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]
    unlocked = {name for name, _ in seen} - locked.keys()
    assert unlocked <= {"setuptools", "mlx-cuda-13"}


@pytest.mark.skipif(which("git") is None, reason="git is not installed")
def test_the_wheel_holds_our_packages_with_their_data_and_nothing_else(tmp_path: Path) -> None:
    """`pip wheel .` has the four packages, every data file that is in git, and the metadata."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == PACKAGES
    command = ["git", "ls-files", *sorted(PACKAGES)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: there is no list of the project's files")
    data = {f for f in listed.stdout.splitlines() if not f.endswith(".py") and (ROOT / f).exists()}
    assert data
    assert not data - {*names}


def test_one_version_everywhere() -> None:
    """The newest heading of the changelog, pyproject.toml and the installed metadata have the same version."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d\d-\d\d)$", changelog, re.M)
    assert newest is not None
    assert newest[1] == PROJECT["version"] == version(PROJECT["name"])


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_has_a_tested_version(requirement: Requirement) -> None:
    """The tested version of each requirement lies inside its range."""
    elsewhere = requirement.marker is not None and not requirement.marker.evaluate()
    exact = pinned().get(canonicalize_name(requirement.name))
    assert exact is not None or elsewhere
    if exact is not None:
        assert requirement.specifier.contains(exact)


def test_every_library_we_import_is_declared() -> None:
    """Every imported library is a declared dependency, not only one of another library."""
    imported = {
        name.partition(".")[0]
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in imports_of(path)
    }
    providers = packages_distributions()
    declared = {canonicalize_name(r.name) for r in map(Requirement, PROJECT["dependencies"])}
    undeclared = {
        name
        for name in imported - PACKAGES - sys.stdlib_module_names
        if not declared & {canonicalize_name(found) for found in providers.get(name, [])}
    }
    assert undeclared == set()


def test_runtime_dependencies_are_bounded_ranges() -> None:
    """Each runtime dependency has a lower and an upper bound; MLX and mlx-lm are bound to one minor version."""
    runtime = [Requirement(text) for text in PROJECT["dependencies"]]
    bounds = {r.name: {part.operator: part.version for part in r.specifier} for r in runtime}
    assert {name for name, found in bounds.items() if found.keys() != {">=", "<"}} == set()
    for name in ("mlx", "mlx-lm"):
        lower, upper = (Version(bounds[name][operator]) for operator in (">=", "<"))
        assert (upper.release, lower.major) == ((lower.major, lower.minor + 1), upper.major)


@pytest.mark.skipif(which("make") is None, reason="make is not installed")
def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    """make refuses an old Python with one line that says what to type, and creates no environment."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo Python 3.9.6; exit 0; }\nexit 1\n')
    old.chmod(0o755)
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["make", f"PYTHON={old}", f"VENV={venv}", f"{venv}/.made"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or later" in done.stderr
    assert "Python 3.9.6" in done.stderr
    assert not venv.exists()
