"""The model types that a test has compared with mlx-lm over one, two and three machines, and those that cannot be.

`tested_types.json` is written by that test, `tests/parity/test_mlx_models.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tested_types.json")


@dataclass(frozen=True)
class TypeResult:
    """The result for a model type. With a `refused` reason it is not served.

    `together` is true if sequences of different lengths may run together, and give the same as each alone.
    `slots` is true if they do with the keys and values of all of them in one array.
    """

    refused: str = ""
    together: bool = False
    slots: bool = False


@cache
def known_results() -> dict[str, TypeResult]:
    """Return the results by the module of mlx-lm."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: TypeResult(**result) for name, result in found.items()}
