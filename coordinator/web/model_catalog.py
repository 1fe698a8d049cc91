"""The models on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.status.cluster_status import LoadReport
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.checkpoint.hub.missing_head import with_fetched_head
from mtp.checkpoint.hub.resolve import BUILTIN, find_model, local_repos
from proto.errors import CheckpointError, ClusterError

_REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")


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


def list_models() -> list[ModelFacts]:
    """Return all models on this machine. Reads headers, so it blocks for the disk."""
    return [facts for name in (BUILTIN, *local_repos()) if (facts := _describe(name)) is not None]


def find_listed(name: str) -> Path | None:
    """Return the directory of a model, or None for a repo that is not whole. Raises CheckpointError for another name.

    A name never holds a path, because clients send it.
    """
    if name != BUILTIN and (not _REPO.fullmatch(name) or ".." in name):
        raise CheckpointError(f"model {name!r:.120}: not found. Give the name of a listed model, or a hub repo")
    return find_model(name)


def _describe(name: str) -> ModelFacts | None:
    """Return the facts of a model, or the problem with it; None if it is not on this machine."""
    try:
        path = find_listed(name)
    except CheckpointError:
        return None
    if path is None:
        return None
    try:
        return facts_of(name, Checkpoint.open(with_fetched_head(path)))
    except ClusterError as error:
        return ModelFacts(name, problem=error.public.replace(str(path), name))


def quantization_text(checkpoint: Checkpoint) -> str:
    """Return the quantization of a checkpoint for people, or an empty string."""
    quantization = checkpoint.config.quantization
    return f"{quantization['bits']}-bit" if quantization else ""


def facts_of(name: str, checkpoint: Checkpoint) -> ModelFacts:
    """Return the facts of an opened checkpoint."""
    config, mtp = checkpoint.config, checkpoint.mtp
    head = "complete" if mtp.complete else "incomplete" if mtp.present else "missing"
    sizes = (sum(checkpoint.part_bytes().values()), config.num_layers, config.max_positions)
    bits, problem = quantization_text(checkpoint), ""
    if missing := missing_from_backbone(checkpoint):
        problem = f"{len(missing)} tensors are missing, such as {missing[0]}. Download it again"
    return ModelFacts(name, *sizes, bits, head, problem, config.model_type)


class ModelLoader(Protocol):
    """The models that a server can serve, and the change to another one."""

    @property
    def report(self) -> LoadReport:
        """The change in progress, or the last one."""

    async def list_models(self) -> list[ModelFacts]:
        """Return the models on this machine, with the problems of those that cannot be served."""

    def can_load(self, name: str) -> bool:
        """Return whether the model is on this machine."""

    def start(self, name: str) -> LoadReport:
        """Begin to change to the model `name`, or to the directory with that absolute path, and return the report.

        Raises CheckpointError for an invalid name, and BusyError while another change runs.
        """
