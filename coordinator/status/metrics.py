"""Metrics of requests for Prometheus, with the cluster's status at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coordinator.status.cluster_status import ClusterStatus, NodeStatus, StatusSource
from coordinator.status.history import LatencyLog, RequestLog

FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Seconds. Histogram buckets of the time to the first token, from a cached prompt to a long one."""

GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10, 30)
"""Seconds. Histogram buckets of the time between two deliveries, from one fast window to a recovery."""

REQUEST_SECONDS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Seconds. Histogram buckets of the time of a whole request."""


class Metrics(Collector):
    """The metrics of one app, in a registry of its own. Each scrape reads the cluster's status."""

    def __init__(self, status: StatusSource, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._status = status
        self.latency = LatencyLog()
        self.request_log = RequestLog()
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "mtp_requests",
            "Requests by endpoint and outcome: stop, length, tool_calls, cancelled, refused or error.",
            ("endpoint", "outcome"),
        )
        self.open_requests = Gauge("mtp_open_requests", "Open requests.", registry=self.registry)
        self.prompt_tokens = counter("mtp_prompt_tokens", "Prompt tokens of completed requests.")
        self.cached_tokens = counter("mtp_cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.generated_tokens = counter("mtp_generated_tokens", "Tokens sent to clients.")
        self.first_token = histogram(
            "mtp_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            buckets=FIRST_TOKEN_SECONDS,
        )
        self.gap = histogram(
            "mtp_inter_token_seconds",
            "Time between two deliveries of tokens to one client. A delivery is one window of one or more tokens.",
            buckets=GAP_SECONDS,
        )
        self.request_seconds = histogram(
            "mtp_request_seconds",
            "Time from the arrival of a request to its last token.",
            buckets=REQUEST_SECONDS,
        )
        self.registry.register(self)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Return no descriptions: the metric names depend on the cluster, and the registry need not know them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the current status."""
        status = self._status.status()
        yield from _cluster_gauges(status)
        yield from _drafts(status)
        yield from _node_gauges(status.nodes)


class RequestMeter:
    """The measurement of one HTTP request, from construction to `end`."""

    def __init__(self, metrics: Metrics, endpoint: str, client: str = "") -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._began = metrics.clock()
        self._last: dict[int, float] = {}
        self.record = metrics.request_log.begin_request(endpoint, time.time(), client)
        metrics.open_requests.inc()

    def allow_stop(self, answer_id: str, stop: Callable[[], None]) -> None:
        """Let people stop the request by the id of its answer."""
        self.record.id = answer_id
        self._metrics.request_log.stops[answer_id] = stop

    def record_tokens(self, choice: int, count: int) -> None:
        """Record the arrival of `count` tokens of the choice with index `choice`."""
        now, latency = self._metrics.clock(), self._metrics.latency
        latency.tokens += count
        self.record.tokens += count
        if choice in self._last:
            self._metrics.gap.observe(now - self._last[choice])
            latency.gaps.append(now - self._last[choice])
        else:
            self._metrics.first_token.observe(now - self._began)
            latency.answers.append((now, now - self._began))
            if self.record.first_token is None:
                self.record.first_token = round(now - self._began, 4)
        self._last[choice] = now
        self._metrics.generated_tokens.inc(count)

    def record_prompt(self, tokens: int, cached: int) -> None:
        """Record the prompt tokens of a completed answer, and how many of them were cached."""
        self._metrics.prompt_tokens.inc(tokens)
        self._metrics.cached_tokens.inc(cached)
        self.record.cached_tokens = cached

    def end(self, outcome: str) -> float:
        """Record the end of the request and its outcome, and return its seconds."""
        self._metrics.open_requests.dec()
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        seconds = self._metrics.clock() - self._began
        self._metrics.request_seconds.observe(seconds)
        self._metrics.request_log.end_request(self.record, outcome, seconds)
        return seconds


def _cluster_gauges(status: ClusterStatus) -> Iterator[Metric]:
    gauges: dict[str, tuple[str, float | None]] = {
        "mtp_ready": ("1 while a plan is serving.", float(status.ready)),
        "mtp_plan_epoch": ("Epoch of the plan; grows by one at every change.", status.epoch),
        "mtp_sequences_running": ("Sequences in the pipeline.", status.running),
        "mtp_sequences_running_limit": ("Maximum concurrent sequences.", status.running_limit),
        "mtp_queue_length": ("Requests in the queue.", status.waiting),
        "mtp_queue_limit": ("Maximum requests in the queue.", status.waiting_limit),
        "mtp_kv_tokens": ("Tokens reserved in the K/V cache.", status.kv_tokens),
        "mtp_kv_tokens_limit": ("Capacity of the K/V cache in tokens.", status.kv_limit),
        "mtp_tokens_per_second": ("Recent tokens per second.", status.tokens_per_second),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)
    text = "Plans that failed while they served. A plan that another one replaced does not count."
    yield CounterMetricFamily("mtp_recoveries", text, value=status.recoveries)


def _drafts(status: ClusterStatus) -> Iterator[Metric]:
    of_head, of_text = status.drafted_by_position, status.ngram_drafted
    accepted, of_text_accepted = status.accepted_by_position, status.ngram_accepted
    for name, text, counts, ngrams in (
        ("mtp_drafts", "Drafts by position, or from the text.", of_head, of_text),
        ("mtp_accepted_drafts", "Accepted drafts, likewise.", accepted, of_text_accepted),
    ):
        family = CounterMetricFamily(name, text, labels=["position"])
        for position, count in enumerate(counts, start=1):
            family.add_metric([str(position)], count)
        family.add_metric(["text"], ngrams)
        yield family


def _node_gauges(nodes: tuple[NodeStatus, ...]) -> Iterator[Metric]:
    figures: dict[str, tuple[str, Callable[[NodeStatus], float | None]]] = {
        "up": ("1 while the node is not lost.", lambda node: float(node.health != "lost")),
        "memory_bytes": ("Memory in use, bytes.", lambda node: node.memory_used),
        "memory_cached_bytes": ("Memory in freed buffers, bytes.", lambda node: node.memory_cached),
        "memory_limit_bytes": ("Memory limit of the node, bytes.", lambda node: node.memory_limit),
    }
    # One row a name, or Prometheus would take none: of two workers of one name that which is not lost.
    nodes = tuple({n.name: n for n in sorted(nodes, key=lambda n: n.health != "lost")}.values())
    for name, (text, figure) in figures.items():
        gauge = GaugeMetricFamily(f"mtp_node_{name}", text, labels=["node"])
        for node in nodes:
            if (value := figure(node)) is not None:
                gauge.add_metric([node.name], value)
        yield gauge
    text = "Typical time of one decode step of a stage, seconds."
    stage = GaugeMetricFamily("mtp_stage_seconds", text, labels=["node", "span"])
    for node in nodes:
        if node.stage_ms is not None:
            stage.add_metric([node.name, node.span or ""], node.stage_ms / 1000)
    yield stage
