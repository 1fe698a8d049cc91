"""The interface between the API and the change of the served model."""

from __future__ import annotations

from typing import Protocol

from coordinator.models.catalog import ModelFacts
from coordinator.status.load_report import LoadReport


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

    async def load(self, name: str) -> None:
        """Change to the model `name` and return when it serves. Raises ClusterError if it cannot."""
        ...
