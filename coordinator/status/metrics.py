"""Prometheus metrics: requests as clients see them, and the cluster's own figures read at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coordinator.status.cluster_status import ClusterStatus, NodeStatus, StatusSource

FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10, 30)
REQUEST_SECONDS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """One app's metrics, in a registry of their own."""

    def __init__(
        self, status: StatusSource, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "mtp_requests",
            "Requests by endpoint and outcome: stop, length, tool_calls, cancelled, refused or error.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "mtp_open_requests", "Requests being answered.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "mtp_prompt_tokens", "Tokens of prompts answered.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "mtp_cached_prompt_tokens",
            "Tokens of prompts found in the prefix cache.",
            registry=self.registry,
        )
        self.generated_tokens = Counter(
            "mtp_generated_tokens", "Tokens sent to clients.", registry=self.registry
        )
        self.first_token = Histogram(
            "mtp_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.gap = Histogram(
            "mtp_inter_token_seconds",
            "Between two deliveries of tokens to one client; a delivery is one window, one token or more.",
            buckets=GAP_SECONDS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "mtp_request_seconds",
            "From a request's arrival to its last token.",
            buckets=REQUEST_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_ClusterCollector(status))

    def begin(self, endpoint: str) -> RequestMeter:
        """Start to measure one HTTP request."""
        return RequestMeter(self, endpoint)

    def render(self) -> bytes:
        """The text a scrape gets."""
        return generate_latest(self.registry)


class RequestMeter:
    """Measures one HTTP request, from now to `end`."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._began = metrics.clock()
        self._last: dict[int, float] = {}
        metrics.open_requests.inc()

    def tokens(self, choice: int, count: int) -> None:
        """`count` tokens of a choice arrived."""
        now = self._metrics.clock()
        if choice in self._last:
            self._metrics.gap.observe(now - self._last[choice])
        else:
            self._metrics.first_token.observe(now - self._began)
        self._last[choice] = now
        self._metrics.generated_tokens.inc(count)

    def prompt(self, tokens: int, cached: int) -> None:
        """The prompts behind the answer, once it is complete."""
        self._metrics.prompt_tokens.inc(tokens)
        self._metrics.cached_tokens.inc(cached)

    def end(self, outcome: str) -> None:
        """The request is over."""
        self._metrics.open_requests.dec()
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        self._metrics.request_seconds.observe(self._metrics.clock() - self._began)

    @property
    def seconds(self) -> float:
        return self._metrics.clock() - self._began


class _ClusterCollector(Collector):
    """Reads the status source at each scrape, so that no figure is kept twice."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def describe(self) -> list[Metric]:
        return []  # names depend on the cluster; saying none keeps registering from scraping

    def collect(self) -> Iterator[Metric]:
        status = self._source.status()
        yield from _cluster_gauges(status)
        yield from _drafts(status)
        yield from _node_gauges(status.nodes)


def _cluster_gauges(status: ClusterStatus) -> Iterator[Metric]:
    gauges: dict[str, tuple[str, float | None]] = {
        "mtp_ready": ("1 while a plan is serving.", float(status.ready)),
        "mtp_plan_epoch": ("Epoch of the plan; grows by one at every change.", status.epoch),
        "mtp_sequences_running": ("Sequences in the pipeline.", status.running),
        "mtp_sequences_running_limit": ("Most sequences at once.", status.running_limit),
        "mtp_queue_length": ("Requests waiting for a place.", status.waiting),
        "mtp_queue_limit": ("Most requests that may wait.", status.waiting_limit),
        "mtp_kv_tokens": ("K/V cache in use, tokens.", status.kv_tokens),
        "mtp_kv_tokens_limit": ("K/V cache there is, tokens.", status.kv_limit),
        "mtp_tokens_per_second": ("Tokens a second, lately.", status.tokens_per_second),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)
    yield CounterMetricFamily(
        "mtp_recoveries", "Plans replaced because one failed.", value=status.recoveries
    )


def _drafts(status: ClusterStatus) -> Iterator[Metric]:
    drafted = CounterMetricFamily("mtp_drafts", "Drafts offered, by position.", labels=["position"])
    kept = CounterMetricFamily(
        "mtp_accepted_drafts", "Drafts kept, by position.", labels=["position"]
    )
    for family, counts in (
        (drafted, status.drafted_by_position),
        (kept, status.accepted_by_position),
    ):
        for position, count in enumerate(counts, start=1):
            family.add_metric([str(position)], count)
        yield family


def _node_gauges(nodes: tuple[NodeStatus, ...]) -> Iterator[Metric]:
    up = GaugeMetricFamily("mtp_node_up", "1 while the node is not lost.", labels=["node"])
    used = GaugeMetricFamily("mtp_node_memory_bytes", "Memory in use.", labels=["node"])
    limit = GaugeMetricFamily("mtp_node_memory_limit_bytes", "Memory allowed.", labels=["node"])
    stage = GaugeMetricFamily(
        "mtp_stage_seconds", "Usual time of one decode step of a stage.", labels=["node", "span"]
    )
    for node in nodes:
        up.add_metric([node.name], float(node.health != "lost"))
        used.add_metric([node.name], node.memory_used)
        if node.memory_limit is not None:
            limit.add_metric([node.name], node.memory_limit)
        if node.stage_ms is not None:
            stage.add_metric([node.name, node.span or ""], node.stage_ms / 1000)
    yield from (up, used, limit, stage)
