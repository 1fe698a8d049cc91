"""docs/models.md agrees with the programs: families, memory and formats of published models."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.plan_command import PlanOptions, answer
from coordinator.planning.chips import mac_specs
from coordinator.planning.plan import NodeSpec
from coordinator.planning.recommend import LEAST_CONTEXT, recommendations
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.checkpoint.hub.known_repos import KNOWN, MLX_LM_MODELS, MlxLmModel
from mtp.checkpoint.hub.published import MODELS, Published, converted_headers
from mtp.checkpoint.known_families import FAMILIES
from mtp.mlx_models.tested_types import known_results
from proto.errors import CheckpointError, MemoryLimitError

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "docs" / "models.md").read_text().splitlines()

OWNED = (
    ("M4", 16, 1),
    ("M4 Pro", 24, 2),
    ("M4 Pro", 48, 1),
    ("M4 Pro", 48, 2),
    ("M4 Pro", 64, 2),
    ("M4 Max", 128, 1),
    ("M4 Max", 128, 2),
    ("M3 Ultra", 256, 2),
    ("M3 Ultra", 512, 2),
)
"""The Macs of the first table: chip, GB of memory, and their number."""

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


MACS = ("M4 Pro 24GB", "M4 Pro 48GB", "M4 Max 64GB", "M4 Max 128GB", "M3 Ultra 256GB", "M3 Ultra 512GB")
"""The Macs of the table of mlx-lm's models, the smallest first."""


def _mlx_lm_row(model: MlxLmModel) -> str:
    size = _gb(sum(converted_headers(model, 4).part_bytes().values()))
    head = "publisher's" if model.head_layers else "none"
    parameters = f"{model.parameters:,.4g}, {model.active:.3g}"
    return f"| `{model.short}` | {parameters} | {size} | {head} | {_smallest(model, 1)} | {_smallest(model, 2)} |"


def _smallest(model: MlxLmModel, count: int) -> str:
    """Return the smallest of `count` equal MACS with room for LEAST_CONTEXT, the room and the predicted speed."""
    for mac in MACS:
        options = PlanOptions("", sequences=1, context=LEAST_CONTEXT)
        specs = mac_specs([mac] * count)
        if sum(spec.memory_limit for spec in specs) < model.parameters * 5e8:
            continue
        try:
            facts = answer(converted_headers(model, 4), specs, options)
        except MemoryLimitError:
            continue
        found = next(one for one in reversed(facts["candidates"]))
        return f"{mac}: {facts['capacity']['kv_tokens']:,}; {1 / found['token_seconds']:.3g}"
    return "-"


def test_the_first_table_is_what_recommend_marks() -> None:
    """README has the line of `serve` that `recommend` prints for each of OWNED, and the page its figures."""
    rows, short = [], []
    for chip, memory, count in OWNED:
        one = next(one for one in recommendations(mac_specs([f"{chip} {memory}GB"] * count)) if one.best)
        macs = f"{'two' if count == 2 else 'one'} of {memory} GB"
        line = f"`mtp-coord serve {one.name} {one.flags}{' --own-worker' * (count > 1)}`"
        speed = f"{one.plain:.3g}" + f"; {one.drafted:.3g}" * (one.drafted != one.plain)
        short.append(f"| {macs} | {_gb(one.download)} GB | {line} |")
        rows.append(f"| {macs}, {chip} | `{one.name}` | {one.context:,} | {speed} |")
    readme = (ROOT / "README.md").read_text().splitlines()
    for lines, mark, expected in ((readme, "`mtp-coord serve", short), (LINES, "GB, M", rows)):
        found = [line for line in lines if line.startswith(("| one of", "| two of")) and mark in line]
        assert found == expected, "\n".join(expected)


def test_the_table_of_the_models_of_mlx_lm_is_that_of_the_planner() -> None:
    """The page has the row of each model in 4 bits: its size, and the smallest Macs with their room and speed."""
    found = [line for line in LINES if line.count("; ") == 2 or "| - | M3 Ultra" in line]
    assert found == [_mlx_lm_row(model) for model in MLX_LM_MODELS]


def test_the_refused_types_are_named() -> None:
    """The page counts the types of mlx-lm, and names those that are refused."""
    tested = known_results()
    refused = sorted(name for name, found in tested.items() if found.refused)
    text = " ".join(LINES)
    assert f"{len(tested) - len(refused)} of its {len(tested)} model types" in text
    assert [name for name in refused if f"`{name}`" not in text] == []


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
    others = {model.repo for model in MLX_LM_MODELS}
    expected = [
        f"| `{one.short}` | {one.bits} | {one.name} | {'included' if one.head else 'fetched'} |"
        for one in KNOWN
        if one.bits is not None and one.name not in others
    ]
    first = LINES.index(expected[0])
    assert LINES[first : first + len(expected)] == expected


def test_every_model_type_is_named() -> None:
    """The page names each `model_type` that is served, and an error for another one leads to it."""
    text = "\n".join(LINES)
    served = {kind for family in FAMILIES for kind in {**family.model_types, **family.head_types}}
    assert [kind for kind in sorted(served) if f"`{kind}`" not in text] == []
    with pytest.raises(CheckpointError, match=r"qwen9.*mlx-lm.*docs/models"):
        ModelConfig.parse(Path("config.json"), {"model_type": "qwen9"})
