"""The generated rows of docs/models.md: memory by bits and machines from the planner, and the verdict on each format.

`python -m tests.repository.model_tables` prints them.
"""

from __future__ import annotations

from coordinator.cli.plan_command import answer
from coordinator.planning.plan import NodeSpec
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


def format_rows() -> list[str]:
    """Return the beginning of the row of each format: its name and the verdict."""
    return [f"| {form.name} | {form.verdict()} |" for form in FORMATS]


def _gb(size: float) -> str:
    digits = 2 if size < 1e10 else 1 if size < 1e11 else 0
    return f"{size / 1e9:,.{digits}f}"


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f} B" if count < 1e12 else f"{count / 1e9:,.0f} B"


if __name__ == "__main__":
    print("\n".join([*memory_rows(), *format_rows()]))
