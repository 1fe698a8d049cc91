"""The operators' endpoints: health, readiness, models, status, metrics, keys and web pages."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.status.cluster_status import ClusterStatus
from coordinator.status.metrics import Metrics, RequestMeter
from coordinator.web.context import ApiOptions
from tests.support.api.api_client import USER, ApiClient, tiny_tokenizer
from tests.support.api.fake_generator import FakeGenerator, FakeStatus

KEY = "key-ü-1"
GUARDED = ["/v1/models", "/v1/models/tiny", "/status", "/metrics"]


async def test_health_is_the_process_and_ready_is_the_plan() -> None:
    """/health answers 200 while the process runs, /ready only while a plan is serving."""
    api = ApiClient(status=FakeStatus(ready=False))
    assert (await api.get("/health")).status_code == 200
    async with api.http() as client:
        assert (await client.head("/health")).status_code == 200
    response = await api.get("/ready")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    api.status.ready = True
    assert (await api.get("/ready")).status_code == 200


async def test_models_lists_the_one_model() -> None:
    """The list and the lookup by id or alias describe the model; another name is OpenAI's 404."""
    api = ApiClient()
    listed = (await api.get("/v1/models")).json()
    described = {
        "id": "tiny",
        "object": "model",
        "created": 7,
        "owned_by": "mtp-cluster",
        "loaded": True,
        "max_model_len": 500,
    }
    assert listed == {"object": "list", "data": [described]}
    assert (await api.get("/v1/models/default_model")).json() == described
    missing = await api.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_unknown_paths_and_methods_have_openais_shape() -> None:
    """An unknown path or method gets an error object, and no generated pages exist."""
    api = ApiClient()
    for path in ("/v1/embeddings", "/docs", "/openapi.json"):
        response = await api.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"
    wrong = await api.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"].endswith("GET is not possible. Use POST.")


async def test_status_is_the_whole_snapshot() -> None:
    """/status has every field of ClusterStatus."""
    api = ApiClient()
    body = (await api.get("/status")).json()
    fields = {*ClusterStatus.__dataclass_fields__, "open_requests", "ended_requests", "events"}
    assert set(body) == fields
    assert body["nodes"][0]["span"] == "0-3"
    assert body["drafted_by_position"] == [100, 80]


async def test_metrics_cover_requests_and_the_cluster() -> None:
    """/metrics has counts by outcome, tokens, times, and the status at the scrape."""
    api = ApiClient(FakeGenerator(tiny_tokenizer(), "one two three", cached=1, window=2))
    await api.complete(prompt=[1, 2, 3], n=2)
    await api.complete(max_tokens=1)
    await api.complete(temperature=-1)
    tokens = len(tiny_tokenizer().encode("one two three"))
    text = (await api.get("/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["mtp_requests_total", "completions", "stop"] == 1
    assert samples["mtp_requests_total", "completions", "length"] == 1
    assert samples["mtp_requests_total", "completions", "refused"] == 1
    assert samples["mtp_open_requests",] == 0
    assert samples["mtp_prompt_tokens_total",] == 3 + len(tiny_tokenizer().encode("Hi"))
    assert samples["mtp_cached_prompt_tokens_total",] == 2
    assert samples["mtp_generated_tokens_total",] == 2 * tokens + 1
    assert samples["mtp_time_to_first_token_seconds_count",] == 3
    assert samples["mtp_inter_token_seconds_count",] == 2 * (-(-tokens // 2) - 1)
    assert samples["mtp_ready",] == 1
    assert samples["mtp_plan_epoch",] == 3
    assert samples["mtp_queue_length",] == 1
    assert samples["mtp_queue_limit",] == 64
    assert samples["mtp_drafts_total", "2"] == 80
    assert samples["mtp_accepted_drafts_total", "2"] == 40
    assert samples["mtp_stage_seconds", "0-3", "mac-1"] == 0.0125
    assert samples["mtp_node_memory_limit_bytes", "mac-1"] == 2**31
    assert ("mtp_node_memory_limit_bytes", "mac-2") not in samples
    api.status.ready = False
    assert "mtp_ready 0.0" in (await api.get("/metrics")).text


def test_times_are_from_arrival_to_first_token_and_between_deliveries() -> None:
    """The meter measures each choice separately; the test supplies the clock."""
    times = iter([0.0, 1.0, 1.5, 3.0, 3.5, 5.0])
    metrics = Metrics(FakeStatus(), clock=lambda: next(times))
    meter = RequestMeter(metrics, "chat")
    for choice, count in ((0, 2), (1, 1), (0, 1), (1, 4)):
        meter.record_tokens(choice, count)
    meter.end("stop")
    text = metrics.render().decode()
    assert "mtp_time_to_first_token_seconds_sum 2.5" in text
    assert "mtp_inter_token_seconds_sum 4.0" in text
    assert "mtp_generated_tokens_total 8.0" in text
    assert "mtp_request_seconds_sum 5.0" in text


@pytest.mark.parametrize(
    "header",
    [None, "Bearer wrong", "Bearer ", "Basic " + KEY, KEY, "Bearer key-ü-12", "Bearer key-ü"],
)
async def test_without_a_valid_key_only_health_answers(header: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """The error is a 401 in OpenAI's format, and no answer or log contains the key."""
    caplog.set_level(logging.DEBUG)
    api = ApiClient(options=ApiOptions(api_keys=("other", KEY)))
    headers = {"authorization": header.encode()} if header else {}
    for path in GUARDED:
        response = await api.get(path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text
    refused = await api.post("/v1/completions", {"prompt": "Hi"}, headers=headers)
    assert refused.status_code == 401
    assert api.generator.requests == []
    for path in ("/health", "/ready"):
        assert (await api.get(path)).status_code == 200
    assert KEY not in caplog.text


async def test_pages_of_other_origins_may_call_only_if_allowed() -> None:
    """CORS is off by default and admits only the listed origins."""
    origin = {"origin": "https://chat.example"}
    assert "access-control-allow-origin" not in (await ApiClient().get("/health", headers=origin)).headers
    api = ApiClient(options=ApiOptions(allowed_origins=("https://chat.example",)))
    allowed = (await api.get("/health", headers=origin)).headers
    assert allowed["access-control-allow-origin"] == "https://chat.example"
    other = (await api.get("/health", headers={"origin": "https://evil.example"})).headers
    assert "access-control-allow-origin" not in other


OWN = "http://test"
FOREIGN = "http://pages.example"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "background": True}),
        ("/api/generate", {"model": "tiny", "prompt": "Hi", "stream": False}),
        ("/v1/responses/resp_1/cancel", {}),
    ],
)
async def test_pages_of_other_sites_do_not_generate(path: str, body: dict[str, Any]) -> None:
    """A request with a foreign Origin, or without a JSON content type, starts nothing where no key is set."""
    api = ApiClient()
    for origin in (FOREIGN, "null", "http://test:81"):
        refused = await api.post(path, body, headers={"Origin": origin})
        assert refused.status_code == 403
        assert "--allowed-origins" in refused.text
    if body:
        text = await api.post(path, body, headers={"Content-Type": "text/plain"})
        assert text.status_code == 400
        assert "application/json" in text.text
        assert await untyped_status(api, path, body, {"Origin": OWN}) == 400, "as a page may send"
    assert not api.generator.requests
    if body:  # as litellm does for Ollama's API, which no browser can
        assert await untyped_status(api, path, body, {}) in (200, 404)
    typed = {"Content-Type": "application/json; charset=utf-8", "Origin": OWN}
    assert (await api.post(path, body, headers=typed)).status_code in (200, 404)
    allowed = ApiClient(options=ApiOptions(allowed_origins=(FOREIGN,)))
    assert (await allowed.post(path, body, headers={"Origin": FOREIGN})).status_code in (200, 404)


async def untyped_status(api: ApiClient, path: str, body: Any, headers: dict[str, str]) -> int:
    """Return the status of a request without a content type."""
    async with api.http() as client:
        client.headers.pop("content-type", None)
        answer = await client.post(path, content=json.dumps(body).encode(), headers=headers)
        return answer.status_code


async def test_a_page_of_another_site_is_refused_with_a_key_too() -> None:
    """A browser may hold a key of the user, and an answer that it hides from the page still takes a connection."""
    api = ApiClient(options=ApiOptions(api_keys=("k",)))
    headers = {"Authorization": "Bearer k", "Origin": FOREIGN}
    body = {"messages": [USER], "max_tokens": 2}
    assert (await api.post("/v1/chat/completions", body, headers=headers)).status_code == 403
    assert (await api.get("/v1/models", headers=headers)).status_code == 403


IMAGE = {"Sec-Fetch-Dest": "image", "Sec-Fetch-Mode": "no-cors"}
FRAME = {"Sec-Fetch-Dest": "iframe", "Sec-Fetch-Mode": "navigate"}
LINK = {"Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}


@pytest.mark.parametrize("path", ["/v1/events", "/v1/responses/resp_1?stream=true", "/status"])
async def test_a_page_of_another_site_opens_no_stream(path: str) -> None:
    """Without keys, its scripts, images and frames are refused. The own page and a link from anywhere are not."""
    api = ApiClient()
    for headers in (
        {"Origin": FOREIGN},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", **IMAGE},
        {"Sec-Fetch-Site": "same-site", **IMAGE},  # another port of this host
        {"Sec-Fetch-Site": "cross-site", **FRAME},
    ):
        refused = await api.get(path, headers=headers)
        assert refused.status_code == 403, headers
        assert "--allowed-origins" in refused.text
    if path == "/v1/events":
        api.app.state.live_feed.close()  # an open stream would not end, and a closed feed is a 429
    own_pages = [{"Sec-Fetch-Site": site} for site in ("same-origin", "none")]
    for headers in ({}, {"Origin": OWN}, {"Sec-Fetch-Site": "cross-site", **LINK}, *own_pages):
        assert (await api.get(path, headers=headers)).status_code != 403, headers
    allowed = ApiClient(options=ApiOptions(allowed_origins=(FOREIGN,)))
    allowed.app.state.live_feed.close()
    headers = {"Origin": FOREIGN, "Sec-Fetch-Site": "cross-site"}
    assert (await allowed.get(path, headers=headers)).status_code != 403
