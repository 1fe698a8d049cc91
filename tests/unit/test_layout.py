"""The layout of DESIGN §11 and the habits of STYLE, read from the source so that neither erodes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "mtp", "worker", "coordinator")

MAY_IMPORT = {
    "proto": {"proto"},
    "mtp": {"proto", "mtp"},
    "worker": {"proto", "mtp", "worker"},
    "coordinator": {"proto", "mtp", "coordinator"},
}
"""Our own packages each may import; coordinator also imports worker, in COMPOSITION_ROOTS alone."""

COMPOSITION_ROOTS = {"coordinator.local"}
"""Modules that put coordinator and worker together in one process."""

BORROWED = {
    "coordinator.remote": "worker.link",
    "coordinator.cli.add_mtp": "worker.fetch.head",
    "coordinator.cli.inspect": "worker.fetch.remote",
    "coordinator.cli.plan": "worker.fetch.remote",
}
"""The coordinator sends on hop 0 with the workers' own link, and reads heads and headers from a hub as they read a
span: each with that module and nothing else of theirs."""

WIRES = {"aiohttp", "fastapi", "grpc", "http", "httpx", "requests", "socket", "ssl", "starlette"}
WIRES |= {"urllib", "uvicorn", "zeroconf"}
ARRAYS = {"mlx", "mlx_lm", "numpy", "torch", "transformers"}

MAY_NOT_IMPORT = {
    "proto": ARRAYS | (WIRES - {"grpc"}),
    "mtp": WIRES,
    "worker": {"fastapi", "starlette", "torch", "uvicorn"},
    "coordinator": {"torch"},
}
"""Libraries that would break a package's promise. proto holds the generated gRPC stubs and status codes,
and opens no channel."""

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70


@dataclass(frozen=True)
class Module:
    """One of our source files; generated code is not among them."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def imports(self) -> Iterator[tuple[str, list[str]]]:
        """Every module named by an import anywhere in the file, with the names taken from it."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, []) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: a relative import"
                yield node.module or "", [alias.name for alias in node.names]


def find_modules() -> list[Module]:
    return [
        Module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path
        )
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "_pb2" not in path.name
    ]


MODULES = find_modules()
BY_NAME = {module.name: module for module in MODULES}
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


def imported_modules(module: Module) -> set[str]:
    """Our own modules this one imports: `from worker import link` counts as worker.link."""
    found = set()
    for source, names in module.imports():
        submodules = {f"{source}.{name}" for name in names} & BY_NAME.keys()
        taken_from_package = (
            {source} & BY_NAME.keys() if len(submodules) < max(len(names), 1) else set()
        )
        found |= submodules | taken_from_package
    return found - {module.name}


@each_module
def test_imports_follow_the_arrows(module: Module) -> None:
    """proto ← mtp ← worker and proto ← coordinator; coordinator meets worker in the composition roots."""
    allowed = MAY_IMPORT[module.package] | (
        {"worker"} if module.name in COMPOSITION_ROOTS | set(BORROWED) else set()
    )
    if module.name in BORROWED:
        assert {i for i in imported_modules(module) if i.startswith("worker")} <= {
            "worker",
            BORROWED[module.name],
        }
    ours = {source.partition(".")[0] for source, _ in module.imports()} & {*PACKAGES, "tests"}
    assert ours <= allowed


@each_module
def test_libraries_stay_in_their_package(module: Module) -> None:
    """proto has no arrays, mtp no network, worker no HTTP server; torch only trains the built-in model."""
    tops = {source.partition(".")[0] for source, _ in module.imports()}
    assert not tops & MAY_NOT_IMPORT[module.package]
    if not module.name.startswith("mtp.builtin."):
        assert "torch" not in tops


def test_composition_roots_are_no_more_than_needed() -> None:
    """Every module allowed to join coordinator and worker does so."""
    joining = {
        name
        for name in COMPOSITION_ROOTS
        if name in BY_NAME and any(i.startswith("worker") for i in imported_modules(BY_NAME[name]))
    }
    assert joining == COMPOSITION_ROOTS


def test_no_import_cycles() -> None:
    """Modules can be put in an order in which each imports only earlier ones."""
    graph = {module.name: imported_modules(module) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


@each_module
def test_a_file_is_read_in_one_sitting(module: Module) -> None:
    """It says what it is in its first line, and it is short."""
    assert ast.get_docstring(module.tree), f"{module.path} has no docstring"
    assert len(module.text.splitlines()) <= MAX_FILE_LINES
    assert module.path.stem not in {"utils", "helpers", "misc", "common"}


@each_module
def test_a_function_fits_a_screen(module: Module) -> None:
    """Its body, from the docstring on: a command's signature is a table of flags and may be longer."""
    long = {
        node.name: length
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.body[0].lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


@each_module
def test_nothing_is_left_for_later(module: Module) -> None:
    """No marker of unfinished work and no silenced linter; a `type: ignore` names its error."""
    comments = [line for line in module.text.splitlines() if "#" in line]
    for marker in ("TODO", "FIXME", "XXX", "noqa"):
        assert not [line for line in comments if marker in line]
