"""The published models that fit some machines, with their predicted speed. Pure functions of the machines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from coordinator.planning.capacity import plan_capacity
from coordinator.planning.chips import GB_SPEED, chip_speed, layer_seconds
from coordinator.planning.groups import ONE_MACHINE, Planning, plan_machines, predict_plans
from coordinator.planning.plan import NodeSpec, Plan
from mtp.checkpoint.hub.known_repos import KNOWN, KnownRepo
from mtp.checkpoint.hub.published import converted_headers, find_published
from proto.errors import ClusterError

LEAST_CONTEXT = 16_384
"""Tokens that a recommended model must have room for: an agent's first prompt."""

FASTER = 1.1
"""Speed over that of one machine from which more machines are recommended. Predictions are less exact than a tenth."""

USABLE_SPEED, USABLE_CONTEXT = 20.0, 32_768
"""Tokens/s of one stream and tokens of room of a usable model: Claude Code begins with 28,000."""


@dataclass(frozen=True)
class Recommendation:
    """A model that fits, with the figures of one plan: the fastest for one stream, or one machine if it is as fast.

    `nbytes` are in memory, and `download` has also the rows that stay on disk. `flags` of `mtp-coord serve` give the
    plan. `best` marks the largest usable model, or else the fastest one. Speeds are tokens a second of one stream,
    plain and with the best number of drafts. `head` is true if the repo has the MTP head, false if another one has it,
    and None if no program can draft with one.
    """

    name: str
    repo: str
    bits: int
    nbytes: int
    download: int
    context: int
    plain: float
    drafted: float
    machines: int
    plan: str
    flags: str
    head: bool | None
    best: bool = False

    @property
    def speed(self) -> float:
        """Tokens a second with drafts where they help."""
        return max(self.plain, self.drafted)

    @property
    def usable(self) -> bool:
        """True if the model is fast enough for people and has room for agents."""
        return self.speed >= USABLE_SPEED and self.context >= USABLE_CONTEXT


def joined_spec(name: str, memory_limit: int, bytes_per_second: float | None, chip: str) -> NodeSpec:
    """Return a joined machine. The speed of a Mac is at least its chip's: a busy machine measures less."""
    measured = bytes_per_second or GB_SPEED * 1e9
    speed = max(measured, chip_speed(chip, memory_limit) or 0.0) / 1e9 / GB_SPEED
    return NodeSpec(name, memory_limit, speed, layer_seconds=layer_seconds(chip))


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
    best = max(found, key=_rank, default=None)
    found.sort(key=lambda one: -one.nbytes)
    return [replace(one, best=one is best) for one in found]


def _rank(one: Recommendation) -> tuple[float, ...]:
    weights = one.nbytes / one.bits  # in proportion to the parameters
    return (True, weights) if one.usable else (False, one.speed)


def _recommendation(repo: KnownRepo, specs: Sequence[NodeSpec]) -> Recommendation:
    """Return the figures of a model on `specs`. Raises the errors of the planner if it does not fit."""
    model = find_published(repo.name)
    assert model is not None
    checkpoint = converted_headers(model, repo.bits)
    planning = Planning.of(checkpoint, LEAST_CONTEXT)
    found = predict_plans(planning, plan_machines(specs))
    best = min(found, key=lambda one: one.fastest)
    if found[0].text == ONE_MACHINE and found[0].fastest < best.fastest * FASTER:
        best = found[0]
    longest = checkpoint.config.max_positions
    room = plan_capacity(planning.costs_of(best.plan.group_size), best.plan.stages, longest, 1).kv_tokens
    name = repo.short + (f"-{repo.bits}bit" if repo.bits not in (4, None) else "")
    name += "-bf16" if repo.bits is None else ""
    return Recommendation(
        name,
        repo.name,
        repo.bits or 16,
        nbytes := sum(checkpoint.part_bytes().values()),
        nbytes + checkpoint.disk_bytes,
        min(room, longest),
        1 / best.token,
        1 / min(best.drafted, default=best.token),
        len(best.plan.nodes),
        best.text,
        serve_flags(best.plan),
        repo.head if checkpoint.config.head() is not None else None,
    )


def serve_flags(plan: Plan) -> str:
    """Return the flags of `mtp-coord serve` that give `plan`. With several machines --own-worker starts one of them."""
    if len(plan.nodes) == 1:
        return "--single-node"
    size = plan.group_size
    return f"--nodes {len(plan.nodes)}" if size == 1 else f"--parallel {len(plan.stages)}x{size}"
