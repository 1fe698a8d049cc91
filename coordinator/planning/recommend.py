"""The published models that fit some machines, with their predicted speed. Pure functions of the machines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from coordinator.planning.capacity import plan_capacity
from coordinator.planning.chips import GB_SPEED, LAYER_SECONDS
from coordinator.planning.groups import Planning, plan_machines, predict_plans
from coordinator.planning.plan import NodeSpec
from mtp.checkpoint.hub.known_repos import KNOWN, KnownRepo
from mtp.checkpoint.hub.published import converted_headers, find_published
from proto.errors import ClusterError

LEAST_CONTEXT = 16_384
"""Tokens that a recommended model must have room for: an agent's first prompt."""


@dataclass(frozen=True)
class Recommendation:
    """A model that fits, with the figures of one plan: the fastest for one stream.

    Speeds are tokens a second of one stream, plain and with the best number of drafts. `head` is true if the repo has
    the MTP head, false if another one has it, and None if no program can draft with one.
    """

    name: str
    repo: str
    bits: int
    nbytes: int
    context: int
    plain: float
    drafted: float
    machines: int
    plan: str
    head: bool | None


def joined_spec(name: str, memory_limit: int, bytes_per_second: float | None, chip: str) -> NodeSpec:
    """Return the machine that a worker has measured."""
    speed = (bytes_per_second or GB_SPEED * 1e9) / 1e9 / GB_SPEED
    fixed = LAYER_SECONDS if chip.startswith("Apple") else 0.0
    return NodeSpec(name, memory_limit, speed, layer_seconds=fixed)


def recommendations(specs: Sequence[NodeSpec]) -> list[Recommendation]:
    """Return the known models that fit `specs`, the largest first: of each size and number of bits the newest release.

    Unquantized ones are left out where there are others.
    """
    packed = {repo.size for repo in KNOWN if repo.bits is not None}
    newest = {(repo.size, repo.bits): repo for repo in sorted(KNOWN, key=lambda one: one.release)}
    found = []
    for repo in newest.values():
        if repo.bits is not None or repo.size not in packed:
            with suppress(ClusterError):  # it does not fit
                found.append(_recommendation(repo, specs))
    return sorted(found, key=lambda one: -one.nbytes)


def _recommendation(repo: KnownRepo, specs: Sequence[NodeSpec]) -> Recommendation:
    """Return the figures of a model on `specs`. Raises the errors of the planner if it does not fit."""
    model = find_published(repo.name)
    assert model is not None
    checkpoint = converted_headers(model, repo.bits)
    planning = Planning.of(checkpoint, LEAST_CONTEXT)
    best = min(predict_plans(planning, plan_machines(specs)), key=lambda one: one.fastest)
    longest = checkpoint.config.max_positions
    room = plan_capacity(planning.costs_of(best.plan.group_size), best.plan.stages, longest, 1).kv_tokens
    name = repo.short + (f"-{repo.bits}bit" if repo.bits not in (4, None) else "")
    name += "-bf16" if repo.bits is None else ""
    return Recommendation(
        name,
        repo.name,
        repo.bits or 16,
        sum(checkpoint.part_bytes().values()),
        min(room, longest),
        1 / best.token,
        1 / min(best.drafted, default=best.token),
        len(best.plan.nodes),
        best.text,
        repo.head if checkpoint.config.head() is not None else None,
    )
