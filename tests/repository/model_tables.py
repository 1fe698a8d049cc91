"""The generated rows of docs/models.md: memory by bits and machines from the planner, and the verdict on each format.

`python -m tests.repository.model_tables` prints them.
"""

from __future__ import annotations

from coordinator.cli.plan_command import answer
from coordinator.planning.capacity import model_costs
from coordinator.planning.groups import Parallel, Prefer
from coordinator.planning.plan import NodeSpec
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from tests.support.checkpoints.published import MODELS, Published, converted_headers
from tests.support.checkpoints.published_formats import FORMATS

CONTEXT = 32768
"""Tokens of K/V in the table: a long chat or a small agent's task."""

BITS = (4, 8, None)
MACHINES = (1, 2, 4)


def memory_rows() -> list[str]:
    """Return one row for each published model."""
    return [_memory_row(model) for model in MODELS]


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
    facts = answer(converted_headers(model, bits), nodes, 1, 1, CONTEXT)
    stages: list[dict[str, int]] = facts["stages"]
    return max(stage["weight_bytes"] + stage["cache_bytes"] for stage in stages)


GROUP_MODELS = ("Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B")
SUMS = (4, 30, 180, 300)
"""Microseconds of a sum: RDMA with and without MLX's fast synchronization, and two kinds of TCP links."""

DRAFTS, ACCEPTED, ROWS_COST = 3, 0.8, 1.15
"""Drafts of a window, the share that is accepted at each position, and the cost of the window's rows over one."""


def group_rows() -> list[str]:
    """Return the predicted tokens/s of one stream on 2 and 4 equal machines, without and with drafts."""
    return [
        _group_row(model, machines)
        for model in MODELS
        if model.name in GROUP_MODELS
        for machines in (2, 4)
    ]


def _group_row(model: Published, machines: int) -> str:
    checkpoint = converted_headers(model, 4)
    nodes = [NodeSpec(f"node-{i}", 2**60, M4_PRO) for i in range(machines)]
    cells: list[str] = []
    for sum_us in SUMS:
        choice = Parallel(), Prefer.latency, sum_us / 1e6
        facts = answer(checkpoint, nodes, DRAFTS, 1, CONTEXT, None, None, choice)
        speeds = {one["plan"]: one["token_seconds"] for one in facts["candidates"]}
        found = speeds[f"a group of {machines}"]
        if not cells:
            cells += [_speeds(checkpoint, speeds["one machine"], 1, 0.0)]
            cells += [_speeds(checkpoint, speeds[f"a pipeline of {machines}"], 1, 0.0)]
        cells.append(_speeds(checkpoint, found, machines, sum_us / 1e6))
    share = checkpoint.cut_for(Cut(0, machines)).part_bytes()
    part = sum(share.values()) / sum(checkpoint.part_bytes().values())
    return f"| {model.name} | {machines} | {part:.3f} | {' | '.join(cells)} |"


M4_PRO = 2.4
"""Speed of an M4 Pro in the planner's unit of 100 GB/s, of which 273 are published and about 240 are reached."""

SUMS_PER_DRAFT = 3
"""Collectives of a step of the MTP head: two sums of its layer, and the logits."""


def _speeds(checkpoint: Checkpoint, plain: float, size: int, seconds: float) -> str:
    """Return tokens/s without and with drafts, for `plain` seconds of a pass without the logits' collective."""
    costs = model_costs(checkpoint.cut_for(Cut(0, size)), with_head=True)
    draft = costs.draft_seconds / M4_PRO + (SUMS_PER_DRAFT * seconds if size > 1 else 0.0)
    # The planner charges the last stage for all drafts.
    alone = plain - DRAFTS * costs.draft_seconds / M4_PRO + (seconds if size > 1 else 0.0)
    tokens = sum(ACCEPTED**i for i in range(DRAFTS + 1))
    window = ROWS_COST * alone + DRAFTS * draft
    return f"{1 / alone:.3g}; {tokens / window:.3g}"


def format_rows() -> list[str]:
    """Return the beginning of the row of each format: its name and the verdict."""
    return [f"| {form.name} | {form.verdict()} |" for form in FORMATS]


def _gb(size: float) -> str:
    digits = 2 if size < 1e10 else 1 if size < 1e11 else 0
    return f"{size / 1e9:,.{digits}f}"


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f} B" if count < 1e12 else f"{count / 1e9:,.0f} B"


if __name__ == "__main__":
    print("\n".join([*memory_rows(), *format_rows(), *group_rows()]))
