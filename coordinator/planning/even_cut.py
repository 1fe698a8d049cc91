"""The cut that the planner makes for equal machines without memory limits."""

from __future__ import annotations

from coordinator.planning.model_costs import model_costs
from coordinator.planning.plan import NodeSpec, make_plan
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import SpanError
from proto.span import Span

_UNLIMITED_BYTES = 2**60


def even_spans(checkpoint: Checkpoint, count: int, flag: str) -> tuple[Span, ...]:
    """Return the spans of `count` equal machines. Raises SpanError, naming `flag`, for more machines than layers."""
    layers = checkpoint.config.num_layers
    if count > layers:
        raise SpanError(f"{flag} {count}: the model has {layers} layers. Use {layers} or fewer.")
    nodes = [NodeSpec(f"node {number}", _UNLIMITED_BYTES) for number in range(count)]
    return tuple(stage.span for stage in make_plan(model_costs(checkpoint), nodes).stages)
