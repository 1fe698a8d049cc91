"""The view of models: the catalog of this machine, and the keys that may see it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from coordinator.api.context import ApiOptions
from coordinator.api.model_catalog import find_listed, list_models
from coordinator.trust.cluster_trust import Invitation
from coordinator.trust.registry import KeyRing, Scope
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub import resolve
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from proto.errors import CheckpointError
from tests.conftest import Checkpoints
from tests.support.api.api_client import ApiClient
from tests.support.checkpoints.hub import Hub
from tests.unit.coordinator.api.test_models import FakeLoader


@pytest.mark.parametrize(
    "name", ["../etc", "/etc/passwd", "a/../b", "a", "a/b/c", "a/b\n", "", "./a", ".a/b", "a/.b"]
)
def test_a_path_is_no_model(name: str) -> None:
    """A client cannot make the server look at another directory of its machine."""
    with pytest.raises(CheckpointError, match="not found"):
        find_listed(name)


async def test_the_catalog_has_what_is_on_this_machine(
    hub: Hub, tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repo is listed once it is whole. A damaged model is listed with its problem and without its path."""
    hub.add("Qwen/Qwen3.5-4B", checkpoints())
    monkeypatch.setattr(resolve, "LM_STUDIO", (str(tmp_path),))
    assert [one.name for one in list_models()] == [BUILTIN]
    await asyncio.to_thread(resolve_model, "Qwen/Qwen3.5-4B")
    broken = tmp_path / "own" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors").touch()
    found = {one.name: one for one in list_models()}
    assert found.keys() == {BUILTIN, "own/broken", "Qwen/Qwen3.5-4B"}
    assert found[BUILTIN].head == "complete"
    assert found["Qwen/Qwen3.5-4B"].layers == len(Checkpoint.open(checkpoints()).config.layer_kinds)
    assert found["own/broken"].problem
    assert str(tmp_path) not in found["own/broken"].problem


async def test_only_administrators_reach_the_models(tmp_path: Path) -> None:
    """A key for inference is refused. Without any key, machines are not invited over HTTP."""
    ring = KeyRing(tmp_path)
    key = {scope: ring.create(scope, frozenset({scope})) for scope in Scope}
    api = ApiClient(options=ApiOptions(key_ring=ring))
    parts = api.app.state.api
    object.__setattr__(parts, "model_loader", FakeLoader())
    object.__setattr__(parts, "invite", lambda: Invitation("mtp-worker --join mtp1.abc", 7))
    for scope, expected in ((Scope.INFERENCE, 403), (Scope.METRICS, 403), (Scope.ADMIN, 200)):
        headers = {"Authorization": f"Bearer {key[scope]}"}
        assert (await api.get("/v1/cluster/models", headers=headers)).status_code == expected
    invited = await api.post(
        "/v1/cluster/invitations", {}, headers={**headers, "Content-Type": "application/json"}
    )
    assert invited.json()["command"] == "mtp-worker --join mtp1.abc"
    able = await api.get("/v1/cluster/invitations", headers=headers)
    assert able.json() == {"problem": ""}
    text = {**headers, "Content-Type": "text/plain"}
    assert (await api.post("/v1/cluster/invitations", {}, headers=text)).status_code == 400
    ring_without_keys = ApiClient()
    refused = await ring_without_keys.post(
        "/v1/cluster/invitations", {}, headers={"Content-Type": "application/json"}
    )
    assert refused.status_code == 403
    assert "mtp-coord key create" in json.dumps(refused.json())
    told = await ring_without_keys.get("/v1/cluster/invitations")
    assert told.json()["problem"] == refused.json()["error"]["message"]
