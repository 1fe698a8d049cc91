"""Stored answers: they continue after a restart, every event arrives once, and each belongs to its key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.request.context import ApiOptions
from coordinator.api.request.reasoning import BUDGETS
from coordinator.api.stored import stored_answer
from coordinator.journal.journal import Journal
from proto.errors import CapacityError
from tests.support.api.api_client import (
    PATIENCE,
    USER,
    ApiClient,
    DisconnectingClient,
    tiny_tokenizer,
)
from tests.support.api.fake_generator import FakeGenerator

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
TEXT = f"I think 🎉.\n</think>\n\nLet me see.\n\n{CALL}"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {k: v for k, v in TOOL.items() if k != "type"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses", {"input": "Hi", "tools": [TOOL]}),
    "chat": ("/v1/chat/completions", {"messages": [USER], "tools": [CHAT_TOOL], "store": True}),
}


class Restarts:
    """Servers that follow each other over one journal file."""

    def __init__(self, folder: Path, text: str = TEXT) -> None:
        self.folder = folder
        self.text = text
        self.generator = FakeGenerator(tiny_tokenizer(), text, window=1)

    async def start(self, **how: Any) -> ApiClient:
        """Start a server and continue the answers of the one before."""
        self.generator = FakeGenerator(tiny_tokenizer(), self.text, window=1, **how)
        file = self.folder / "answers.db"
        api = ApiClient(self.generator, journal=Journal(file), context_length=2000)
        await api.app.state.stored_answers.resume()
        return api

    async def end(self, api: ApiClient) -> None:
        """End a server as SIGTERM does."""
        await api.app.state.stored_answers.suspend()
        await api.journal.close()


def blocks(content: bytes | bytearray | str) -> list[str]:
    """Return the events of a stream, without comments and ids."""
    text = content if isinstance(content, str) else bytes(content).decode()
    lines = [b.split("\n") for b in text.split("\n\n") if b and not b.startswith(":")]
    return ["\n".join(line for line in block if not line.startswith("id: ")) for block in lines]


def last_id(content: bytes | bytearray) -> str:
    """Return the id of the last event."""
    return bytes(content).decode().rsplit("id: ", 1)[1].split("\n")[0]


async def whole_stream(api: ApiClient, path: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the id and the events of an answer."""
    reply = await api.post(path, {**body, "stream": True, "seed": 1})
    assert reply.status_code == 200, reply.text
    return reply.headers["x-request-id"], blocks(reply.text)


def texts(events: list[str]) -> list[Any]:
    """Return what an event says, without the ids and times that each answer has of its own."""
    found: list[Any] = []
    for event in events:
        data = event.partition("data: ")[2]
        if data == "[DONE]":
            found.append(data)
            continue
        content = json.loads(data)
        if "choices" in content:
            delta = content["choices"][0]["delta"]
            for call in delta.get("tool_calls", ()):
                call.pop("id", None)
            found.append((delta, content["choices"][0]["finish_reason"]))
        else:
            found.append((content["type"], content.get("delta"), content["sequence_number"]))
    return found


@pytest.mark.parametrize("case", CASES)
async def test_every_event_arrives_once_whatever_the_place_of_the_restart(
    case: str, tmp_path: Path
) -> None:
    """A stream that is interrupted after any token and continued equals the undisturbed one."""
    path, body = CASES[case]
    restarts = Restarts(tmp_path)
    api = await restarts.start()
    _, expected = await whole_stream(api, path, body)
    await restarts.end(api)
    length = len(tiny_tokenizer().encode(restarts.text))
    for place in range(0, length, 3):
        api = await restarts.start(hang_after=place)
        client = DisconnectingClient(api, path, {**body, "stream": True, "seed": 1})
        async with asyncio.timeout(PATIENCE):
            await restarts.generator.hanging.acquire()
        await client.wait_for(b"data: ")
        await restarts.end(api)
        await client.task
        got = [b for b in blocks(client.received) if '"error"' not in b or "response." in b]
        received = [event for event in got if '"type":"error"' not in event]
        api = await restarts.start()
        if path.endswith("responses"):
            answer_id = json.loads(received[0].partition("data: ")[2])["response"]["id"]
            url = f"{path}/{answer_id}?stream=true&starting_after={len(received) - 1}"
            rest = await api.get(url)
        else:
            rest = await api.post(
                path, {**body, "stream": True}, headers={"Last-Event-ID": last_id(client.received)}
            )
        assert rest.status_code == 200, rest.text
        assert texts(received + blocks(rest.text)) == texts(expected), place
        (request,) = restarts.generator.requests
        assert len(request.emitted) == place, (
            "the restart continues after the tokens in the journal"
        )
        await restarts.end(api)


async def test_a_budget_is_kept_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart after the budget closed the reasoning continues the request that closed it."""
    monkeypatch.setitem(BUDGETS, "low", 4)
    path = "/v1/chat/completions"
    body = {"messages": [USER], "reasoning_effort": "low", "store": True}
    restarts = Restarts(tmp_path, "one two three four five six seven")
    api = await restarts.start()
    _, expected = await whole_stream(api, path, body)
    prompts = [request.prompt for request in restarts.generator.requests]
    assert len(prompts) == 2, "the budget makes a second request"
    await restarts.end(api)
    api = await restarts.start(hang_after=7)
    client = DisconnectingClient(api, path, {**body, "stream": True, "seed": 1})
    await client.wait_for(b'"content":"o')
    await restarts.end(api)
    await client.task
    api = await restarts.start()
    rest = await api.post(path, body, headers={"Last-Event-ID": last_id(client.received)})
    received = [e for e in blocks(client.received) if "choices" in e]
    assert texts(received + blocks(rest.text)) == texts(expected)
    (request,) = restarts.generator.requests
    assert request.prompt == prompts[1]
    assert request.emitted
    await restarts.end(api)


async def finished(api: ApiClient, answer_id: str, **how: Any) -> dict[str, Any]:
    """Wait until a response has ended and return it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found: dict[str, Any] = (await api.get(f"/v1/responses/{answer_id}", **how)).json()
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


async def test_a_response_in_the_background() -> None:
    """It is returned at once, goes on without a client, and is streamed afterwards from any event on."""
    api = ApiClient(FakeGenerator(tiny_tokenizer(), "</think>Hello there", pause=0.01))
    begun = (await api.post("/v1/responses", {"input": "Hi", "background": True})).json()
    assert begun["status"] in ("queued", "in_progress")
    assert begun["background"] is True
    ended = await finished(api, begun["id"])
    assert ended["status"] == "completed"
    assert ended["output"][-1]["content"][0]["text"] == "Hello there"
    url = f"/v1/responses/{begun['id']}?stream=true"
    events = blocks((await api.get(url)).text)
    assert blocks((await api.get(f"{url}&starting_after=4")).text) == events[5:]
    assert json.loads(events[-1].partition("data: ")[2])["response"] == ended
    again = await api.post(f"/v1/responses/{begun['id']}/cancel", {})
    assert again.json() == ended, "an ended response stays as it is"


async def test_cancel_and_delete() -> None:
    """A response in the background is cancelled on the engine; a deleted one is gone."""
    api = ApiClient(FakeGenerator(tiny_tokenizer(), hang_after=2))
    begun = (await api.post("/v1/responses", {"input": "Hi", "background": True})).json()
    stream = asyncio.create_task(api.get(f"/v1/responses/{begun['id']}?stream=true"))
    await asyncio.sleep(0.05)
    reply = await api.post(f"/v1/responses/{begun['id']}/cancel", {})
    assert reply.json()["status"] == "cancelled"
    assert len(api.generator.cancelled) == 1
    assert "event: response.cancelled" in (await stream).text
    assert (await api.get(f"/v1/responses/{begun['id']}")).json()["status"] == "cancelled"
    async with api.http() as client:
        deleted = (await client.delete(f"/v1/responses/{begun['id']}")).json()
    assert deleted["deleted"] is True
    assert (await api.get(f"/v1/responses/{begun['id']}")).status_code == 404


async def test_a_whole_response_cannot_be_cancelled_or_streamed() -> None:
    """The refusals name the reason."""
    api = ApiClient()
    whole = (await api.post("/v1/responses", {"input": "Hi"})).json()
    for reply in (
        await api.post(f"/v1/responses/{whole['id']}/cancel", {}),
        await api.get(f"/v1/responses/{whole['id']}?stream=true"),
        await api.get(f"/v1/responses/{whole['id']}?starting_after=3"),
        await api.get(f"/v1/responses/{whole['id']}?stream=true&starting_after=x"),
        await api.post(
            "/v1/chat/completions", {"messages": [USER]}, headers={"Last-Event-ID": "x"}
        ),
        await api.chat(store=True, stream=True, n=2),
    ):
        assert reply.status_code == 400, reply.text


async def test_answers_belong_to_their_key() -> None:
    """With another key, a stored answer is not found in any way; nothing of it is changed."""
    api = ApiClient(options=ApiOptions(api_keys=("mine", "other")))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))
    begun = (
        await api.post("/v1/responses", {"input": "Hi", "background": True}, headers=mine)
    ).json()
    ended = await finished(api, begun["id"], headers=mine)
    path = f"/v1/responses/{begun['id']}"
    chat = (await api.chat(store=True)).status_code
    assert chat == 401
    reply = await api.post(
        "/v1/chat/completions", {"messages": [USER], "store": True, "stream": True}, headers=mine
    )
    chat_path = f"/v1/chat/completions/{reply.headers['x-request-id']}"
    async with api.http() as client:
        for refused in (
            await client.get(path, headers=other),
            await client.get(f"{path}?stream=true", headers=other),
            await client.get(f"{path}/input_items", headers=other),
            await client.post(f"{path}/cancel", headers=other),
            await client.delete(path, headers=other),
            await client.get(chat_path, headers=other),
            await client.delete(chat_path, headers=other),
            await client.get(chat_path, headers={**other, "Last-Event-ID": f"{chat_path[21:]}:1"}),
            await client.post(
                "/v1/responses",
                json={"input": "Hi", "previous_response_id": begun["id"]},
                headers=other,
            ),
        ):
            assert refused.status_code == 404, refused.text
        assert (await client.get(chat_path, headers=mine)).status_code == 200
    assert (await api.get(path, headers=mine)).json() == ended


async def test_a_client_that_does_not_return_ends_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stored stream goes on for a while after its client left, and is then cancelled."""
    monkeypatch.setattr(stored_answer, "RECONNECT_SECONDS", 0.0)
    api = ApiClient(FakeGenerator(tiny_tokenizer(), hang_after=3))
    path, body = CASES["chat"]
    client = DisconnectingClient(api, path, {**body, "stream": True})
    await client.wait_for(b"wor")
    await client.disconnect()
    answer_id = last_id(client.received).partition(":")[0]
    async with asyncio.timeout(PATIENCE):
        while True:
            if "error" in (await api.get(f"/v1/chat/completions/{answer_id}")).json():
                break
            await asyncio.sleep(0.01)
    reply = await api.get(f"/v1/chat/completions/{answer_id}?stream=true")
    assert "the answer was cancelled" in reply.text
    assert len(api.generator.cancelled) == 1


async def test_only_stored_answers_reach_the_disk(tmp_path: Path) -> None:
    """Requests that are not stored leave nothing, and `store` of a chat keeps it until it is deleted."""
    restarts = Restarts(tmp_path)
    api = await restarts.start()
    await api.chat(messages=[{"role": "user", "content": "secret"}])
    await api.stream(messages=[{"role": "user", "content": "secret"}])
    await api.post("/v1/responses", {"input": "secret", "store": False})
    await api.post("/v1/responses", {"input": "secret", "store": False, "stream": True})
    assert await api.journal._ask(lambda database: database.count()) == 0
    kept = (await api.chat(store=True)).json()
    assert (await api.get(f"/v1/chat/completions/{kept['id']}")).json() == kept
    await restarts.end(api)
    api = await restarts.start()
    assert (await api.get(f"/v1/chat/completions/{kept['id']}")).json() == kept
    await restarts.end(api)


async def test_another_model_ends_the_answers_of_the_first(tmp_path: Path) -> None:
    """An answer in progress cannot continue with another checkpoint; its client reads why."""
    restarts = Restarts(tmp_path)
    api = await restarts.start(hang_after=2)
    begun = (await api.post("/v1/responses", {"input": "Hi", "background": True})).json()
    await restarts.end(api)
    api = ApiClient(restarts.generator, journal=Journal(tmp_path / "answers.db"), fingerprint="g")
    await api.app.state.stored_answers.resume()
    found = (await api.get(f"/v1/responses/{begun['id']}")).json()
    assert found["status"] == "failed"
    assert "another model" in found["error"]["message"]
    await restarts.end(api)


async def test_a_full_queue_delays_a_restored_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored answer waits for room in the queue instead of failing."""
    restarts = Restarts(tmp_path)
    api = await restarts.start(hang_after=2)
    begun = (await api.post("/v1/responses", {"input": "Hi", "background": True})).json()
    await restarts.end(api)
    api = await restarts.start(refuse=CapacityError("full", retry_after=0.01))
    await asyncio.sleep(0.05)
    assert (await api.get(f"/v1/responses/{begun['id']}")).json()["status"] == "queued"
    restarts.generator.refuse = None
    assert (await finished(api, begun["id"]))["status"] == "completed"
    await restarts.end(api)


async def test_input_items_are_listed_in_pages() -> None:
    """`limit`, `order` and `after` choose the items."""
    api = ApiClient()
    items = [{"role": "user", "content": f"part {number}"} for number in range(5)]
    reply = (await api.post("/v1/responses", {"input": items})).json()
    path = f"/v1/responses/{reply['id']}/input_items?order=asc&limit=2"
    first = (await api.get(path)).json()
    assert [item["content"] for item in first["data"]] == ["part 0", "part 1"]
    assert first["has_more"] is True
    last = (await api.get(f"{path}&after={first['last_id']}")).json()
    assert [item["content"] for item in last["data"]] == ["part 2", "part 3"]
