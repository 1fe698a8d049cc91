"""The change of the served model: its order, its failures, and the answers that are open meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.serve import model_switch
from coordinator.serve.model_switch import ModelSwitch
from coordinator.status.cluster_status import LoadReport
from proto.errors import BusyError, CheckpointError, WorkerLostError
from tests.support.api.api_client import PATIENCE
from tests.support.processes.waits import until


@dataclass(frozen=True)
class Options:
    """The options of a server."""

    model: str


class Model:
    """An opened model that needs as many of 100 bytes as its name says."""

    def __init__(self, options: Options, path: Path, other_bytes: int = 0) -> None:
        self.options, self.other_bytes = options, other_bytes
        self.name = Path(options.model).name
        self.why_not_alone = "too large" if int(self.name.partition("-")[2]) > 100 else ""
        self.local = SimpleNamespace(make=print)
        self.checkpoint = self.mode = None


@dataclass
class Host:
    """A server that records what happens to it."""

    options: Options = field(default_factory=lambda: Options("first-40"))
    manager: Any = None
    parts: Any = None
    events: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    open_answers: int = 0

    def make_parts(self, model: Model, source: Any) -> Any:
        """See Host."""

        async def start() -> None:
            await asyncio.sleep(0)
            self.events.append(f"start {model.name}")
            if model.name in self.broken:
                raise WorkerLostError("cannot load")

        async def close(error: Exception | None = None) -> None:
            await asyncio.sleep(0)
            self.events.append(f"close {model.name}")

        return SimpleNamespace(model=model, start=start, close=close, count_answers=lambda: self.open_answers)

    def publish(self, parts: Any) -> None:
        """See Host."""
        self.parts = parts
        self.events.append(f"publish {parts.model.name}")

    def pause_requests(self, reason: str) -> None:
        """See Host."""
        self.events.append("pause")
        self.reasons.append(reason)


class Manager:
    """A manager of workers that have loaded 3 of 4 bytes."""

    loads = SimpleNamespace(totals=(3, 4))
    local_worker_bytes = int

    def __init__(self, host: Host) -> None:
        self.host = host

    async def problem_with(self, model: Model, why_not_alone: str) -> str:
        """See ClusterManager."""
        await asyncio.sleep(0)
        return why_not_alone

    async def change_model(self, model: Model, make: Any, why_not_alone: str) -> None:
        """See ClusterManager."""
        await asyncio.sleep(0)
        self.host.events.append(f"change to {model.name}")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(model_switch, "OpenedModel", Model)
    monkeypatch.setattr(model_switch, "find_listed", find_listed)
    monkeypatch.setattr(model_switch, "resolve_model", lambda name, *_: Path(name))
    monkeypatch.setattr(model_switch, "served_model", lambda model: Model(model.options, Path()))
    host = Host()
    host.publish(host.make_parts(Model(host.options, Path()), None))
    host.events.clear()
    return host


def find_listed(name: str) -> Path | None:
    """Find every name without a slash at its beginning."""
    if name.startswith("/"):
        raise CheckpointError(f"{name}: not found")
    return Path("models") / name


def switch_of(host: Host) -> ModelSwitch:
    first: Any = host.parts.model
    return ModelSwitch(host, first)  # type: ignore[arg-type]


async def change(switch: ModelSwitch, name: str) -> LoadReport:
    """Change to the model `name` and return the last report."""
    switch.start(name)
    assert switch._task is not None
    await asyncio.wait({switch._task}, timeout=PATIENCE)
    return switch.report


async def test_the_present_model_ends_before_the_next_one_loads(host: Host) -> None:
    """Two large models do not fit one machine at once."""
    assert await change(switch_of(host), "next-50") == LoadReport("next-50", "ready")
    assert host.events == ["pause", "close first-40", "start next-50", "publish next-50"]


async def test_a_model_that_does_not_load_brings_the_former_one_back(host: Host) -> None:
    """The report has the error. If the former model fails too, the server may load either again."""
    switch = switch_of(host)
    host.broken.add("broken-70")
    assert await change(switch, "broken-70") == LoadReport("broken-70", "failed", error="cannot load")
    assert host.events == [
        "pause",
        "close first-40",
        "start broken-70",
        "close broken-70",
        "start first-40",
        "publish first-40",
    ]
    host.broken.add("first-40")
    assert await change(switch, "broken-70") == LoadReport("broken-70", "failed", error="cannot load")
    assert host.reasons[-1] == (
        "No model is loaded. broken-70: cannot load. first-40: cannot load. Load one with mtp-coord load."
    )
    host.broken.clear()
    host.events.clear()
    assert (await change(switch, "first-40")).phase == "ready"
    assert host.events[-1] == "publish first-40", "no model serves, so the name is loaded again"


@pytest.mark.parametrize("workers", [False, True])
async def test_a_model_that_can_never_fit_changes_nothing(host: Host, workers: bool) -> None:
    """The present model serves on, after a name that is none too."""
    host.manager = Manager(host) if workers else None
    switch = switch_of(host)
    assert "too large" in (await change(switch, "huge-200")).error
    with pytest.raises(CheckpointError, match="not found"):
        switch.start("/etc")
    assert switch.start("first-40") == LoadReport("first-40", "ready")
    assert host.events == []


async def test_open_answers_finish_first(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present model ends with its last answer, or after FINISH_SECONDS. Meanwhile the server is busy."""
    monkeypatch.setattr(model_switch, "POLL_SECONDS", 0.001)
    switch = switch_of(host)
    host.open_answers = 1
    changing = asyncio.create_task(change(switch, "next-70"))
    await until(lambda: switch.report.phase == "finishing answers")
    await asyncio.sleep(0.05)
    assert host.events == ["pause"], "the open answer holds the change back"
    with pytest.raises(BusyError):
        switch.start("other-10")
    assert switch.start("next-70").running
    host.open_answers = 0
    await changing
    assert host.events[-1] == "publish next-70"
    host.open_answers = 1
    monkeypatch.setattr(model_switch, "FINISH_SECONDS", 0.01)
    await change(switch, "first-40")
    assert host.events[-2:] == ["start first-40", "publish first-40"]


async def test_workers_serve_the_next_model(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report shows how much they have loaded."""
    host.manager = Manager(host)
    switch = switch_of(host)
    shown = []
    monkeypatch.setattr(switch, "_show", lambda *progress: shown.append(progress))
    await change(switch, "next-50")
    assert host.events == [
        "pause",
        "close first-40",
        "change to next-50",
        "start next-50",
        "publish next-50",
    ]
    assert (3, 4) in shown


async def test_a_server_that_ends_cancels_the_change(host: Host) -> None:
    """It does not wait for the answers."""
    switch = switch_of(host)
    host.open_answers = 1
    changing = asyncio.create_task(change(switch, "next-70"))
    await until(lambda: "pause" in host.events)
    async with asyncio.timeout(PATIENCE):
        await switch.close()
    changing.cancel()
    assert host.events == ["pause"]


async def test_a_directory_is_served_under_its_name(host: Host, tmp_path: Path) -> None:
    """`load` accepts what `serve --model` accepts, and no client sees the path."""
    switch, directory = switch_of(host), tmp_path / "own-30"
    with pytest.raises(CheckpointError, match="not found, or without config"):
        switch.start(str(directory))
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert await change(switch, str(directory)) == LoadReport("own-30", "ready")
    assert host.parts.model.options.model == str(directory)
    assert switch.start(str(directory)) == LoadReport("own-30", "ready")
    assert switch.argument_of("own-30") == str(directory)
