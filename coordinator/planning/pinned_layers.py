"""The layers that workers are pinned to with `--layers`, and the check that a plan around them is possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from proto.errors import SpanError
from proto.span import Span


class LayerGapError(SpanError):
    """The pinned layers leave more gaps than there are unpinned nodes. Another worker could fill one."""


def check_pinned_layers(
    nodes: Sequence[tuple[str, Span | None]], num_layers: int
) -> dict[int, Span]:
    """Return the pinned spans by the index of their node in `nodes`, which are pairs of name and span.

    Raises SpanError, naming layers and nodes, when a span exceeds the model, when two spans overlap, or when they
    leave more gaps than there are unpinned nodes.
    """
    pinned = {v: span for v, (_, span) in enumerate(nodes) if span is not None}
    for v, span in pinned.items():
        if span.end > num_layers:
            raise SpanError(
                f"{nodes[v][0]} is pinned to layers {span}: "
                f"the model has {num_layers}, 0-{num_layers - 1}"
            )
    in_order = sorted(pinned, key=lambda v: (pinned[v].start, pinned[v].end))
    for a, b in pairwise(in_order):
        if pinned[b].start < pinned[a].end:
            both = Span(pinned[b].start, min(pinned[a].end, pinned[b].end))
            raise SpanError(
                f"both {nodes[a][0]} ({pinned[a]}) and {nodes[b][0]} ({pinned[b]}) are pinned to "
                f"{_layers(both)}: change --layers of one"
            )
    gaps = _gaps([pinned[v] for v in in_order], num_layers)
    free = len(nodes) - len(pinned)
    if len(gaps) > free:
        held = ", ".join(f"{nodes[v][0]} {pinned[v]}" for v in in_order)
        others = f"{free} without --layers cannot fill {len(gaps)} gaps"
        raise LayerGapError(
            f"no worker holds {' and '.join(map(_layers, gaps))} (pinned: {held})"
            f"{'; ' + others if free else ''}: change --layers, or add a worker without it"
        )
    return pinned


def _gaps(spans: Sequence[Span], num_layers: int) -> list[Span]:
    """Return the layers that `spans`, sorted and disjoint, do not cover."""
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), num_layers]
    return [Span(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _layers(span: Span) -> str:
    return f"layer {span.start}" if len(span) == 1 else f"layers {span}"
