"""Mathematics of the model (layers, sampling, the MTP head, the vision tower), and checkpoints."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _import_parts_of_mlx_lm_alone() -> None:
    """Let `import mlx_lm.models.base` run no other part of mlx-lm.

    The package's own `__init__` imports its generation, and with it transformers: a second and 150 MB for every command
    and worker, which need the layers alone. It runs when one of its names is asked for.
    """
    spec = find_spec("mlx_lm")
    if "mlx_lm" in sys.modules or spec is None or spec.loader is None:
        return
    package, loader = ModuleType("mlx_lm"), spec.loader
    package.__spec__, package.__file__ = spec, spec.origin
    package.__path__ = list(spec.submodule_search_locations or ())

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        loader.exec_module(package)
        return vars(package)[name]

    vars(package)["__getattr__"] = find
    sys.modules["mlx_lm"] = package


_import_parts_of_mlx_lm_alone()
