"""Delivery of answers: signs of life, errors before and during an answer, clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from coordinator.answers import delivery
from coordinator.schedule.request import GenerationRequest
from coordinator.web.context import ApiOptions, describe_client
from proto import errors
from tests.support.api.api_client import (
    PATIENCE,
    REQUESTS,
    USER,
    ApiClient,
    DisconnectingClient,
    post_scope,
    tiny_tokenizer,
)
from tests.support.api.fake_generator import FakeGenerator

SECRET = "/srv/models/secret"  # stands for any path of the server


def api(*, keep_alive: float = 10.0, **generator: Any) -> ApiClient:
    options = ApiOptions(keep_alive_seconds=keep_alive)
    return ApiClient(FakeGenerator(tiny_tokenizer(), **generator), options=options)


async def tasks_end() -> None:
    """Wait until this test is the only task."""
    async with asyncio.timeout(PATIENCE):
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)


REFUSALS = [
    (errors.CapacityError("the queue is full", retry_after=2.5), 429, "3"),
    (errors.NotReadyError("no plan is serving"), 503, "5"),
    (errors.RequestError("too long", param="prompt"), 400, None),
    (errors.WorkerLostError(f"{SECRET} lost", public="a worker was lost"), 503, None),
    (errors.MemoryLimitError("no plan fits"), 507, None),
    (ValueError(SECRET), 500, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refusal", "status", "retry"), REFUSALS)
async def test_a_refusal_has_its_status_streamed_or_not(
    refusal: Exception, status: int, retry: str | None, stream: bool
) -> None:
    """An error before the first event has its own status, `Retry-After` if waiting helps, and no path."""
    client = api(refuse=refusal)
    response = await client.chat(stream=stream)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert SECRET not in response.text
    assert response.json()["error"]["message"]
    if isinstance(refusal, errors.RequestError):
        assert response.json()["error"]["param"] == "messages"
    assert b"mtp_open_requests 0.0" in client.app.state.api.metrics.render()
    await tasks_end()


async def test_an_error_during_a_stream_is_its_last_event() -> None:
    """The stream has the text so far and one error event without a path, and no [DONE]."""
    failure = errors.WorkerLostError(SECRET, public="a worker was lost")
    client = api(failure=failure, fail_after=2)
    events = await client.stream("/v1/completions")
    assert "a worker was lost" in events.data[-1]["error"]["message"]
    assert SECRET not in str(events.data)
    assert [chunk for chunk in events.data[:-1] if "error" in chunk] == []
    assert len(events.data) == 2 * client.generator.window + 1
    assert not events.done
    await tasks_end()


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
async def test_each_token_has_a_chunk_of_its_own_for_any_window(endpoint: str) -> None:
    """The chunks of a stream, reasoning included, are the same for windows of 1, 3 and 50 tokens."""
    streams = []
    for window in (1, 3, 50):
        client = api(text="I think\nso.</think>Hello 🎉 there, world", window=window)
        data = (await client.stream(f"/v1/{endpoint}", seed=1)).data
        streams.append([chunk["choices"] for chunk in data])
    assert streams[0] == streams[1] == streams[2]
    assert len(streams[0]) > 12


async def test_the_chunks_of_a_window_are_sent_in_one_write() -> None:
    """One chunk per token costs no write per token."""
    served = api(text="one two three four five six", window=6)
    client = DisconnectingClient(served, "/v1/completions", {"prompt": "Hi", "stream": True})
    async with asyncio.timeout(PATIENCE):
        await client.task
    tokens = len(tiny_tokenizer().encode(served.generator.text))
    writes = [content for content in client.writes if b'"text"' in content]
    assert sum(content.count(b"data: {") for content in writes) == tokens + 1
    assert len(writes) <= -(-tokens // 6) + 1


async def test_an_error_during_a_whole_answer_is_its_status() -> None:
    """The response has no part of the answer."""
    response = await api(failure=errors.WorkerLostError("lost"), fail_after=2).chat()
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("reason", ["error", "cancelled"])
async def test_an_engine_that_gives_up_is_an_error(reason: Any) -> None:
    """An answer that the engine ends for another reason than stop or length is an error."""
    assert (await api(end=reason).chat()).status_code == 503
    events = await api(end=reason).stream()
    expected = "the last worker is gone" if reason == "error" else "cancelled"
    assert expected in events.data[-1]["error"]["message"]
    assert not events.done


async def test_one_failing_choice_ends_the_answer_and_the_others() -> None:
    """An error in one choice ends the answer and cancels the other choices."""

    def answer(request: Any) -> str:
        if request.params.seed == 1:
            raise errors.WorkerLostError("lost")
        return "word " * 1000

    client = api(answer=answer)
    response = await client.chat(n=3, seed=0, max_tokens=400)
    assert response.status_code == 503
    await tasks_end()
    assert len(client.generator.cancelled) == 3


async def test_silence_is_filled_with_keep_alives() -> None:
    """While the engine sends nothing the client gets a comment at regular intervals, also during an answer."""
    served = api(keep_alive=0.02, hang_after=1)
    client = DisconnectingClient(served, "/v1/completions", {"prompt": "Hi", "stream": True})
    # The generator now sends nothing more. Before, a slow machine may be silent too.
    async with asyncio.timeout(PATIENCE):
        await served.generator.hanging.acquire()
    await client.wait_for(b"data: {")
    start = len(client.received)
    await client.wait_for(b": keep-alive\n\n: keep-alive\n\n", start)
    assert client.status == 200
    assert b"data: {" not in client.received[start:]
    await client.disconnect()


LINE = b'"content":""},"done":false}\n'
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
COMMENTS = (b": queued 3\n\n", b": prefill ", b": keep-alive\n\n")
WAITING = (b"event: response.queued\n", *[b"event: response.in_progress\n"] * 2)
SIGNS: list[tuple[str, Any, Any]] = [
    ("/v1/completions", {}, COMMENTS),
    (CHAT, {}, COMMENTS),
    (MESSAGES, {}, [b"event: ping\n"] * 3),
    (RESPONSES, {}, WAITING),
    (RESPONSES, {"store": False}, WAITING),
    (OLLAMA, {}, [LINE] * 3),
    ("/api/generate", {}, [b'"response":"","done":false}\n'] * 3),
]


@pytest.mark.parametrize("stage", ["queue", "prefill", "pause"])
@pytest.mark.parametrize(("path", "fields", "signs"), SIGNS)
async def test_every_stage_has_signs_of_life_that_clients_count(path: str, fields: Any, signs: Any, stage: str) -> None:
    """In the queue, in a prefill with progress and in a pause of the text, in the form of the dialect."""
    hows: dict[str, dict[str, Any]] = {
        "queue": {"position": 3, "hang_after": 0},
        "prefill": {"prefill_steps": 2000, "prefill_pause": 0.005},
        "pause": {"hang_after": 1},
    }
    served = api(keep_alive=0.02, **hows[stage])
    client = DisconnectingClient(served, path, {**REQUESTS[path], "stream": True, **fields})
    word = signs[[*hows].index(stage)]
    for _ in range(3):
        await client.wait_for(word, len(client.received))
    assert client.status == 200
    await client.disconnect()


@pytest.mark.parametrize("store", [False, True])
async def test_signs_of_life_leave_the_numbers_of_events(store: bool) -> None:
    """A response that waited has the same numbered events as one that did not. A sign repeats the newest number."""
    streams = []
    for pause in (0.0, 0.05):
        served = api(keep_alive=0.01, text="</think>one two", window=3, pause=pause)
        reply = await served.post(RESPONSES, {"input": "Hi", "stream": True, "seed": 1, "store": store})
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(numbers)
        signs = [place for place in range(1, len(events)) if numbers[place] == numbers[place - 1]]
        assert {events[place]["type"] for place in signs} <= {"response.in_progress"}
        assert len(signs) >= (2 if pause else 0)
        own = [event for place, event in enumerate(events) if place not in signs]
        streams.append([(event["type"], event["sequence_number"], event.get("delta")) for event in own])
        assert [number for _, number, _ in streams[-1]] == list(range(len(streams[-1])))
        if store:
            again = await served.get(f"{RESPONSES}/{events[0]['response']['id']}?stream=true")
            assert again.text.count("data: ") == len(streams[-1])
    assert streams[0] == streams[1]


@pytest.mark.parametrize("path", [MESSAGES, OLLAMA, CHAT])
async def test_tokens_that_show_nothing_are_no_silence(path: str) -> None:
    """While a call is read that is sent when it is whole, the client gets signs of life."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "' + "word " * 60 + '"}}\n</tool_call>'
    served = api(keep_alive=0.02, text=f"</think>{call}", window=1, pause=0.005)
    function = {"name": "f", "parameters": {"type": "object"}}
    tool = {"name": "f", "input_schema": {}} if path == MESSAGES else {"type": "function", "function": function}
    body = {"model": "tiny", "messages": [USER], "tools": [tool], "stream": True, "max_tokens": 300}
    reply = await served.post(path, body)
    sign = {MESSAGES: "event: ping", OLLAMA: LINE.decode(), CHAT: ": keep-alive"}[path]
    assert reply.text.count(sign) >= 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 2])
async def test_a_client_that_disconnects_cancels_its_requests(stream: bool, hang_after: int) -> None:
    """Every choice's request is cancelled, during prefill and during the text, streamed and not."""
    served = api(hang_after=hang_after)
    body = {"messages": [USER], "stream": stream, "n": 2}
    client = DisconnectingClient(served, "/v1/chat/completions", body)
    async with asyncio.timeout(PATIENCE):
        await served.generator.hanging.acquire()
        await served.generator.hanging.acquire()
    if stream:
        await client.wait_for(b"data: {")
    await client.disconnect()
    await tasks_end()
    assert len(served.generator.cancelled) == 2
    assert b'mtp_requests_total{endpoint="chat",outcome="cancelled"} 1.0' in (served.app.state.api.metrics.render())
    assert b"mtp_open_requests 0.0" in served.app.state.api.metrics.render()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_stopped_request_ends_with_an_error_and_frees_its_place(path: str, stream: bool) -> None:
    """Its client gets a status or an event that says so, at once and also in the queue."""
    served = api(hang_after=2)
    client = DisconnectingClient(served, path, {**REQUESTS[path], "stream": stream})
    async with asyncio.timeout(PATIENCE):
        await served.generator.hanging.acquire()
    stored = path == RESPONSES and stream
    if stored:
        await client.wait_for(b"response.created")
    log = served.app.state.api.metrics.request_log
    (record,) = log.open_requests()
    reply = await served.post(f"/v1/cluster/requests/{record.id}/stop", {})
    assert reply.json() == {"id": record.id}
    async with asyncio.timeout(PATIENCE):
        await client.task
    await tasks_end()
    assert client.status == (200 if stream else 410)
    assert (b"response.cancelled" if stored else b"stopped on the page") in client.received
    assert len(served.generator.cancelled) == 1
    assert (record.outcome, record.prompt_done) == ("cancelled", record.prompt_tokens)
    assert not log.stops
    again = await served.post(f"/v1/cluster/requests/{record.id}/stop", {})
    assert again.status_code == 404


@pytest.mark.parametrize(
    ("agent", "shown"),
    [
        ("claude-cli/2.0.31 (external, cli)", "claude-cli, 192.0.2.1"),
        ("OpenAI/Python 1.99.1", "OpenAI/Python, 192.0.2.1"),
        ("Mozilla/5.0 (Macintosh) Safari/605.1", "browser, 192.0.2.1"),
        ("<script>/1", "192.0.2.1"),
        ("x" * 400, f"{'x' * 40}, 192.0.2.1"),
        ("", "192.0.2.1"),
    ],
)
def test_the_client_of_a_request_is_named_for_people(agent: str, shown: str) -> None:
    """The program has no version, and its name is short. An address of this machine is left out."""
    scope = post_scope(b"/v1/chat/completions") | {"headers": [(b"user-agent", agent.encode())], "state": {}}
    assert describe_client(Request({**scope, "client": ("192.0.2.1", 5)})) == shown
    assert describe_client(Request({**scope, "client": ("127.0.0.1", 5)})) == shown.rpartition("192.0.2.1")[0].rstrip(
        ", "
    )


async def test_a_body_that_never_ends_is_a_408() -> None:
    """The wait for a client's body has a deadline."""
    served = ApiClient(options=ApiOptions(body_seconds=0.05))

    async def endless() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    async with served.http() as http:
        response = await http.post("/v1/completions", content=endless())
    assert response.status_code == 408


async def test_an_answer_that_nobody_reads_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events beyond the backlog are not kept: the request is cancelled, and its last event is an error."""
    monkeypatch.setattr(delivery, "BACKLOG", 10)
    monkeypatch.setattr(delivery, "BACKLOG_OF_REQUEST", 5)
    generator = FakeGenerator(tiny_tokenizer(), text="word " * 500, window=1)
    requests = [GenerationRequest((5,), 400, request_id=str(index)) for index in range(2)]
    unread = delivery.SubmittedRequests(generator, requests)
    await tasks_end()
    assert sorted(generator.cancelled) == ["0", "1"]
    for _ in range(20):  # 10 + 2 x 5
        assert await unread.next_event(PATIENCE)
    with pytest.raises(errors.ClusterError, match="did not read"):
        await unread.next_event(PATIENCE)


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_tells_cached_tokens_from_others(stream: bool) -> None:
    """Anthropic's counts add up to the prompt. OpenAI's total includes the cached tokens."""
    client = api(cached=4)
    reply = await client.post(MESSAGES, {"messages": [USER], "max_tokens": 50, "stream": stream})
    prompt = len(client.generator.requests[0].prompt)
    assert prompt > 2 * 4
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    found = [e.get("message", e)["usage"] for e in events if "usage" in e.get("message", e)] or [reply.json()["usage"]]
    assert len(found) == (2 if stream else 1)
    for usage in found:
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 4, 4)
        assert usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("path", [OLLAMA, "/api/generate"])
async def test_ollamas_durations_are_of_the_prompt_and_of_the_answer(path: str) -> None:
    """A slow prompt with a fast answer, and the reverse. Both durations are at most the total."""
    slow_prompt = {"prefill_steps": 20, "prefill_pause": 0.01}
    for how, longer in ((slow_prompt, "prompt_eval_duration"), ({"pause": 0.02, "window": 1}, "eval_duration")):
        client = api(text="</think>one two three four", **how)
        end = (await client.post(path, REQUESTS[path])).json()
        durations = {name: end[name] for name in ("prompt_eval_duration", "eval_duration")}
        assert max(durations, key=lambda name: durations[name]) == longer
        assert 0 < sum(durations.values()) <= end["total_duration"]


CUT_CALL = "</think>So.<tool_call>\n<function=f>\n<parameter=a>\nword word word word"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [("so so so so so", ["reasoning"]), ("so</think>word word word word", ["reasoning", "message"]),
     (CUT_CALL, ["message", "function_call"])],
)  # fmt: skip
async def test_an_item_that_the_limit_cuts_off_is_incomplete(text: str, kinds: list[str]) -> None:
    """Whole, streamed and stored. The items before it are complete."""
    limit = len(tiny_tokenizer().encode(text)) - 1
    tool = {"type": "function", "name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    body = {"input": "Hi", "tools": [tool], "max_output_tokens": limit}
    client = api(text=text)
    whole = (await client.post(RESPONSES, body)).json()
    reply = await client.post(RESPONSES, {**body, "stream": True})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    stored = (await client.get(f"{RESPONSES}/{events[0]['response']['id']}")).json()
    expected = ["completed"] * (len(kinds) - 1) + ["incomplete"]
    for items in (whole["output"], events[-1]["response"]["output"], done, stored["output"]):
        found = [item for item in items if item["type"] in kinds]
        assert items[-1] is found[-1]
        assert [item["type"] for item in found] == kinds
        assert [item["status"] for item in found] == expected
    ends = (whole["status"], events[-1]["type"], stored["status"])
    assert ends == ("incomplete", "response.incomplete", "incomplete")
