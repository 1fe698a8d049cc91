"""How an answer is sent: signs of life, errors before and amid it, clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.api.context import ApiOptions
from coordinator.generation.request import Finished
from proto.errors import (
    CapacityError,
    MemoryLimitError,
    NotReadyError,
    RequestError,
    WorkerLostError,
)
from tests.support.api.api_client import (
    PATIENCE,
    USER,
    ApiClient,
    Events,
    LeavingClient,
    tiny_tokenizer,
)
from tests.support.api.fake_generator import FakeGenerator

SECRET = "/srv/models/secret"  # stands for any path of the server


def api(*, keep_alive: float = 10.0, **generator: Any) -> ApiClient:
    options = ApiOptions(keep_alive_seconds=keep_alive)
    return ApiClient(FakeGenerator(tiny_tokenizer(), **generator), options=options)


async def tasks_end() -> None:
    """Wait until nothing but this test runs."""
    async with asyncio.timeout(PATIENCE):
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)


REFUSALS = [
    (CapacityError("the queue is full", retry_after=2.5), 429, "3"),
    (NotReadyError("no plan is serving"), 503, "5"),
    (RequestError("too long", param="prompt"), 400, None),
    (WorkerLostError(f"{SECRET} lost", public="a worker was lost"), 503, None),
    (MemoryLimitError("no plan fits"), 507, None),
    (ValueError(SECRET), 500, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refusal", "status", "retry"), REFUSALS)
async def test_a_refusal_has_its_status_streamed_or_not(
    refusal: Exception, status: int, retry: str | None, stream: bool
) -> None:
    """An error before the first event is no 200; Retry-After where waiting helps; never a path."""
    client = api(refuse=refusal)
    response = await client.chat(stream=stream)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert SECRET not in response.text
    assert response.json()["error"]["message"]
    if isinstance(refusal, RequestError):
        assert response.json()["error"]["param"] == "messages"
    await tasks_end()


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (WorkerLostError(SECRET, public="a worker was lost"), "a worker was lost"),
        (ValueError(SECRET), "the server made an error"),
    ],
)
async def test_an_error_amid_a_stream_is_an_event_and_the_end(
    failure: Exception, says: str
) -> None:
    """Text so far, one error event, no [DONE], no silent cut, never a path."""
    client = api(failure=failure, fail_after=2)
    events = await client.stream("/v1/completions")
    assert says in events.data[-1]["error"]["message"]
    assert SECRET not in str(events.data)
    assert [chunk for chunk in events.data[:-1] if "error" in chunk] == []
    assert len(events.data) == 3
    assert not events.done
    await tasks_end()


async def test_an_error_amid_a_whole_answer_is_its_status() -> None:
    """Nothing of the answer is sent."""
    response = await api(failure=WorkerLostError("lost"), fail_after=2).chat()
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("reason", ["error", "cancelled"])
async def test_an_engine_that_gives_up_is_an_error(reason: Any) -> None:
    """Finished with another reason than stop or length never looks like an answer."""
    assert (await api(end=reason).chat()).status_code == 503
    events = await api(end=reason).stream()
    expected = "the last worker is gone" if reason == "error" else "cancelled"
    assert expected in events.data[-1]["error"]["message"]
    assert not events.done


async def test_an_engine_that_just_stops_is_an_error() -> None:
    """A generator that ends without Finished must not leave its client waiting for ever."""

    class Mute(FakeGenerator):
        async def generate(self, request: Any) -> Any:
            async for event in super().generate(request):
                if isinstance(event, Finished):
                    return
                yield event

    client = ApiClient(Mute(tiny_tokenizer()))
    async with asyncio.timeout(PATIENCE):
        assert (await client.chat()).status_code == 500
        assert "error" in (await client.stream()).data[-1]


async def test_one_failing_choice_ends_the_answer_and_the_others() -> None:
    """An answer is whole or an error; nothing of it runs on."""

    def answer(request: Any) -> str:
        if request.params.seed == 1:
            raise WorkerLostError("lost")
        return "word " * 1000

    client = api(answer=answer)
    response = await client.chat(n=3, seed=0, max_tokens=400)
    assert response.status_code == 503
    await tasks_end()
    assert len(client.generator.cancelled) == 3


async def test_an_error_of_a_choice_that_is_done_is_nobodys() -> None:
    """A request that fails while it is cancelled, its text being complete, spoils no other choice."""

    class Sore(FakeGenerator):
        async def generate(self, request: Any) -> Any:
            try:
                async for event in super().generate(request):
                    yield event
            finally:
                if request.params.seed == 0:
                    raise WorkerLostError("lost while it was cancelled")

    def by_seed(request: Any) -> str:
        return "</think>ab STOP" + " cd" * 100 if request.params.seed == 0 else "</think>fine " * 9

    client = ApiClient(Sore(tiny_tokenizer(), answer=by_seed, window=1))
    answer = (await client.chat(n=2, seed=0, stop="STOP")).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    await tasks_end()


async def test_silence_is_filled_with_keep_alives() -> None:
    """While nothing comes the client hears a comment every so often, also amid an answer."""
    served = api(keep_alive=0.02, hang_after=1)
    client = LeavingClient(served, "/v1/completions", {"prompt": "Hi", "stream": True})
    # Nothing more will come: before, a slow machine is silent too.
    async with asyncio.timeout(PATIENCE):
        await served.generator.hanging.acquire()
    await client.hear(b"data: {")
    start = len(client.heard)
    await client.hear(b": keep-alive\n\n: keep-alive\n\n", start)
    assert client.status == 200
    assert b"data: {" not in client.heard[start:]
    await client.leave()


async def test_a_long_queue_is_filled_with_keep_alives_too() -> None:
    """No event yet, no refusal: the stream opens, and a refusal that comes later is an event."""

    heard = asyncio.Event()

    class Slow(FakeGenerator):
        async def generate(self, request: Any) -> Any:
            await heard.wait()
            raise CapacityError("waited in vain")
            yield

    served = ApiClient(Slow(tiny_tokenizer()), options=ApiOptions(keep_alive_seconds=0.02))
    client = LeavingClient(served, "/v1/chat/completions", {"messages": [USER], "stream": True})
    await client.hear(b": keep-alive")
    heard.set()
    async with asyncio.timeout(PATIENCE):
        await client.task
    assert client.status == 200
    events = Events.read(200, client.heard.decode())
    assert events.data[-1]["error"]["code"] == "server_full"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 2])
async def test_a_client_that_leaves_cancels_its_requests(stream: bool, hang_after: int) -> None:
    """In prefill or amid the text, streamed or not, every choice's request is cancelled soon."""
    served = api(hang_after=hang_after)
    body = {"messages": [USER], "stream": stream, "n": 2}
    client = LeavingClient(served, "/v1/chat/completions", body)
    async with asyncio.timeout(PATIENCE):
        await served.generator.hanging.acquire()
        await served.generator.hanging.acquire()
    if stream:
        await client.hear(b"data: {")
    await client.leave()
    await tasks_end()
    assert len(served.generator.cancelled) == 2
    assert b'mtp_requests_total{endpoint="chat",outcome="cancelled"} 1.0' in (
        served.app.state.api.metrics.render()
    )
    assert b"mtp_open_requests 0.0" in served.app.state.api.metrics.render()


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    """Sending may wait; the engine does not, and nothing is lost."""
    served = api(text="word " * 50, window=5)
    body = {"prompt": "Hi", "stream": True}
    client = LeavingClient(served, "/v1/completions", body, seconds_to_read=0.002)
    await client.hear(b"data: [DONE]")
    entries = [chunk["choices"][0] for chunk in Events.read(200, client.heard.decode()).data]
    assert "".join(entry["text"] for entry in entries) == "word " * 50
    assert served.generator.cancelled == []


async def test_a_body_that_never_ends_is_a_408() -> None:
    """Every wait has a deadline, the one for the client too."""
    served = ApiClient(options=ApiOptions(body_seconds=0.05))

    async def endless() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    async with served.http() as http:
        response = await http.post("/v1/completions", content=endless())
    assert response.status_code == 408
