"""The even split: contiguous spans whose largest, in bytes on disk, is as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence

from mtp.checkpoint.checkpoint import Checkpoint
from proto.errors import SpanError
from proto.span import Span


def split_evenly(checkpoint: Checkpoint, nodes: int) -> tuple[Span, ...]:
    """Cut a model over `nodes` equal nodes, each with at least a layer; first and last carry the ends too.

    Raises SpanError for more nodes than layers, or none.
    """
    layers = checkpoint.config.num_layers
    if not 1 <= nodes <= layers:
        raise SpanError(
            f"{nodes} nodes: the model has {layers} layers, and each node takes one or more"
        )
    sizes = checkpoint.part_bytes()
    costs = []
    for layer in range(layers):
        only = Span(layer, layer + 1)
        parts = checkpoint.stage_parts(only, first=layer == 0, last=layer == layers - 1)
        costs.append(sum(sizes[part] for part in parts))
    return _split(costs, nodes)


def _split(costs: Sequence[int], nodes: int) -> tuple[Span, ...]:
    """Search the smallest limit under which filling greedily takes no more than `nodes` runs."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(costs, limit, 1)) <= nodes:
            high = limit
        else:
            low = limit + 1
    return _fill(costs, low, nodes)


def _fill(costs: Sequence[int], limit: int, nodes: int) -> tuple[Span, ...]:
    """Runs of at most `limit`, each closed early enough to make `nodes` of them."""
    spans: list[Span] = []
    start = cost = 0
    for layer, more in enumerate(costs):
        must_close = len(costs) - layer < nodes - len(spans)
        if layer > start and (cost + more > limit or must_close):
            spans.append(Span(start, layer))
            start, cost = layer, 0
        cost += more
    return (*spans, Span(start, len(costs)))
