"""Spans of requests for an OpenTelemetry collector, sent by opentelemetry's own exporter."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from proto.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""The standard variables that name a collector. Without them nothing is sent."""

FLUSH_SECONDS = 3.0
"""Seconds. Longest wait for the last spans at the end, when the collector may be unavailable."""


@cache
def tracer_provider() -> TracerProvider | None:
    """Return the source of spans, or None without a collector. A thread of it sends the spans.

    Raises UsageError if the libraries are not installed.
    """
    name = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if name is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError(
            f"{name} is set, and {error.name} is not installed. Run pip install 'mtp-cluster[otlp]', or unset {name}"
        ) from None
    service = os.environ.get("OTEL_SERVICE_NAME", "mtp-cluster")
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def send_spans(
    endpoint: str,
    phases: Sequence[tuple[str, float]],
    now: float,
    attributes: Mapping[str, str | int],
    error: bool,
) -> None:
    """Send the span of a request that ends now, with a child for each phase but the first.

    `phases` are names and starts in ascending order, in the clock of `now`. The first is the arrival. A phase ends
    where the next begins.
    """
    if (provider := tracer_provider()) is None:
        return
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

    tracer, epoch = provider.get_tracer("mtp-cluster"), time.time() - now
    starts = [(name, int((epoch + at) * 1e9)) for name, at in [*phases, ("end", now)]]
    end = starts[-1][1]
    span = tracer.start_span(
        endpoint, kind=SpanKind.SERVER, attributes=attributes, start_time=starts[0][1]
    )
    for (name, start), (_, until) in pairwise(starts[1:]):
        tracer.start_span(name, set_span_in_context(span), start_time=start).end(until)
    if error:
        span.set_status(StatusCode.ERROR)
    span.end(end)


def flush_spans() -> None:
    """Send the spans that wait, for at most FLUSH_SECONDS."""
    if (provider := tracer_provider()) is not None:
        thread = threading.Thread(target=provider.force_flush, daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)
