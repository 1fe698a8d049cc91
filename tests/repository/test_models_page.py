"""docs/models.md agrees with the programs: families, memory and formats of published models."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp.checkpoint.families import FAMILIES, NOT_SERVED
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import missing_from_backbone
from proto.errors import CheckpointError
from tests.repository.model_tables import format_rows, group_rows, memory_rows
from tests.support.checkpoints.published import MODELS, Published, converted_headers

LINES = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text().splitlines()


def test_the_memory_of_each_model_is_that_of_the_planner() -> None:
    """The page has the row of every published model, and no other row."""
    rows = memory_rows()
    found = [line for line in LINES if line.startswith("| Qwen") and line.count(" / ") > 2]
    assert found == rows, "python -m tests.repository.model_tables prints the rows"


def test_the_speed_of_groups_is_that_of_the_planner() -> None:
    """Every row of the table of groups is what the planner predicts."""
    assert [row for row in group_rows() if row not in LINES] == []


def test_the_verdict_on_each_format_is_that_of_the_loader() -> None:
    """The page says which formats are served, converted and refused, and names no other format."""
    verdicts = ("served", "converted", "refused")
    starts = [line for line in LINES if line.split(" | ")[1:2] and line.split(" | ")[1] in verdicts]
    assert [" | ".join(line.split(" | ")[:2]) + " |" for line in starts] == format_rows()


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


def test_every_model_type_is_named() -> None:
    """The page names each `model_type` that is served or refused, and a refusal has its reason."""
    text = "\n".join(LINES)
    served = {kind for family in FAMILIES for kind in {**family.model_types, **family.head_types}}
    assert [kind for kind in (*sorted(served), *NOT_SERVED) if f"`{kind}`" not in text] == []
    for kind, reason in NOT_SERVED.items():
        with pytest.raises(CheckpointError, match=f"{kind}.*{reason}.*Qwen3.8.*Qwen3-Next"):
            ModelConfig.parse(Path("config.json"), {"model_type": kind})
