"""Stored answers belong to the API key that made them, and count in its limits."""

from __future__ import annotations

from pathlib import Path

from coordinator.trust.keys import KeyRing, Scope
from coordinator.web.context import ApiOptions
from tests.support.api.api_client import USER, ApiClient, tiny_tokenizer
from tests.support.api.fake_generator import FakeGenerator


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
