"""Stored answers belong to the API key that made them."""

from __future__ import annotations

from pathlib import Path

from coordinator.api.request.context import ApiOptions
from coordinator.trust.key_ring import KeyRing, Scope
from tests.support.api.api_client import ApiClient


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
                await client.get(f"{path}/input_items", headers=key(stranger)),
                await client.get(path, params={"stream": "true"}, headers=key(stranger)),
                await client.post(f"{path}/cancel", headers=key(stranger)),
                await client.delete(path, headers=key(stranger)),
                await client.post("/v1/responses", json=again, headers=key(stranger)),
            ]
            assert [reply.status_code for reply in replies] == [404] * len(replies)
        assert (await client.get(path, headers=key(owner))).status_code == 200
        assert (await client.delete(path, headers=key(owner))).status_code == 200
    await api.journal.close()
