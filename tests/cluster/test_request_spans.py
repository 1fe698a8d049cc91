"""A coordinator sends a trace of each request to an OpenTelemetry collector, if a variable names one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from coordinator.status.metrics import FLUSH_SECONDS
from tests.support.processes.processes import (
    START_SECONDS,
    STOP_SECONDS,
    as_coordinator,
    ending,
    launch_coordinator,
    without_folder,
)

ALONE = ("--model", "builtin", "--single-node")


class Receiver(BaseHTTPRequestHandler):
    """The OTLP/HTTP endpoint of a collector. `spans` has what arrived."""

    spans: list[tuple[str, Span]]

    def do_POST(self) -> None:
        """Keep the spans of one export, with the name of their service."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = [
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            ]
            for scope in resource.scope_spans:
                self.spans += [(service, span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def receiving() -> Iterator[tuple[str, list[tuple[str, Span]]]]:
    """Yield the URL of a collector and the list of the spans that it receives."""
    spans: list[tuple[str, Span]] = []
    handler = type("Receiver", (Receiver,), {"spans": spans})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()
        thread.join()


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


@pytest.mark.smoke
def test_a_request_is_one_span_with_its_phases(tmp_path: Path) -> None:
    """A collector gets a span for each request, whose children are queue, prompt and decode, one after another."""
    with receiving() as (url, received):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
        with ending(launch_coordinator(tmp_path, *ALONE, env=env)) as process:
            coordinator = as_coordinator(process)
            body = {"prompt": "def f(x):", "max_tokens": 8, "ignore_eos": True}
            done = httpx.post(f"{coordinator.url}/v1/completions", json=body, timeout=60)
            assert done.status_code == 200
            refused = httpx.post(
                f"{coordinator.url}/v1/completions", json={"prompt": 1}, timeout=60
            )
            assert refused.status_code == 400
            assert process.stop() == 0
    assert {service for service, _ in received} == {"mtp-cluster"}
    spans = [span for _, span in received]
    requests = {attributes(s)["mtp.outcome"]: s for s in spans if not s.parent_span_id}
    assert {span.name for span in requests.values()} == {"completions"}
    assert requests.keys() == {"length", "refused"}
    served = requests["length"]
    usage = done.json()["usage"]
    assert attributes(served)["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes(served)["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    children = sorted(
        (s for s in spans if s.parent_span_id), key=lambda span: span.start_time_unix_nano
    )
    assert [span.name for span in children] == ["queue", "prompt", "decode"]
    assert {s.parent_span_id for s in children} == {served.span_id}
    assert {s.trace_id for s in children} == {served.trace_id}
    times = [t for s in children for t in (s.start_time_unix_nano, s.end_time_unix_nano)]
    assert times == sorted(times)
    assert served.start_time_unix_nano <= times[0]
    assert times[-1] == served.end_time_unix_nano
    assert served.status.code == Status.STATUS_CODE_UNSET


def test_a_collector_that_is_away_delays_nothing(tmp_path: Path) -> None:
    """Without the collector, requests are answered, and the coordinator ends in time."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with ending(launch_coordinator(tmp_path, *ALONE, env=env)) as process:
        coordinator = as_coordinator(process)
        body = {"prompt": "def f(x):", "max_tokens": 2}
        done = httpx.post(f"{coordinator.url}/v1/completions", json=body, timeout=60)
        assert done.status_code == 200
        assert process.stop(STOP_SECONDS + FLUSH_SECONDS) == 0


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path) -> None:
    """Without opentelemetry the start fails with one line that says what to install."""
    import opentelemetry.sdk

    prefix = without_folder(Path(opentelemetry.sdk.__path__[0]))
    if not prefix:
        pytest.skip("this system cannot hide a folder from a process")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with ending(launch_coordinator(tmp_path, *ALONE, env=env, prefix=prefix)) as process:
        assert process.wait(START_SECONDS) != 0
        assert "pip install 'mtp-cluster[otlp]'" in process.text()
