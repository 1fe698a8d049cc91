"""The layout of DESIGN §11 and the rules for files and functions, checked against the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "mtp", "worker", "coordinator")

WIRE = {"proto"}
TERMINAL = {"proto", "proto.terminal"}

ARROWS: dict[str, set[str]] = {
    "proto": set(),
    "proto.rpc": {"proto.trust"} | WIRE,
    "proto.trust": WIRE,
    "proto.terminal": WIRE,
    "mtp": set(),
    "mtp.builtin": set(),
    "mtp.builtin.training": set(),
    "mtp.sampling": WIRE,
    "mtp.depth": WIRE,
    "mtp.kernels": set(),
    "mtp.packing": set(),
    "mtp.exact": {"mtp.kernels"} | WIRE,
    "mtp.head": {"mtp.exact", "mtp.kernels", "mtp.sampling"} | WIRE,
    "mtp.checkpoint": {"mtp.checkpoint.format"},
    "mtp.checkpoint.families": set(),
    "mtp.checkpoint.format": {"mtp.checkpoint.families", "mtp.head", "mtp.packing"} | TERMINAL,
    "mtp.checkpoint.convert": {"mtp.checkpoint.format", "mtp.head", "mtp.packing"} | TERMINAL,
    "mtp.checkpoint.hub": {"mtp.builtin", "mtp.checkpoint.convert", "mtp.checkpoint.format"} | WIRE,
    "worker": {"mtp.checkpoint.hub", "worker.engine", "worker.node"} | TERMINAL,
    "worker.node": {
        "mtp.checkpoint.format",
        "mtp.checkpoint.hub",
        "mtp.head",
        "proto.rpc",
        "proto.trust",
        "worker.engine",
        "worker.fetch",
        "worker.model",
    }
    | TERMINAL,
    "worker.engine": {"mtp.exact", "mtp.head", "mtp.kernels", "worker.cache", "worker.model"}
    | WIRE,
    "worker.model": {
        "mtp.checkpoint.format",
        "mtp.exact",
        "mtp.head",
        "mtp.kernels",
        "mtp.packing",
        "mtp.sampling",
        "worker.cache",
    }
    | WIRE,
    "worker.cache": {"mtp.head", "mtp.kernels", "mtp.sampling"} | WIRE,
    "worker.fetch": {"mtp.checkpoint.format", "mtp.checkpoint.hub", "proto.rpc", "worker.engine"}
    | TERMINAL,
    "coordinator": set(),
    "coordinator.models": {
        "coordinator.local_engine",
        "coordinator.planning",
        "coordinator.status",
        "mtp.checkpoint.convert",
        "mtp.checkpoint.format",
        "mtp.checkpoint.hub",
    }
    | TERMINAL,
    "coordinator.cli": {
        "proto.trust",
        "coordinator.trust",
        "coordinator.doctor",
        "coordinator.generation",
        "coordinator.journal",
        "coordinator.local_engine",
        "coordinator.planning",
        "coordinator.server",
        "coordinator.status",
        "coordinator.text",
        "coordinator.workers",
        "mtp.checkpoint.convert",
        "mtp.checkpoint.format",
        "mtp.checkpoint.hub",
        "mtp.depth",
        "mtp.exact",
        "mtp.head",
    }
    | TERMINAL,
    "coordinator.doctor": {
        "coordinator.generation",
        "coordinator.local_engine",
        "coordinator.text",
        "coordinator.workers",
        "mtp.checkpoint.format",
        "mtp.depth",
        "proto.rpc",
        "proto.trust",
        "worker.engine",
    }
    | TERMINAL,
    "coordinator.server": {
        "coordinator.web",
        "coordinator.models",
        "proto.trust",
        "coordinator.workers",
        "coordinator.trust",
        "coordinator.frame_trace",
        "coordinator.api",
        "coordinator.api.request",
        "coordinator.api.stored",
        "coordinator.cluster",
        "coordinator.generation",
        "coordinator.journal",
        "coordinator.local_engine",
        "coordinator.pipeline",
        "coordinator.planning",
        "coordinator.status",
        "coordinator.text",
        "mtp.checkpoint.format",
        "mtp.checkpoint.hub",
        "mtp.depth",
        "mtp.head",
        "proto.rpc",
    }
    | TERMINAL,
    "coordinator.api": {
        "coordinator.models",
        "coordinator.trust",
        "coordinator.api.anthropic",
        "coordinator.api.ollama",
        "coordinator.api.openai_chat",
        "coordinator.api.openai_responses",
        "coordinator.api.request",
        "coordinator.api.stored",
        "coordinator.generation",
        "coordinator.journal",
        "coordinator.status",
        "coordinator.text",
        "coordinator.web",
    }
    | WIRE,
    "coordinator.api.openai_chat": {
        "coordinator.api.anthropic",
        "coordinator.api.answer",
        "coordinator.api.request",
        "coordinator.api.stored",
        "coordinator.journal",
        "coordinator.models",
        "coordinator.text",
    }
    | WIRE,
    "coordinator.api.openai_responses": {
        "coordinator.api.answer",
        "coordinator.api.request",
        "coordinator.api.stored",
        "coordinator.journal",
        "coordinator.text",
    }
    | WIRE,
    "coordinator.api.ollama": {
        "coordinator.api.answer",
        "coordinator.api.request",
        "coordinator.text",
    }
    | WIRE,
    "coordinator.api.anthropic": {
        "coordinator.api.answer",
        "coordinator.api.request",
        "coordinator.text",
    }
    | WIRE,
    "coordinator.api.answer": {
        "coordinator.api.request",
        "coordinator.generation",
        "coordinator.journal",
        "coordinator.status",
        "coordinator.text",
    }
    | WIRE,
    "coordinator.api.stored": {
        "coordinator.api.answer",
        "coordinator.api.request",
        "coordinator.generation",
        "coordinator.journal",
        "coordinator.status",
        "coordinator.text",
    }
    | WIRE,
    "coordinator.api.request": {
        "coordinator.models",
        "coordinator.trust",
        "coordinator.generation",
        "coordinator.status",
        "coordinator.text",
    }
    | WIRE,
    "coordinator.local_engine": {
        "coordinator.generation",
        "coordinator.pipeline",
        "coordinator.planning",
        "coordinator.text",
        "mtp.checkpoint.format",
        "mtp.checkpoint.hub",
        "mtp.depth",
        "mtp.head",
    }
    | TERMINAL,
    "coordinator.generation": {
        "coordinator.pipeline",
        "coordinator.planning",
        "coordinator.status",
        "coordinator.frame_trace",
        "mtp.depth",
        "proto.rpc",
    }
    | WIRE,
    "coordinator.cluster": {
        "mtp.exact",
        "mtp.head",
        "coordinator.pipeline",
        "coordinator.planning",
        "coordinator.workers",
        "mtp.checkpoint.format",
        "proto.rpc",
    }
    | TERMINAL,
    "coordinator.pipeline": {
        "proto.trust",
        "coordinator.planning",
        "coordinator.status",
        "coordinator.frame_trace",
        "coordinator.workers",
        "mtp.checkpoint.format",
        "mtp.head",
        "proto.rpc",
        "worker.engine",
        "worker.model",
        "worker.node",
    }
    | TERMINAL,
    "coordinator.workers": {
        "coordinator.planning",
        "coordinator.frame_trace",
        "mtp.checkpoint.format",
        "proto.rpc",
        "proto.trust",
    }
    | WIRE,
    "coordinator.journal": set(),
    "coordinator.planning": {"mtp.checkpoint.format", "mtp.head"} | TERMINAL,
    "coordinator.trust": {"proto.trust"} | WIRE,
    "coordinator.text": {"mtp.checkpoint.format", "mtp.sampling"} | WIRE,
    "coordinator.status": TERMINAL - {"proto"},
    "coordinator.frame_trace": WIRE,
    "coordinator.web": {"coordinator.frame_trace", "coordinator.status"} | WIRE,
}
"""The other folders that each folder imports from. An arrow that no module uses is an error."""

COMPOSITION_ROOTS = {"coordinator.doctor.this_machine", "coordinator.pipeline.local"}
"""The modules of `coordinator` that import `worker`, because they run stages in the coordinator's process."""

WIRES = {"aiohttp", "fastapi", "grpc", "http", "httpx", "huggingface_hub", "requests", "socket"}
WIRES |= {"ssl", "starlette", "urllib", "uvicorn", "zeroconf"}
ARRAYS = {"mlx", "mlx_lm", "numpy", "torch", "transformers"}

WIRES_OF: dict[str, set[str]] = {
    "proto.rpc": {"grpc", "socket", "ssl"},
    "proto.trust": {"ssl"},
    "coordinator.trust": {"ssl"},
    "mtp.checkpoint.hub": {"httpx", "huggingface_hub"},
    "worker": {"socket"},
    "worker.fetch": {"huggingface_hub"},
    "worker.node": {"grpc", "socket", "zeroconf"},
    "coordinator.api": {"fastapi", "socket", "starlette", "uvicorn"},
    "coordinator.api.answer": {"starlette"},
    "coordinator.api.stored": {"starlette"},
    "coordinator.api.anthropic": {"fastapi", "starlette"},
    "coordinator.api.ollama": {"fastapi", "starlette"},
    "coordinator.api.openai_responses": {"fastapi", "starlette"},
    "coordinator.api.openai_chat": {"fastapi", "starlette"},
    "coordinator.api.request": {"fastapi", "starlette"},
    "coordinator.cli": {"http", "httpx", "socket", "urllib", "ssl"},
    "coordinator.doctor": {"grpc"},
    "coordinator.pipeline": {"grpc"},
    "coordinator.server": {"socket"},
    "coordinator.web": {"fastapi", "starlette"},
    "coordinator.workers": {"grpc", "socket", "zeroconf"},
}
"""The network libraries that each folder may import; folders that are not listed import none."""

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
        """Yield every module that the file imports, with the imported names."""
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
    """Return our own modules that `module` imports; `from proto.rpc import link` counts as proto.rpc.link."""
    found = set()
    for source, names in module.imports():
        submodules = {f"{source}.{name}" for name in names} & BY_NAME.keys()
        taken_from_package = (
            {source} & BY_NAME.keys() if len(submodules) < max(len(names), 1) else set()
        )
        found |= submodules | taken_from_package
    return found - {module.name}


def folder_of(name: str) -> str:
    """Return the package that the module `name` lies in; a package lies in itself."""
    return name if BY_NAME[name].path.name == "__init__.py" else name.rpartition(".")[0]


def folder_imports(folder: str) -> set[str]:
    """Return the other folders that the modules of `folder` import from."""
    modules = [module for module in MODULES if folder_of(module.name) == folder]
    found = {folder_of(name) for module in modules for name in imported_modules(module)}
    return found - {folder}


@pytest.mark.parametrize("folder", sorted({folder_of(module.name) for module in MODULES}))
def test_imports_follow_the_arrows(folder: str) -> None:
    """A folder imports exactly the folders that ARROWS lists for it."""
    assert folder_imports(folder) == ARROWS[folder]


def test_the_arrows_name_existing_folders() -> None:
    """ARROWS has an entry for each folder and no entry without one."""
    assert ARROWS.keys() == {folder_of(module.name) for module in MODULES}


def test_the_arrows_have_no_cycle() -> None:
    """Folders can be ordered so that each imports only earlier ones."""
    TopologicalSorter(ARROWS).prepare()


@each_module
def test_worker_is_imported_by_composition_roots_alone(module: Module) -> None:
    """`coordinator` and `worker` meet only where stages run in the coordinator's process; nothing imports tests."""
    tops = {source.partition(".")[0] for source, _ in module.imports()}
    assert "tests" not in tops
    if module.package == "coordinator" and module.name not in COMPOSITION_ROOTS:
        assert "worker" not in tops


@each_module
def test_libraries_stay_in_their_folder(module: Module) -> None:
    """Network libraries stay in the folders of WIRES_OF, arrays out of `proto`, torch in the training programs."""
    tops = {source.partition(".")[0] for source, _ in module.imports()}
    assert tops & WIRES <= WIRES_OF.get(folder_of(module.name), set())
    if module.package == "proto":
        assert not tops & ARRAYS
    if not module.name.startswith("mtp.builtin."):
        assert "torch" not in tops


@each_module
def test_no_module_is_named_like_a_standard_one(module: Module) -> None:
    """A reader and an editor never confuse a module of ours with the standard library's."""
    assert module.name.rpartition(".")[2] not in sys.stdlib_module_names


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
    """A file begins with a docstring, is short, and has a specific name."""
    assert ast.get_docstring(module.tree), f"{module.path} has no docstring"
    assert len(module.text.splitlines()) <= MAX_FILE_LINES
    assert module.path.stem not in {"utils", "helpers", "misc", "common"}


@each_module
def test_a_function_fits_a_screen(module: Module) -> None:
    """The body of a function is short; the signature of a command is a table of flags and may be longer."""
    long = {
        node.name: length
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.body[0].lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


@each_module
def test_nothing_is_left_for_later(module: Module) -> None:
    """No comment marks unfinished work or silences the linter."""
    comments = [line for line in module.text.splitlines() if "#" in line]
    for marker in ("TODO", "FIXME", "XXX", "noqa"):
        assert not [line for line in comments if marker in line]
