"""`mtp-coord recommend`: the published models that fit some Macs, before any download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coordinator.cli.client import DEFAULT_URL
from coordinator.cli.cluster_commands import fetch, parse
from coordinator.planning.capacity import model_costs, plan_capacity, reserve_bytes
from coordinator.planning.chips import GB_SPEED, LAYER_SECONDS, mac_specs
from coordinator.planning.groups import Machine, Planning, predict_plans
from coordinator.planning.plan import ModelCosts, NodeSpec, Workload
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.checkpoint.hub.known_repos import KNOWN, KnownRepo
from mtp.checkpoint.hub.published import converted_headers, find_published
from proto.errors import ClusterError, UsageError
from proto.terminal.options import JsonOption
from proto.terminal.progress import format_size

LEAST_CONTEXT = 16_384
"""Tokens that a recommended model must have room for: an agent's first prompt."""


@dataclass(frozen=True)
class Recommendation:
    """A model that fits. Speeds are tokens a second of one stream over the best plan, plain and with drafts."""

    name: str
    repo: str
    bits: int
    nbytes: int
    context: int
    plain: float
    drafted: float
    machines: int
    plan: str
    head: bool


def recommend(
    mac: Annotated[
        list[str] | None,
        typer.Option(metavar="'M4 Pro 64GB'", help="A Mac by its chip and memory; repeatable."),
    ] = None,
    url: Annotated[
        str, typer.Option(help="URL of mtp-coord serve, whose machines are taken without --mac.")
    ] = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """List the published models that fit your Macs, the largest first, with their predicted speed.

    Without --mac the machines are those of the running server. Speeds are within a third of what people measured.
    `mtp-coord recommend --mac "M4 Pro 64GB" --mac "M4 Pro 64GB"`
    """
    specs = mac_specs(mac) if mac else _joined(url)
    found = sorted(recommendations(specs), key=lambda one: -one.nbytes)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    console = Console(emoji=False)
    console.print(f"On {', '.join(spec.name for spec in specs)}:", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("size", "context", "tokens/s", "drafting", "Macs", "head"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        speeds = f"{one.plain:.3g}", f"{one.drafted:.3g}"
        size, head = format_size(one.nbytes), "included" if one.head else "fetched"
        context = f"{one.context // 1024}k"
        table.add_row(one.name, size, context, *speeds, str(one.machines), head)
    console.print(table)
    if not found:
        console.print("None fits. Add a machine.")
    else:
        console.print("mtp-coord pull NAME downloads one, and mtp-coord serve NAME serves it.")


def _joined(url: str) -> list[NodeSpec]:
    """Return the machines of the server at `url`. Raises UsageError without one."""
    try:
        cluster = parse(fetch(url, None))
    except ClusterError as error:
        raise UsageError(f"name your Macs, as in --mac 'M4 Pro 64GB' ({error})") from error
    specs = []
    for node in cluster.nodes:
        if node.memory_limit:
            speed = (node.bytes_per_second or GB_SPEED * 1e9) / 1e9 / GB_SPEED
            fixed = LAYER_SECONDS if node.chip.startswith("Apple") else 0.0
            specs.append(NodeSpec(node.name, node.memory_limit, speed, layer_seconds=fixed))
    if not specs:
        raise UsageError(f"no machine has joined {url}. Name your Macs, as in --mac 'M4 Pro 64GB'")
    return specs


def recommendations(specs: Sequence[NodeSpec]) -> Iterator[Recommendation]:
    """Yield the known models that fit `specs`: of each size and number of bits the newest release.

    Unquantized ones are left out where there are others.
    """
    packed = {repo.size for repo in KNOWN if repo.bits is not None}
    seen = set()
    for repo in sorted(KNOWN, key=lambda one: one.release, reverse=True):
        key = repo.size, repo.bits
        if key in seen or (repo.bits is None and repo.size in packed):
            continue
        seen.add(key)
        with suppress(ClusterError):  # it does not fit
            yield _recommendation(repo, specs)


def _recommendation(repo: KnownRepo, specs: Sequence[NodeSpec]) -> Recommendation:
    """Return the figures of a model on `specs`. Raises the errors of the planner if it does not fit."""
    model = find_published(repo.name)
    assert model is not None
    checkpoint = converted_headers(model, repo.bits)
    costs_of = partial(_share, checkpoint)
    workload = Workload(LEAST_CONTEXT, 0, reserve_bytes(costs_of(1)))
    machines = [Machine(spec, f"{spec.speed:g}", spec.name) for spec in specs]
    found = predict_plans(Planning(costs_of, workload), machines)
    best = min(found, key=lambda one: one.token)
    roomiest = max(
        plan_capacity(
            costs_of(one.plan.group_size), one.plan.stages, checkpoint.config.max_positions, 1
        ).kv_tokens
        for one in found
    )
    name = repo.short + (f"-{repo.bits}bit" if repo.bits not in (4, None) else "")
    name += "-bf16" if repo.bits is None else ""
    return Recommendation(
        name,
        repo.name,
        repo.bits or 16,
        sum(checkpoint.part_bytes().values()),
        min(roomiest, checkpoint.config.max_positions),
        1 / best.token,
        1 / min(min(one.drafted) for one in found),
        len(best.plan.nodes),
        best.text,
        repo.head,
    )


def _share(checkpoint: Checkpoint, size: int) -> ModelCosts:
    """Return the costs of the share of one of `size` members."""
    return model_costs(checkpoint.cut_for(Cut(0, size)))
