"""The view of models: the catalog of this machine, the search of the hub, the fit, and downloads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.context import ApiOptions
from coordinator.api.model_catalog import Catalog, fit_model
from coordinator.api.model_jobs import ModelAdmin
from coordinator.cluster.plan import NodeSpec
from coordinator.trust.cluster_trust import Invitation
from coordinator.trust.key_ring import KeyRing, Scope
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from mtp.checkpoint.hub.search import is_repo_name, search_hub
from proto.errors import CapacityError, CheckpointError, UsageError
from tests.conftest import Checkpoints
from tests.support.api.api_client import ApiClient
from tests.support.checkpoints.hub import Hub, Repo

SECONDS = 120.0
NODES = (NodeSpec("mac-1", 2**30), NodeSpec("mac-2", 2**30))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: Checkpoints) -> Iterator[Hub]:
    with Hub() as hub:
        hub.install(monkeypatch, tmp_path / "home")
        hub.add("Qwen/Qwen3.5-4B", checkpoints())
        yield hub


@pytest.fixture
def admin(tmp_path: Path, hub: Hub) -> ModelAdmin:
    return ModelAdmin(Catalog(tmp_path / "models"), "builtin", lambda: NODES)


def test_the_search_lists_the_supported_families_first(hub: Hub) -> None:
    """Families come in order, then the repos with the most downloads. GGUF files are left out."""
    path = hub.repos["Qwen/Qwen3.5-4B"].path
    hub.repos |= {
        "a/qwen-other": Repo(path, downloads=900),
        "a/Qwen3.6-27B-4bit": Repo(path, downloads=5, tags=("mlx",)),
        "a/Qwen3.5-gguf": Repo(path, tags=("gguf",)),
    }
    assert [one.name for one in search_hub("qwen")] == [
        "Qwen/Qwen3.5-4B",
        "a/Qwen3.6-27B-4bit",
        "a/qwen-other",
    ]
    assert [one.mlx for one in search_hub("")] == [False, True]


def test_a_hub_that_does_not_answer_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user learns that the hub is the cause."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library pauses between attempts
    hub.faults.unavailable = 100
    with pytest.raises(CheckpointError, match="hub: unavailable"):
        search_hub("qwen")


@pytest.mark.parametrize("name", ["../etc", "/etc/passwd", "a/../b", "a", "a/b/c", "a/b\n", ""])
def test_a_path_is_no_model(tmp_path: Path, name: str) -> None:
    """A client cannot make the server look at another directory of its machine."""
    assert not is_repo_name(name)
    with pytest.raises(CheckpointError, match="not found"):
        Catalog(tmp_path).find_path(name)


async def test_the_catalog_has_what_is_on_this_machine(
    admin: ModelAdmin, checkpoints: Checkpoints
) -> None:
    """A repo is listed once it is whole. A damaged model is listed with its problem and without its path."""
    assert [one.name for one in await admin.list_models()] == [BUILTIN]
    await asyncio.to_thread(resolve_model, "Qwen/Qwen3.5-4B")
    broken = admin.catalog.directory / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{}")
    found = {one.name: one for one in await admin.list_models()}
    assert found.keys() == {BUILTIN, "broken", "Qwen/Qwen3.5-4B"}
    assert found[BUILTIN].head == "complete"
    assert found["Qwen/Qwen3.5-4B"].layers == len(Checkpoint.open(checkpoints()).config.layer_kinds)
    assert found["broken"].problem
    assert str(broken.parent) not in found["broken"].problem


async def test_the_fit_is_the_planners_answer(admin: ModelAdmin, hub: Hub) -> None:
    """A repo on the hub is planned from its headers, without a download of weights."""
    facts, fit = await admin.fit("Qwen/Qwen3.5-4B")
    assert [stage.node for stage in fit.stages] == ["mac-1", "mac-2"]
    assert fit.context > 0
    assert fit.tokens_per_second > 0
    assert hub.weights_sent < facts.nbytes
    small = fit_model(Checkpoint.open(resolve_model(BUILTIN)), [NodeSpec("phone", 10_000_000)])
    assert small.context == 0
    assert "phone" in small.problem


async def end_of_download(admin: ModelAdmin) -> Any:
    """Wait until the newest download has ended and return it."""
    assert admin.downloads._task is not None
    await asyncio.wait({admin.downloads._task}, timeout=SECONDS)
    return admin.downloads.jobs[-1]


async def test_a_download_reports_its_progress_and_may_be_cancelled(
    admin: ModelAdmin, hub: Hub
) -> None:
    """Downloads run one at a time and leave a model that the catalog lists. A cancelled one may be repeated."""
    with pytest.raises(CheckpointError, match="not found"):
        admin.download("/etc")
    first = admin.download("Qwen/Qwen3.5-4B")
    with pytest.raises(CapacityError, match="a download is running"):
        admin.download("Qwen/Qwen3.5-4B")
    admin.downloads.cancel(first.number)
    assert (await end_of_download(admin)).state == "cancelled"
    with pytest.raises(UsageError, match="does not run"):
        admin.downloads.cancel(first.number)
    admin.download("Qwen/Qwen3.5-4B")
    job = await end_of_download(admin)
    assert job.state == "done", job.detail
    assert job.done == job.total > 0
    assert "Qwen/Qwen3.5-4B" in [one.name for one in await admin.list_models()]
    await admin.downloads.close()


async def test_only_administrators_reach_the_models(tmp_path: Path, admin: ModelAdmin) -> None:
    """A key for inference is refused. Without any key, machines are not invited over HTTP."""
    ring = KeyRing(tmp_path)
    key = {scope: ring.create(scope, frozenset({scope})) for scope in Scope}
    api = ApiClient(options=ApiOptions(key_ring=ring))
    parts = api.app.state.api
    object.__setattr__(parts, "model_admin", admin)
    object.__setattr__(parts, "invite", lambda: Invitation("mtp-worker --join mtp1.abc", 7))
    for scope, expected in ((Scope.INFERENCE, 403), (Scope.METRICS, 403), (Scope.ADMIN, 200)):
        headers = {"Authorization": f"Bearer {key[scope]}"}
        assert (await api.get("/v1/cluster/models", headers=headers)).status_code == expected
    invited = await api.post(
        "/v1/cluster/invitations", {}, headers={**headers, "Content-Type": "application/json"}
    )
    assert invited.json()["command"] == "mtp-worker --join mtp1.abc"
    assert (await api.post("/v1/cluster/invitations", {}, headers=headers)).status_code == 400
    ring_without_keys = ApiClient()
    refused = await ring_without_keys.post(
        "/v1/cluster/invitations", {}, headers={"Content-Type": "application/json"}
    )
    assert refused.status_code == 403
    assert "mtp-coord key create" in json.dumps(refused.json())
