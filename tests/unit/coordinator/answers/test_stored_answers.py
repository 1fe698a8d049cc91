"""Stored answers: they continue after a restart, every event arrives once, and each belongs to its key."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.answers import stored_answers
from coordinator.answers.journal import Journal
from coordinator.prompts.request_settings import BUDGETS
from coordinator.trust.keys import KeyRing, Scope
from coordinator.web.context import ApiOptions
from tests.support.api.api_client import PATIENCE, USER, ApiClient, DisconnectingClient, tiny_tokenizer
from tests.support.api.fake_generator import FakeGenerator

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
TEXT = f"I think 🎉.\n</think>\n\nLet me see.\n\n{CALL}"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "Hi", "tools": [TOOL]}


class Restarts:
    """Servers that follow each other over one journal file."""

    def __init__(self, folder: Path, text: str = TEXT) -> None:
        self.folder = folder
        self.text = text
        self.generator = FakeGenerator(tiny_tokenizer(), text, window=1)

    async def start(self, **how: Any) -> ApiClient:
        """Start a server and continue the answers of the one before."""
        self.generator = FakeGenerator(tiny_tokenizer(), self.text, window=1, **how)
        api = self._serve()
        await api.app.state.stored_answers.resume()
        return api

    def open(self, **how: Any) -> ApiClient:
        """Return a server that has restored no answer yet."""
        self.generator = FakeGenerator(tiny_tokenizer(), self.text, window=1)
        return self._serve(**how)

    def _serve(self, **how: Any) -> ApiClient:
        file = self.folder / "answers.db"
        return ApiClient(self.generator, journal=Journal(file), context_length=2000, **how)

    async def end(self, api: ApiClient) -> None:
        """End a server as SIGTERM does."""
        await api.app.state.stored_answers.suspend()
        await api.journal.close()


def blocks(content: bytes | bytearray | str) -> list[str]:
    """Return the events of a stream, without comments."""
    text = content if isinstance(content, str) else bytes(content).decode()
    return [block for block in text.split("\n\n") if block and not block.startswith(":")]


async def whole_stream(api: ApiClient, body: dict[str, Any]) -> list[str]:
    """Return the events of an answer."""
    reply = await api.post(PATH, {**body, "stream": True, "seed": 1})
    assert reply.status_code == 200, reply.text
    return blocks(reply.text)


def texts(events: list[str]) -> list[Any]:
    """Return what an event says, without the ids and times that each answer has of its own."""
    contents = [json.loads(event.partition("data: ")[2]) for event in events]
    return [(each["type"], each.get("delta"), each["sequence_number"]) for each in contents]


async def rest_of(api: ApiClient, received: list[str]) -> list[str]:
    """Return the events after those that a client has received."""
    answer_id = json.loads(received[0].partition("data: ")[2])["response"]["id"]
    rest = await api.get(f"{PATH}/{answer_id}?stream=true&starting_after={len(received) - 1}")
    assert rest.status_code == 200, rest.text
    return blocks(rest.text)


def numbered(client: DisconnectingClient) -> list[str]:
    """Return the events of a client, without the error that says that the server ends."""
    return [event for event in blocks(client.received) if '"type":"error"' not in event]


LIMITED = {"input": "Hi", "reasoning": {"effort": "low"}}
LONG = "one two three four five six seven\n</think>\n\nThe answer"


async def interrupted(restarts: Restarts, place: int, body: dict[str, Any]) -> list[str]:
    """Run an answer up to token `place`, end the server, and return the events that the client received."""
    api = await restarts.start(hang_after=place)
    client = DisconnectingClient(api, PATH, {**body, "stream": True, "seed": 1})
    async with asyncio.timeout(PATIENCE):
        await restarts.generator.hanging.acquire()
    await client.wait_for(b"data: ")
    await restarts.end(api)
    await client.task
    return numbered(client)


async def test_every_event_arrives_once_whatever_the_place_of_the_restart(tmp_path: Path) -> None:
    """A stream that is interrupted after any token and continued equals the undisturbed one."""
    restarts = Restarts(tmp_path)
    api = await restarts.start()
    expected = await whole_stream(api, BODY)
    await restarts.end(api)
    length = len(tiny_tokenizer().encode(restarts.text))
    for place in range(0, length, 3):
        received = await interrupted(restarts, place, BODY)
        api = await restarts.start()
        assert texts(received + await rest_of(api, received)) == texts(expected), place
        (request,) = restarts.generator.requests
        assert len(request.emitted) == place, "the restart continues after the tokens in the journal"
        await restarts.end(api)


async def test_a_budget_is_kept_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart before, inside and after the closing of the reasoning continues the same request."""
    monkeypatch.setitem(BUDGETS, "low", 4)
    restarts = Restarts(tmp_path, LONG)
    api = await restarts.start()
    expected = await whole_stream(api, LIMITED)
    (request,) = restarts.generator.requests
    await restarts.end(api)
    for place in range(8):
        received = await interrupted(restarts, place, LIMITED)
        api = await restarts.start()
        assert texts(received + await rest_of(api, received)) == texts(expected), place
        (restored,) = restarts.generator.requests
        assert (restored.params, len(restored.emitted)) == (request.params, place)
        await restarts.end(api)


@pytest.mark.parametrize(("place", "goes_on"), [(3, True), (4, False), (7, False)])
async def test_an_answer_of_an_earlier_release_with_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, goes_on: bool
) -> None:
    """Its record has no limit. Before the budget it gets one; later it ends with the reason."""
    restarts = Restarts(tmp_path, LONG)
    monkeypatch.setitem(BUDGETS, "low", 4 if goes_on else 100)  # the text of those tokens has no end mark
    received = await interrupted(restarts, place, LIMITED)
    answer_id = json.loads(received[0].partition("data: ")[2])["response"]["id"]
    monkeypatch.setitem(BUDGETS, "low", 4)
    journal = Journal(tmp_path / "answers.db")
    (record,) = await journal.unfinished()
    params = {n: value for n, value in record.request["params"].items() if not n.startswith("reasoning")}
    journal.save_answer(replace(record, request={**record.request, "params": params}))
    await journal.close()
    api = await restarts.start()
    found = await finished(api, answer_id)
    if goes_on:
        assert restarts.generator.requests[0].params.reasoning_budget == 4
        assert found["output"][-1]["content"][0]["text"] == "The answer"
    else:
        assert not restarts.generator.requests
        assert "limited its reasoning" in found["error"]["message"]
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


@pytest.mark.parametrize("stopped", [False, True])
async def test_cancel_and_delete(stopped: bool) -> None:
    """A response in the background is cancelled on the engine; a deleted one is gone."""
    api = ApiClient(FakeGenerator(tiny_tokenizer(), hang_after=2))
    begun = (await api.post("/v1/responses", {"input": "Hi", "background": True})).json()
    stream = asyncio.create_task(api.get(f"/v1/responses/{begun['id']}?stream=true"))
    await asyncio.sleep(0.05)
    if stopped:  # on the page
        assert (await api.post(f"/v1/cluster/requests/{begun['id']}/stop", {})).status_code == 200
    else:
        reply = await api.post(f"/v1/responses/{begun['id']}/cancel", {})
        assert reply.json()["status"] == "cancelled"
    assert "event: response.cancelled" in (await stream).text
    assert len(api.generator.cancelled) == 1
    assert (await api.get(f"/v1/responses/{begun['id']}")).json()["status"] == "cancelled"
    async with api.http() as client:
        deleted = (await client.delete(f"/v1/responses/{begun['id']}")).json()
    assert deleted["deleted"] is True
    assert (await api.get(f"/v1/responses/{begun['id']}")).status_code == 404


async def test_a_client_that_does_not_return_ends_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stored stream goes on for a while after its client left, and is then cancelled."""
    monkeypatch.setattr(stored_answers, "RECONNECT_SECONDS", 0.0)
    api = ApiClient(FakeGenerator(tiny_tokenizer(), hang_after=3))
    client = DisconnectingClient(api, PATH, {**BODY, "stream": True})
    await client.wait_for(b"wor")
    await client.disconnect()
    answer_id = json.loads(numbered(client)[0].partition("data: ")[2])["response"]["id"]
    assert (await finished(api, answer_id))["status"] == "cancelled"
    reply = await api.get(f"{PATH}/{answer_id}?stream=true")
    assert "response.cancelled" in reply.text
    assert len(api.generator.cancelled) == 1


async def test_an_answer_that_is_not_stored_ends() -> None:
    """A record that the journal refuses is an error for the client, and the engine stops."""
    api = ApiClient(FakeGenerator(tiny_tokenizer(), hang_after=2))
    await api.journal.close()
    assert (await api.post(PATH, {"input": "Hi", "background": True})).status_code == 500
    assert (await api.get("/status")).json()["open_requests"] == []
    await asyncio.gather(*api.generator.tasks, return_exceptions=True)
    assert len(api.generator.cancelled) == 1


async def count_records(api: ApiClient) -> int:
    """Return the number of stored answers."""
    query = "SELECT count(*) FROM answers"
    found = await api.journal._ask(lambda one: one.execute(query).fetchone())
    return int(found[0])


async def test_only_stored_answers_reach_the_disk(tmp_path: Path) -> None:
    """Requests that are not stored leave nothing, and a response stays until it is deleted."""
    restarts = Restarts(tmp_path)
    api = await restarts.start()
    await api.chat(messages=[{"role": "user", "content": "secret"}])
    await api.stream(messages=[{"role": "user", "content": "secret"}])
    await api.post("/v1/responses", {"input": "secret", "store": False})
    await api.post("/v1/responses", {"input": "secret", "store": False, "stream": True})
    assert await count_records(api) == 0
    await api.chat(store=True)
    assert await count_records(api) == 0
    kept = (await api.post(PATH, {"input": "Hi"})).json()
    assert (await api.get(f"{PATH}/{kept['id']}")).json() == kept
    await restarts.end(api)
    api = await restarts.start()
    assert (await api.get(f"{PATH}/{kept['id']}")).json() == kept
    await restarts.end(api)


async def test_every_operation_on_an_answer_that_is_not_restored_yet(tmp_path: Path) -> None:
    """After a restart, while the model loads, each does what the client asked for, or is a 503."""
    restarts = Restarts(tmp_path)
    api = await restarts.start(hang_after=4)
    begun = [(await api.post(PATH, {"input": "Hi", "background": True})).json()["id"] for _ in range(4)]
    async with asyncio.timeout(PATIENCE):
        for _ in begun:
            await restarts.generator.hanging.acquire()
    client = DisconnectingClient(api, f"{PATH}", {**BODY, "stream": True, "background": True})
    await client.wait_for(b'"delta"')
    await restarts.end(api)
    await client.task
    received = numbered(client)
    begun.append(json.loads(received[0].partition("data: ")[2])["response"]["id"])
    api = restarts.open()
    api.status.ready = False
    cancelled, deleted, kept, gone, streamed = begun
    reply = await api.post(f"{PATH}/{cancelled}/cancel", {})
    assert reply.json()["status"] == "cancelled"
    async with api.http() as http:
        assert (await http.delete(f"{PATH}/{deleted}")).json()["deleted"] is True
    assert (await api.get(f"{PATH}/{kept}")).json()["status"] in ("queued", "in_progress")
    for fields in ({"previous_response_id": kept}, {"input": [{"type": "item_reference", "id": f"msg_{kept[5:]}0"}]}):
        refused = await api.post(PATH, {"input": "And now?", **fields})
        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) > 0
    ending = await asyncio.gather(*(api.post(f"{PATH}/{streamed}/cancel", {}) for _ in range(3)))
    assert [reply.json()["status"] for reply in ending] == ["cancelled"] * 3
    rest = await rest_of(api, received)
    assert texts(received + rest)[-1][0] == "response.cancelled"
    assert [number for *_, number in texts(received + rest)] == list(range(len(received + rest)))
    resuming = asyncio.create_task(api.app.state.stored_answers.resume())
    async with api.http() as http:
        assert (await http.delete(f"{PATH}/{gone}")).status_code == 200
    await resuming
    assert api.generator.requests == [], "the engine does not serve yet"
    api.status.ready = True
    assert (await finished(api, kept))["status"] == "completed"
    await restarts.end(api)
    api = await restarts.start()
    status = {one: (await api.get(f"{PATH}/{one}")).json().get("status") for one in begun}
    expected = {cancelled: "cancelled", deleted: None, kept: "completed", gone: None, streamed: "cancelled"}
    assert status == expected
    assert api.generator.requests == []
    await restarts.end(api)


async def test_an_answer_that_is_cancelled_and_deleted_at_once_is_gone() -> None:
    """Whichever request is first, no record comes back and the stream ends once."""
    for order in (0, 1):
        api = ApiClient(FakeGenerator(tiny_tokenizer(), hang_after=2))
        begun = (await api.post(PATH, {"input": "Hi", "background": True})).json()
        stream = asyncio.create_task(api.get(f"{PATH}/{begun['id']}?stream=true"))
        await asyncio.sleep(0.05)
        async with api.http() as http:
            calls = [http.post(f"{PATH}/{begun['id']}/cancel", content=b"{}"), http.delete(f"{PATH}/{begun['id']}")]
            await asyncio.gather(*(calls if order else calls[::-1]))
        assert (await stream).text.count("event: response.cancelled") == 1
        assert await count_records(api) == 0


async def test_an_answer_of_another_model_fails_and_says_so(tmp_path: Path) -> None:
    """Its stream has the reason, and a conversation goes on after it."""
    restarts = Restarts(tmp_path)
    api = await restarts.start(hang_after=4)
    begun = (await api.post(PATH, {"input": "Hi", "background": True})).json()["id"]
    await restarts.end(api)
    api = restarts.open(fingerprint="other")
    stream = await api.get(f"{PATH}/{begun}?stream=true")
    assert (stream.status_code, "another model" in stream.text) == (400, True)
    assert (await api.get(f"{PATH}/{begun}")).json()["status"] == "failed"
    assert (await api.post(f"{PATH}/{begun}/cancel", {})).json()["status"] == "failed"
    assert (await api.post(PATH, {"input": "So?", "previous_response_id": begun})).status_code == 200
    await restarts.end(api)


@pytest.mark.parametrize("returns", [False, True])
async def test_a_stream_that_is_read_does_not_expire(monkeypatch: pytest.MonkeyPatch, returns: bool) -> None:
    """One client leaves while another reads, or before another comes: the answer reaches its end."""
    monkeypatch.setattr(stored_answers, "RECONNECT_SECONDS", 0.1 if returns else 0.0)
    api = ApiClient(FakeGenerator(tiny_tokenizer(), "</think>" + "word " * 40, pause=0.02))
    client = DisconnectingClient(api, PATH, {"input": "Hi", "stream": True})
    await client.wait_for(b'"delta"')
    answer_id = json.loads(numbered(client)[0].partition("data: ")[2])["response"]["id"]
    if returns:
        await client.disconnect()
    other = asyncio.create_task(api.get(f"{PATH}/{answer_id}?stream=true"))
    await asyncio.sleep(0.03)
    if not returns:
        await client.disconnect()
    assert "event: response.completed" in (await other).text
    assert (await finished(api, answer_id))["status"] == "completed"


async def test_another_key_does_not_find_a_stored_response(tmp_path: Path) -> None:
    """Reading, continuing, cancelling and deleting a response with another key gives 404, as for an unknown id."""
    ring = KeyRing(tmp_path)
    owner, other = (ring.create(name, frozenset({Scope.INFERENCE})) for name in ("a", "b"))
    api = ApiClient(options=ApiOptions(api_keys=("plain-key",), key_ring=ring))

    def key(text: str) -> dict[str, str]:
        """Return the header that sends a key."""
        return {"Authorization": f"Bearer {text}"}

    async with api.http() as client:
        made = await client.post("/v1/responses", json={"input": "Hi"}, headers=key(owner))
        assert made.status_code == 200, made.text
        path = f"/v1/responses/{made.json()['id']}"
        unknown = await client.get("/v1/responses/resp_unknown", headers=key(other))
        for stranger in (other, "plain-key"):
            found = await client.get(path, headers=key(stranger))
            assert found.status_code == unknown.status_code == 404
            id_free = found.text.replace(path.rpartition("/")[2], "resp_unknown")
            assert id_free == unknown.text
            again = {"input": "Hi", "previous_response_id": path.rpartition("/")[2]}
            replies = [
                await client.get(path, params={"stream": "true"}, headers=key(stranger)),
                await client.post(f"{path}/cancel", headers=key(stranger)),
                await client.delete(path, headers=key(stranger)),
                await client.post("/v1/responses", json=again, headers=key(stranger)),
            ]
            assert [reply.status_code for reply in replies] == [404] * len(replies)
            assert replies[-1].json()["error"]["param"] == "previous_response_id"
        assert (await client.get(path, headers=key(owner))).status_code == 200
        assert (await client.delete(path, headers=key(owner))).status_code == 200
    await api.journal.close()


async def test_the_client_of_a_request_is_its_named_key_or_its_address(tmp_path: Path) -> None:
    """The queue counts requests by the name of their key. A key without a name counts by address."""
    ring, generator = KeyRing(tmp_path), FakeGenerator(tiny_tokenizer())
    named = ring.create("alice", frozenset({Scope.INFERENCE}))
    api = ApiClient(generator, options=ApiOptions(api_keys=("shared",), key_ring=ring))
    chat = {"messages": [USER], "max_tokens": 2, "n": 2}
    async with api.http() as client:
        for key in (named, "shared"):
            headers = {"Authorization": f"Bearer {key}"}
            reply = await client.post("/v1/chat/completions", json=chat, headers=headers)
            assert reply.status_code == 200, reply.text
    clients = [request.client for request in generator.requests]
    assert clients == ["key alice"] * 2 + ["address 127.0.0.1"] * 2
    shown = [one.client for one in api.app.state.api.metrics.request_log.recent]
    assert shown == ["python-httpx, alice", "python-httpx"]
