"""The cases of `goldens.safetensors`, as the tests read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mtp.checkpoint.convert.foreign import (
    MEMBERS,
    Member,
    PackedSource,
    Packing,
    find_packing,
    read_members,
)
from mtp.checkpoint.format.config import PACKINGS, ForeignPacking
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
    def packing(self) -> Packing:
        """The packing as it follows from config and types."""
        foreign = ForeignPacking(PACKINGS[self.config["quant_method"]], self.config)
        found = find_packing(foreign, self.types)
        assert found is not None
        return found

    @property
    def members(self) -> dict[Member, mx.array]:
        """The members as a checkpoint gives them."""
        names = {MEMBERS[name]: name for name in self.stored if name in MEMBERS}
        weight = names.pop("weight")
        members: dict[Member, tuple[str, ...]] = {member: (name,) for member, name in names.items()}
        source = PackedSource((weight,), packing=self.packing, members=members)
        return read_members(source, self.stored.__getitem__)


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
