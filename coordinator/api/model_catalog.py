"""The models on this machine and on the hub, and whether one fits the cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.cluster.capacity import plan_capacity, reserve_bytes
from coordinator.cluster.model_costs import model_costs
from coordinator.cluster.plan import NodeSpec, Workload, make_plan
from coordinator.status.cluster_status import LoadReport
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.checkpoint.hub.resolve import BUILTIN, cached_repos, find_model
from mtp.checkpoint.hub.search import is_repo_name
from proto.errors import CheckpointError, ClusterError

CONTEXTS = (4096, 32_768, 131_072, 262_144)
"""Tokens. The contexts that a fit is computed for, from a short chat to a long document."""

SEQUENCES = 1
"""Requests at once. With more, each has a part of the context."""


@dataclass(frozen=True)
class StageFit:
    """The part of the model that one machine would hold. `layers` is inclusive, such as `0-31`."""

    node: str
    layers: str
    weight_bytes: int


@dataclass(frozen=True)
class ModelFit:
    """The fit of one model. `context` is the largest one of a single request, in tokens; 0 if the model does not fit.

    `contexts` has for each of CONTEXTS whether it fits. `tokens_per_second` is an estimate for one answer without
    drafts. It counts only the reads of weights, at the memory speed that each machine measured. `problem` says why the
    model does not fit.
    """

    context: int = 0
    contexts: tuple[tuple[int, bool], ...] = ()
    tokens_per_second: float = 0.0
    stages: tuple[StageFit, ...] = ()
    problem: str = ""


def fit_model(checkpoint: Checkpoint, nodes: Sequence[NodeSpec]) -> ModelFit:
    """Return the fit of a model on `nodes`, from its headers alone."""
    longest = checkpoint.config.max_positions
    costs = model_costs(checkpoint, with_head=checkpoint.mtp.complete)
    workload = Workload(
        kv_tokens=min(CONTEXTS[0], longest),
        draft_depth=int(checkpoint.mtp.complete),
        reserve_bytes=reserve_bytes(costs),
    )
    try:
        plan = make_plan(costs, nodes, workload=workload)
        room = plan_capacity(costs, plan.stages, longest, SEQUENCES, prefix_cache=False)
    except ClusterError as error:
        return ModelFit(problem=error.public)
    context = min(longest, room.kv_tokens)
    return ModelFit(
        context,
        tuple((one, one <= context) for one in CONTEXTS if one <= longest),
        round(1 / plan.pass_seconds, 2) if plan.pass_seconds else 0.0,
        tuple(StageFit(s.node, str(s.span), s.weight_bytes) for s in plan.stages),
    )


_DIRECTORY = re.compile(r"[\w][\w.-]{0,127}")


@dataclass(frozen=True)
class ModelFacts:
    """One model, as its config.json and headers describe it. No weight is read.

    `head` is `complete`, `incomplete` or `missing`. `quantization` is a short text, or empty. `problem` says why the
    model cannot be served; the other fields are then unknown.
    """

    name: str
    nbytes: int = 0
    layers: int = 0
    context: int = 0
    quantization: str = ""
    head: str = "missing"
    problem: str = ""
    family: str = ""
    """The `model_type` of the checkpoint."""


class Catalog:
    """The models by name. A name never holds a path, because clients see it. `directory` has models of the user."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def list_models(self) -> list[ModelFacts]:
        """Return all models on this machine. Reads headers, so it blocks for the disk."""
        names = [BUILTIN, *self._own_models(), *cached_repos()]
        return [self.describe_local(name) for name in names if self._exists(name)]

    def _own_models(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        return sorted(d.name for d in self.directory.iterdir() if (d / "config.json").is_file())

    def _exists(self, name: str) -> bool:
        try:
            return self.find_path(name) is not None
        except CheckpointError:
            return False

    def find_path(self, name: str) -> Path | None:
        """Return the directory of model `name`, or None for a repo that is not whole on this machine.

        Raises CheckpointError for a name that is neither a repo nor a model of this machine.
        """
        if name == BUILTIN:
            return find_model(BUILTIN)
        if _DIRECTORY.fullmatch(name) and (self.directory / name / "config.json").is_file():
            return self.directory / name
        if not is_repo_name(name):
            raise CheckpointError(
                f"model {name!r:.120}: not found. Give the name of a listed model, or a hub repo"
            )
        return find_model(name)

    def describe_local(self, name: str) -> ModelFacts:
        """Return the facts of a model on this machine, or the problem with it."""
        path = self.find_path(name)
        assert path is not None
        try:
            return describe_model(name, Checkpoint.open(path))
        except ClusterError as error:
            return ModelFacts(name, problem=error.public.replace(str(path), name))


def quantization_text(checkpoint: Checkpoint) -> str:
    """Return the quantization of a checkpoint for people, or an empty string."""
    quantization = checkpoint.config.quantization
    return f"{quantization['bits']}-bit" if quantization else ""


def describe_model(name: str, checkpoint: Checkpoint) -> ModelFacts:
    """Return the facts of an opened checkpoint."""
    config, mtp = checkpoint.config, checkpoint.mtp
    problem = ""
    if missing := missing_from_backbone(checkpoint):
        problem = f"{len(missing)} tensors are missing, such as {missing[0]}. Download it again"
    return ModelFacts(
        name,
        sum(checkpoint.part_bytes().values()),
        config.num_layers,
        config.max_positions,
        quantization_text(checkpoint),
        "complete" if mtp.complete else "incomplete" if mtp.present else "missing",
        problem,
        config.model_type,
    )


class ModelLoader(Protocol):
    """The models that a server can serve, and the change to another one."""

    @property
    def report(self) -> LoadReport:
        """The change in progress, or the last one."""
        ...

    async def list_models(self) -> list[ModelFacts]:
        """Return the models on this machine that can be served."""
        ...

    def can_load(self, name: str) -> bool:
        """Return whether the model is on this machine."""
        ...

    def start(self, name: str) -> LoadReport:
        """Begin to change to the model `name`, downloaded if needed, and return the report.

        Raises CheckpointError for an invalid name, and BusyError while another change runs.
        """
        ...
