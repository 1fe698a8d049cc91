"""The administration of models in a server: its catalog, and the machines that a fit is computed for."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.cluster.manager import ClusterManager
from coordinator.models.admin import ModelAdmin
from coordinator.models.catalog import Catalog
from coordinator.pipeline.local import LocalPipelines
from coordinator.planning.plan import NodeSpec
from coordinator.server.options import ServeOptions

CONVERTED = "models"
"""Folder of the state directory with the models that jobs have converted."""


def model_admin(
    options: ServeOptions, served: str, manager: ClusterManager | None, local: LocalPipelines
) -> ModelAdmin:
    """Return the administration of models. Without usable workers a fit is computed for this process alone."""

    def nodes() -> Sequence[NodeSpec]:
        """Return the machines that a plan may use now, without pinned layers, which belong to the served model."""
        usable = manager.view.usable() if manager else []
        if usable:
            return [NodeSpec(m.name, m.memory_limit, m.speed) for m in usable]
        status = local.status()
        return [NodeSpec(status.name, status.memory_limit or 0)]

    return ModelAdmin(Catalog(options.state / CONVERTED), served, nodes)
