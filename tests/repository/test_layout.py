"""The layout of DESIGN §11 and the rules for files and functions, checked against the source."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "mtp", "worker", "coordinator")


def read_arrows(text: str) -> dict[str, set[str]]:
    """Return the folders after each colon, by the folder before it. An indented line continues the one before it."""
    rows = [row.partition(":") for row in text.replace("\n    ", " ").split("\n")]
    return {folder: set(imports.split()) for folder, _, imports in rows}


ARROWS = read_arrows(
    """\
proto:
proto.rpc: proto proto.trust
proto.terminal: proto
proto.trust: proto
mtp:
mtp.builtin:
mtp.checkpoint: mtp.checkpoint.families mtp.flash_next mtp.glm_flash mtp.mlx_models
mtp.checkpoint.convert: mtp.checkpoint.families mtp.checkpoint.format mtp.layers mtp.vision proto proto.terminal
mtp.checkpoint.families: mtp.head mtp.layers mtp.layers.reference proto
mtp.checkpoint.format: mtp.checkpoint mtp.checkpoint.families mtp.head mtp.layers proto
    proto.terminal
mtp.checkpoint.hub: mtp.builtin mtp.checkpoint.convert mtp.checkpoint.format proto proto.terminal
mtp.flash_next: mtp.checkpoint.families mtp.head mtp.layers mtp.layers.reference mtp.sampling proto
mtp.glm_flash: mtp.checkpoint.families mtp.head mtp.layers mtp.layers.reference proto
mtp.head: mtp.layers mtp.layers.reference mtp.sampling proto
mtp.layers: mtp proto
mtp.layers.cuda: mtp.layers mtp.layers.reference
mtp.layers.fused: mtp.layers mtp.layers.reference
mtp.layers.reference: mtp mtp.layers
mtp.mlx_models: mtp.checkpoint.families mtp.head mtp.layers proto
mtp.sampling: proto
mtp.vision: mtp.checkpoint.format mtp.layers proto
worker: mtp proto proto.terminal worker.node
worker.cache: mtp.head mtp.layers mtp.sampling proto
worker.engine: mtp mtp.checkpoint.format mtp.head mtp.layers proto proto.rpc proto.terminal
    worker.cache worker.disk worker.model
worker.disk: proto
worker.fetch: mtp.checkpoint.format mtp.checkpoint.hub proto proto.rpc proto.terminal worker.engine
worker.model: mtp mtp.checkpoint.format mtp.head mtp.layers mtp.layers.cuda
    mtp.layers.fused mtp.layers.reference mtp.sampling proto proto.terminal worker.cache
worker.node: mtp mtp.checkpoint.format mtp.checkpoint.hub proto proto.rpc proto.terminal
    proto.trust worker.disk worker.engine worker.fetch
coordinator: mtp
coordinator.answers: coordinator.prompts coordinator.schedule coordinator.status coordinator.text
    coordinator.web proto
coordinator.cli: coordinator.answers coordinator.cluster coordinator.drafts coordinator.pipeline
    coordinator.planning coordinator.schedule coordinator.serve coordinator.status coordinator.text
    coordinator.trust coordinator.web mtp.checkpoint.convert mtp.checkpoint.format
    mtp.checkpoint.hub mtp.vision proto proto.rpc proto.terminal proto.trust worker.engine
coordinator.cluster: coordinator.pipeline coordinator.planning mtp mtp.checkpoint.format proto
    proto.rpc proto.terminal
coordinator.dialects: coordinator.answers coordinator.prompts coordinator.schedule coordinator.status
    coordinator.text coordinator.web proto
coordinator.drafts: proto
coordinator.images: mtp.checkpoint.format mtp.vision proto worker.engine
coordinator.pipeline: coordinator.planning coordinator.status mtp mtp.checkpoint.format mtp.vision
    proto proto.rpc proto.terminal proto.trust worker.disk worker.engine
coordinator.planning: mtp.checkpoint.format mtp.checkpoint.hub mtp.head proto proto.terminal
coordinator.prompts: coordinator.images coordinator.schedule coordinator.text coordinator.web proto
coordinator.schedule: coordinator.drafts coordinator.pipeline coordinator.planning
    coordinator.status mtp mtp.checkpoint.format mtp.checkpoint.hub proto proto.rpc proto.terminal
coordinator.serve: coordinator.answers coordinator.cluster coordinator.dialects coordinator.drafts
    coordinator.images coordinator.pipeline coordinator.planning coordinator.prompts
    coordinator.schedule coordinator.status coordinator.text coordinator.trust coordinator.web
    mtp.checkpoint.format mtp.checkpoint.hub mtp.head mtp.vision proto proto.rpc proto.terminal
    proto.trust
coordinator.status: coordinator.drafts proto
coordinator.text: mtp.checkpoint.families mtp.checkpoint.format mtp.mlx_models mtp.sampling proto proto.terminal
    worker.engine
coordinator.trust: proto proto.rpc proto.trust
coordinator.web: coordinator.images coordinator.schedule coordinator.status coordinator.text
    coordinator.trust mtp.checkpoint.format mtp.checkpoint.hub proto"""
)
"""The other folders that each folder imports from. An arrow that no module uses is an error."""

COMPOSITION_ROOTS = {
    "coordinator.images.encoder",
    "coordinator.pipeline.local_pipeline",
    "coordinator.text.embedder",
    "coordinator.cli.doctor_checks",
    "coordinator.cli.doctor_command",
}
"""The modules of `coordinator` that import `worker`: they run stages in this process, or measure this machine."""

FLOORS = (
    {"coordinator.drafts", "coordinator.images", "coordinator.planning", "coordinator.text"},
    {"coordinator.status", "coordinator.trust"},
    {"coordinator.pipeline"},
    {"coordinator.cluster", "coordinator.schedule"},
    {"coordinator.web"},
    {"coordinator.prompts"},
    {"coordinator.answers"},
    {"coordinator.dialects"},
    {"coordinator.serve"},
    {"coordinator.cli"},
)
"""The folders of `coordinator`, from the ground up. A folder imports only from lower floors."""

CHOICE_OF_LAYERS = "worker.model.layer_variants"
BACKEND = {"default_device", "is_available"}
"""The functions of MLX that tell its backend."""

WIRES = {"aiohttp", "fastapi", "grpc", "http", "httpx", "huggingface_hub", "requests", "socket"}
WIRES |= {"ssl", "starlette", "urllib", "uvicorn", "zeroconf"}
ARRAYS = {"mlx", "mlx_lm", "numpy", "torch", "transformers"}

WIRES_OF: dict[str, set[str]] = {
    "proto.rpc": {"grpc", "socket", "ssl"},
    "proto.trust": {"ssl"},
    "mtp.checkpoint.hub": {"httpx", "huggingface_hub"},
    "worker.fetch": {"huggingface_hub"},
    "worker.node": {"grpc", "socket", "zeroconf"},
    "coordinator.answers": {"starlette"},
    "coordinator.dialects": {"fastapi", "starlette"},
    "coordinator.cli": {"httpx", "ssl", "urllib"},
    "coordinator.cluster": {"socket", "zeroconf"},
    "coordinator.pipeline": {"grpc"},
    "coordinator.serve": {"fastapi", "socket", "ssl", "starlette", "uvicorn"},
    "coordinator.text": {"socket"},
    "coordinator.trust": {"socket", "ssl"},
    "coordinator.web": {"fastapi", "starlette"},
}
"""The network libraries that each folder may import; folders that are not listed import none."""

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 90
LONG_FUNCTION_LINES, MAX_LONG_FUNCTIONS = 60, 5
"""Lines of a function with its signature that one screen holds, and the number of functions that exceed them."""

MAX_LINES, MAX_FILES = 55_484, 285
"""Size of the product without generated code. Lower both when code goes. Before adding, ask what goes."""

VARIANTS = {"__init__", "args", "attention", "family", "fuse", "gdn", "head", "kernel", "layers", "modules", "options"}
"""The names of files that lie in several folders: the variants of one thing."""


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
        Module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path)
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
        taken_from_package = {source} & BY_NAME.keys() if len(submodules) < max(len(names), 1) else set()
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


def test_a_folder_of_the_coordinator_imports_only_from_lower_floors() -> None:
    """The folders of `coordinator` stand on floors, and no arrow leads up or along a floor."""
    floor_of = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
    assert floor_of.keys() == {f for f in ARROWS if f.startswith("coordinator.")}
    upward = {
        (folder, found)
        for folder, floor in floor_of.items()
        for found in ARROWS[folder] & floor_of.keys()
        if floor_of[found] >= floor
    }
    assert not upward


@each_module
def test_the_choice_of_layers_is_made_in_one_place(module: Module) -> None:
    """One module asks MLX for its backend, and one names the variants of layers. No other asks for a layer's class."""
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    asked = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute)} & BACKEND
    assert not asked or module.name == "mtp.device"
    if module.name.startswith("mtp.layers.") or module.name == CHOICE_OF_LAYERS:
        return
    imported = dict(module.imports())
    variants = tuple(f"mtp.layers.{name}" for name in ("cuda", "metal"))
    assert not [s for s in imported if s.startswith(variants)]
    classes = {
        name
        for source, names in imported.items()
        if source.startswith(("mtp.layers", "mlx_lm.models.qwen"))
        for name in names
    }
    tests = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "isinstance"]
    tested = {n.id for c in tests for n in ast.walk(c) if isinstance(n, ast.Name)}
    assert not tested & classes


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


def test_a_function_fits_a_screen() -> None:
    """Few functions exceed a screen, and none exceeds MAX_FUNCTION_LINES, with its signature."""
    lengths = {
        f"{module.name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name: length for name, length in lengths.items() if length > LONG_FUNCTION_LINES}
    assert max(lengths.values()) <= MAX_FUNCTION_LINES, long
    assert len(long) <= MAX_LONG_FUNCTIONS, long


def test_the_product_has_a_size() -> None:
    """The lines and the files of the product stay below their limits."""
    assert sum(len(module.text.splitlines()) for module in MODULES) <= MAX_LINES
    assert len(MODULES) <= MAX_FILES


def test_no_two_files_have_one_name() -> None:
    """A file is known by its name, aside from the variants of one thing."""
    names = Counter(module.path.stem for module in MODULES if module.path.stem not in VARIANTS)
    assert [name for name, count in names.items() if count > 1] == []


@each_module
def test_nothing_is_left_for_later(module: Module) -> None:
    """No comment marks unfinished work or silences the linter."""
    comments = [line for line in module.text.splitlines() if "#" in line]
    for marker in ("TODO", "FIXME", "XXX", "noqa"):
        assert not [line for line in comments if marker in line]
