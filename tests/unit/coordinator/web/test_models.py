"""The models that a server lists and loads: what clients see, who may change them, and what a request changes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator.serve.app import create_app, starting_app
from coordinator.status.cluster_status import LoadReport
from coordinator.text.tokenizer import ModelInfo
from coordinator.trust.client_access import Invitation
from coordinator.trust.keys import KeyRing, Scope
from coordinator.web.context import Api, ApiOptions
from coordinator.web.model_catalog import ModelFacts, facts_of, find_listed, list_models
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub import resolve
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from proto.errors import BusyError, CheckpointError
from tests.conftest import Checkpoints
from tests.support.api.api_client import USER, ApiClient, tiny_tokenizer
from tests.support.api.fake_generator import FakeGenerator
from tests.support.checkpoints.hub import Hub


@dataclass
class FakeLoader:
    """A ModelLoader with one other model."""

    report: LoadReport = field(default_factory=lambda: LoadReport("tiny", "ready"))
    failure: Exception | None = None

    async def list_models(self) -> list[ModelFacts]:
        """See ModelLoader."""
        await asyncio.sleep(0)
        broken = ModelFacts("broken", problem="its config.json is damaged")
        return [ModelFacts("tiny"), ModelFacts("owner/big", 2_000_000, 8, 4096, "4-bit"), broken]

    def can_load(self, name: str) -> bool:
        """See ModelLoader."""
        return name in ("tiny", "owner/big")

    def start(self, name: str) -> LoadReport:
        """See ModelLoader."""
        if self.failure is not None:
            raise self.failure
        self.report = LoadReport(name, "opening", 5, 10)
        return self.report


def app_of(api: ApiClient, loader: FakeLoader) -> Any:
    """Return an app that serves the model `tiny`."""
    model = ModelInfo("tiny", 500, created=7)
    generator = api.generator
    parts = Api(generator, generator.tokenizer, model, api.status, api.options, model_loader=loader)
    return create_app(parts, journal=api.journal)


def served(**options: Any) -> tuple[ApiClient, FakeLoader]:
    """Return a client of a server that can load another model."""
    api = ApiClient(options=ApiOptions(**options))
    loader = FakeLoader()
    api.app = app_of(api, loader)
    return api, loader


async def test_models_on_the_machine_are_listed() -> None:
    """Both lists have the served model first, marked, and then the others, each once."""
    api, _ = served()
    data = (await api.get("/v1/models")).json()["data"]
    assert [(m["id"], m["loaded"], m["max_model_len"]) for m in data] == [
        ("tiny", True, 500),
        ("owner/big", False, 4096),
    ]
    tags = (await api.get("/api/tags")).json()["models"]
    assert [m["name"] for m in tags] == ["tiny:latest", "owner/big:latest"]
    assert tags[1]["size"] == 2_000_000
    assert [m["name"] for m in (await api.get("/api/ps")).json()["models"]] == ["tiny:latest"]
    assert (await api.get("/v1/models/owner/big")).json()["loaded"] is False
    assert (await api.get("/v1/models/nothing")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
        ("/api/chat", {"messages": [USER], "stream": False}),
    ],
)
async def test_a_request_for_a_model_that_is_not_loaded(path: str, body: dict[str, Any]) -> None:
    """The refusal says how to load the model."""
    api, _ = served()
    for name in ("owner/big:latest", "owner/big"):
        refused = await api.post(path, {**body, "model": name})
        assert refused.status_code == 409
        assert "mtp-coord load" in refused.text
    assert (await api.post(path, {**body, "model": "tiny:latest"})).status_code == 200
    assert (await api.post(path, {**body, "model": "unknown"})).status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/api/tags", "/api/version", "/"])
async def test_head_answers_as_get_does(path: str) -> None:
    """Clients ask with HEAD whether the server is there."""
    async with ApiClient().http() as client:
        head, get = await client.head(path), await client.get(path)
    assert head.status_code == get.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]


async def test_load_needs_the_scope_admin(tmp_path: Any) -> None:
    """A key for inference may neither load a model nor read the progress."""
    ring = KeyRing(tmp_path)
    keys = {scope: ring.create(scope, frozenset({scope})) for scope in (Scope.INFERENCE, Scope.ADMIN)}
    api, loader = served(key_ring=ring)
    refusal = "Create one with mtp-coord key create NAME --scope admin"
    for scope, status, words in ((Scope.INFERENCE, 403, refusal), (Scope.ADMIN, 202, "")):
        headers = {"Authorization": f"Bearer {keys[scope]}", "Content-Type": "application/json"}
        # Clients of Ollama add its tag to every name.
        reply = await api.post("/v1/models/load", {"model": "owner/big:latest"}, headers=headers)
        assert reply.status_code == status, reply.text
        assert words in reply.text
    progress = await api.get("/v1/models/load", headers=headers)
    assert progress.json() == {
        "model": "owner/big",
        "phase": "opening",
        "answer_seconds": 60.0,
        "done": 5,
        "total": 10,
        "error": "",
    }
    assert loader.report.running


async def test_refused_loads() -> None:
    """Another change, a body that a web page could send, and a server without models are refused."""
    api, loader = served()
    json = {"Content-Type": "application/json"}
    text = {"Content-Type": "text/plain"}
    assert (await api.post("/v1/models/load", {"model": "x"}, headers=text)).status_code == 400
    assert (await api.post("/v1/models/load", {"model": ""}, headers=json)).status_code == 400
    loader.failure = BusyError("the server changes to another model")
    assert (await api.post("/v1/models/load", {"model": "x"}, headers=json)).status_code == 409
    assert (await ApiClient().get("/v1/models/load")).status_code == 503


async def test_the_progress_is_readable_while_no_model_serves() -> None:
    """Other requests get a 503 with the reason, and may be sent again."""
    api, loader = served()
    loader.start("owner/big")
    api.app = starting_app(api.status, api.options, "The server changes to owner/big.", loader)
    assert (await api.get("/v1/models/load")).json()["model"] == "owner/big"
    json = {"Content-Type": "application/json"}
    for name in ("owner/big", "http://host/model"):
        reply = await api.post("/v1/models/load", {"model": name}, headers=json)
        assert (reply.status_code, reply.json()["model"]) == (202, name)
    for reply in (await api.chat(), await api.get("/v1/models")):
        assert reply.status_code == 503
        assert "owner/big" in reply.text
        assert reply.headers["retry-after"]


async def test_ollamas_sizes_are_those_of_the_weights() -> None:
    """`size` is the bytes of the weights."""
    facts = facts_of("builtin", Checkpoint.open(checkpoint_dir()))
    api = ApiClient(FakeGenerator(tiny_tokenizer(), "x"), nbytes=facts.nbytes)
    (listed,) = (await api.get("/api/tags")).json()["models"]
    assert listed["size"] == facts.nbytes
    shown = (await api.post("/api/show", {"model": "tiny"})).json()
    assert shown["details"] == listed["details"]


@pytest.mark.parametrize("name", ["../etc", "/etc/passwd", "a/../b", "a", "a/b/c", "a/b\n", "", "./a", ".a/b", "a/.b"])
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
    assert found["Qwen/Qwen3.5-4B"].layers == len(Checkpoint.open(checkpoints()).config.shape.kinds)
    assert found["own/broken"].problem
    assert str(tmp_path) not in found["own/broken"].problem


APPLICATION_JSON = {"Content-Type": "application/json"}


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
        found = await api.get("/v1/cluster/models", headers=headers)
        assert found.status_code == expected
        stopped = await api.post("/v1/cluster/requests/chatcmpl-1/stop", {}, headers={**headers, **APPLICATION_JSON})
        assert stopped.status_code == (404 if expected == 200 else 403)
    assert found.json()["free_bytes"] > 0
    invited = await api.post("/v1/cluster/invitations", {}, headers={**headers, "Content-Type": "application/json"})
    assert invited.json()["command"] == "mtp-worker --join mtp1.abc"
    able = await api.get("/v1/cluster/invitations", headers=headers)
    assert able.json() == {"problem": ""}
    text = {**headers, "Content-Type": "text/plain"}
    for path in ("/v1/cluster/invitations", "/v1/cluster/requests/chatcmpl-1/stop"):
        assert (await api.post(path, {}, headers=text)).status_code == 400, "a page of another site may send a text"
    ring_without_keys = ApiClient()
    refused = await ring_without_keys.post("/v1/cluster/invitations", {}, headers={"Content-Type": "application/json"})
    assert refused.status_code == 403
    assert "mtp-coord key create" in json.dumps(refused.json())
    told = await ring_without_keys.get("/v1/cluster/invitations")
    assert told.json()["problem"] == refused.json()["error"]["message"]
