"""The cases of `goldens.safetensors`, as the tests read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mtp.checkpoint.convert.foreign import MEMBERS, Form, Members, PackedSource, join_members
from mtp.checkpoint.families.parameters import Source
from mtp.checkpoint.format.shard import read_header

FILE = Path(__file__).with_name("goldens.safetensors")


@dataclass(frozen=True)
class Golden:
    """One packed weight: its stored tensors by name, the `values` of the oracle, and the config of its checkpoint."""

    name: str
    oracle: str
    config: dict[str, Any]
    stored: dict[str, mx.array]
    types: dict[str, str]
    values: mx.array

    @property
    def form(self) -> Form:
        """The layout as it follows from config and types."""
        leaves = {name: Source((name,)) for name in self.stored if name in MEMBERS}
        found = join_members(leaves, self.types)
        assert isinstance(found, PackedSource)
        return found.form

    @property
    def members(self) -> Members:
        """The tensors by their role."""
        return {MEMBERS[name]: array for name, array in self.stored.items() if name in MEMBERS}


def read_goldens() -> dict[str, Golden]:
    """Return all cases by name."""
    header = read_header(FILE)
    tensors = mx.load(str(FILE))
    assert isinstance(tensors, dict)
    found = {}
    for case, facts in json.loads(header.metadata["cases"]).items():
        stored = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(f"{case}/")}
        types = {name: header.tensors[f"{case}/{name}"].dtype for name in stored}
        values = stored.pop("values")
        types.pop("values")
        found[case] = Golden(case, facts["oracle"], facts["config"], stored, types, values)
    return found
