"""docs/models.md agrees with the programs: families, memory and formats of published models."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.plan_command import PlanOptions, answer
from coordinator.planning.plan import NodeSpec
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.checkpoint.hub.known_repos import KNOWN
from mtp.checkpoint.hub.published import MODELS, Published, converted_headers
from mtp.checkpoint.known_families import FAMILIES
from proto.errors import CheckpointError

LINES = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text().splitlines()


CONTEXT = 32768
"""Tokens of K/V in the table: a long chat or a small agent's task."""

BITS = (4, 8, None)
MACHINES = (1, 2, 4)


def _memory_row(model: Published) -> str:
    plain = converted_headers(model, None)
    parameters = sum(info.nbytes for info in plain.tensors.values()) / 2
    cells = [" / ".join(_gb(_largest(model, bits, n)) for n in MACHINES) for bits in BITS]
    head = plain.part_bytes()["mtp"]
    columns = [model.name, model.releases, _billions(parameters), *cells, _gb(head)]
    return f"| {' | '.join(columns)} |"


def _largest(model: Published, bits: int | None, machines: int) -> int:
    """Return the bytes of the largest stage on equal machines, as `mtp-coord plan` computes them."""
    nodes = [NodeSpec(f"node-{i}", 2**60) for i in range(machines)]
    facts = answer(converted_headers(model, bits), nodes, PlanOptions("", sequences=1, context=CONTEXT))
    stages: list[dict[str, int]] = facts["stages"]
    return max(stage["weight_bytes"] + stage["cache_bytes"] for stage in stages)


def _gb(size: float) -> str:
    digits = 2 if size < 1e10 else 1 if size < 1e11 else 0
    return f"{size / 1e9:,.{digits}f}"


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f} B" if count < 1e12 else f"{count / 1e9:,.0f} B"


def test_the_memory_of_each_model_is_that_of_the_planner() -> None:
    """The page has the row of every published model, and no other row."""
    found = [line for line in LINES if line.startswith(("| Qwen", "| GLM")) and line.count(" / ") > 2]
    assert found == [_memory_row(model) for model in MODELS]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_each_published_model_is_complete(model: Published) -> None:
    """The conversion of each model has all tensors that serving needs, the head's included."""
    checkpoint = converted_headers(model, 4)
    assert missing_from_backbone(checkpoint) == ()
    assert checkpoint.mtp.complete
    assert checkpoint.unknown == ()


def test_the_size_of_the_largest_model_is_the_published_one() -> None:
    """The facts of Qwen3.8-2.4T-A95B give the exact number of parameters that its repo has."""
    checkpoint = converted_headers(MODELS[-1], None)
    few = sum(i.nbytes // 4 for i in checkpoint.tensors.values() if i.dtype == "F32")
    total = sum(i.nbytes // 2 for i in checkpoint.tensors.values() if i.dtype == "BF16")
    assert total + few == 2_446_182_725_504


def test_the_repos_of_short_names_are_listed() -> None:
    """The page has the row of each known conversion, in the order in which they are taken."""
    rows = [line for line in LINES if line.startswith(("| `qwen", "| `glm"))]
    expected = [
        f"| `{one.short}` | {one.bits} | {one.name} | {'included' if one.head else 'fetched'} |"
        for one in KNOWN
        if one.bits is not None
    ]
    assert rows[: len(expected)] == expected


def test_every_model_type_is_named() -> None:
    """The page names each `model_type` that is served, and an error for another one names the families."""
    text = "\n".join(LINES)
    served = {kind for family in FAMILIES for kind in {**family.model_types, **family.head_types}}
    assert [kind for kind in sorted(served) if f"`{kind}`" not in text] == []
    with pytest.raises(CheckpointError, match=r"qwen3_moe.*Qwen3\.8.*Qwen3-Next"):
        ModelConfig.parse(Path("config.json"), {"model_type": "qwen3_moe"})
