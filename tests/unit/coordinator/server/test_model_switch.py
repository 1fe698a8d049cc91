"""The change of the served model: its order, its failures, and the answers that are open meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.server import model_switch
from coordinator.server.model_switch import ModelSwitch
from proto.errors import BusyError, CheckpointError, MemoryLimitError, WorkerLostError
from tests.support.api.api_client import PATIENCE


@dataclass(frozen=True)
class Options:
    """The options of a server."""

    model: str


class Model:
    """An opened model that needs `nbytes` of the 100 that this machine has."""

    def __init__(self, options: Options, path: Path) -> None:
        self.options = options
        self.name = options.model
        self.nbytes = int(self.name.partition("-")[2])
        self.why_not_alone = "too large" if self.nbytes > 100 else ""
        used = SimpleNamespace(memory_used=self.nbytes)
        self.local = SimpleNamespace(
            model=self,
            status=lambda: used,
            make=print,
            make_ahead=self._make_ahead,
            drop_ahead=partial(asyncio.sleep, 0),
            use_all_memory=lambda: "all",
        )
        self.checkpoint = self.mode = None
        self.made_ahead: list[int] = []

    async def _make_ahead(self, epoch: int, on_progress: Any) -> None:
        await asyncio.sleep(0)
        self.made_ahead.append(epoch)

    def capacity(self, reserved: int = 0) -> None:
        """Raise MemoryLimitError if the model does not fit beside `reserved` bytes."""
        if self.nbytes + reserved > 100:
            raise MemoryLimitError("too large")


@dataclass
class Host:
    """A server that records what happens to it."""

    options: Options = field(default_factory=lambda: Options("first-40"))
    manager: Any = None
    parts: Any = None
    events: list[str] = field(default_factory=list)
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

        return SimpleNamespace(
            model=model,
            start=start,
            close=close,
            count_answers=lambda: self.open_answers,
            loop=Loop(self.events, model.name),
        )

    def publish(self, parts: Any) -> None:
        """See Host."""
        self.parts = parts
        self.events.append(f"publish {parts.model.name}")

    def pause_requests(self, reason: str, *, hold: bool) -> None:
        """See Host."""
        self.events.append("hold" if hold else "pause")


class Loop:
    """A generation loop whose running requests keep to a room when `fitting` is set."""

    def __init__(self, events: list[str], name: str) -> None:
        self.events = events
        self.name = name
        self.fitting = True
        self.scheduler = SimpleNamespace(capacity="all")
        self.pipeline = None

    def use_capacity(self, capacity: str) -> None:
        """Record the capacity."""
        self.events.append(capacity)

    def limit_room(self, room: str) -> bool:
        """Record the room."""
        self.events.append(f"{self.name} keeps to {room}")
        return self.fitting


class Manager:
    """A manager of workers that have room for two models up to 100 bytes."""

    loads = SimpleNamespace(totals=(3, 4))

    def __init__(self, host: Host, *, workers: bool = True) -> None:
        self.host = host
        self.view = SimpleNamespace(
            usable=lambda: ["w"] if workers else [], epoch=1, serving=("w",)
        )
        self.local_worker_bytes = int
        self.loading_ahead = False

    async def problem_with(self, model: Model, why_not_alone: str) -> str:
        """See ClusterManager."""
        await asyncio.sleep(0)
        return why_not_alone

    async def plan_ahead(self, model: Model) -> Any:
        """See ClusterManager."""
        self.loading_ahead = True
        self.host.parts.model.capacity(model.nbytes)

        async def run() -> None:
            """Load the stages."""
            await asyncio.sleep(0)
            self.host.events.append(f"load ahead {model.name}")
            if f"ahead {model.name}" in self.host.broken:
                raise WorkerLostError("worker lost")

        return SimpleNamespace(room="some", run=run, loads=self.loads)

    def end_load_ahead(self) -> None:
        """See ClusterManager."""
        self.loading_ahead = False

    async def change_model(self, model: Model, make: Any, why_not_alone: str) -> None:
        """See ClusterManager."""
        await asyncio.sleep(0)
        self.host.events.append(f"change to {model.name}")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(model_switch, "OpenedModel", Model)
    monkeypatch.setattr(model_switch, "resolve_model", lambda name, *_: Path(name))
    monkeypatch.setattr(
        model_switch, "served_model", lambda checkpoint, options, mode: Model(options, Path())
    )
    host = Host()
    host.publish(host.make_parts(Model(host.options, Path()), None))
    host.events.clear()
    return host


def switch_of(host: Host) -> ModelSwitch:
    """Return the switch of a server whose catalog knows every name without a slash at its beginning."""

    def find_path(name: str) -> Path | None:
        if name.startswith("/"):
            raise CheckpointError(f"{name}: not found")
        return None if "repo" in name else Path("models") / name

    catalog = SimpleNamespace(find_path=find_path, directory=Path("cache"))
    admin: Any = SimpleNamespace(catalog=catalog)
    first: Any = host.parts.model
    return ModelSwitch(host, admin, first)  # type: ignore[arg-type]


async def test_models_that_fit_are_both_in_memory(host: Host) -> None:
    """New requests go to the next model before the first one ends; then the next one gets all memory."""
    switch = switch_of(host)
    await switch.load("next-50")
    assert host.events == ["start next-50", "publish next-50", "close first-40", "all"]
    assert (switch.report.model, switch.report.phase) == ("next-50", "ready")


async def test_a_model_that_does_not_fit_beside_the_first_one(host: Host) -> None:
    """The first model ends before the next one loads. If that fails, the first one is loaded again."""
    switch = switch_of(host)
    host.broken.add("broken-70")
    with pytest.raises(Exception, match="cannot load"):
        await switch.load("broken-70")
    assert host.events == [
        "pause",
        "close first-40",
        "start broken-70",
        "close broken-70",
        "start first-40",
        "publish first-40",
    ]
    assert switch.report.phase == "failed"
    host.events.clear()
    await switch.load("next-70")
    assert host.events == ["pause", "close first-40", "start next-70", "publish next-70"]
    host.broken.add("next-70")
    with pytest.raises(Exception, match="cannot load"):
        await switch.load("broken-70")
    host.broken.clear()
    host.events.clear()
    await switch.load("next-70")
    assert host.events[-1] == "publish next-70", "no model serves, so the name is loaded again"


async def test_a_model_that_can_never_fit_changes_nothing(host: Host) -> None:
    """The first model serves on."""
    switch = switch_of(host)
    for name in ("huge-200", "/etc"):
        with pytest.raises(Exception, match=r"too large|not found"):
            await switch.load(name)
    assert host.events == []


async def test_open_answers_finish_first(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model ends with its last answer, or when its time is over."""
    monkeypatch.setattr(model_switch, "POLL_SECONDS", 0.001)
    switch = switch_of(host)
    host.open_answers = 1
    loading = asyncio.create_task(switch.load("next-70"))
    async with asyncio.timeout(PATIENCE):
        while True:
            if switch.report.phase == "finishing answers":
                break
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert host.events == ["pause"], "the open answer holds the change back"
    with pytest.raises(BusyError):
        switch.start("other-10")
    assert switch.start("next-70").running
    host.open_answers = 0
    await loading
    assert host.events[-1] == "publish next-70"
    host.open_answers = 1
    monkeypatch.setattr(model_switch, "FINISH_SECONDS", 0.01)
    await switch.load("first-40")
    assert host.events[-2:] == ["start first-40", "publish first-40"]


async def test_workers_load_the_next_model_beside_the_present_one(host: Host) -> None:
    """The present model keeps to the room that is left, and new requests wait only for the change."""
    host.manager = Manager(host)
    switch = switch_of(host)
    await switch.load("next-50")
    assert host.events == [
        "first-40 keeps to some",
        "load ahead next-50",
        "hold",
        "close first-40",
        "change to next-50",
        "start next-50",
        "publish next-50",
    ]
    assert (switch.report.phase, switch.report.note) == (
        "ready",
        "the present model serves until the next one is loaded",
    )


async def test_workers_without_room_end_the_present_model_first(host: Host) -> None:
    """The report says why. The same happens if the load beside the present model fails."""
    host.manager = Manager(host)
    host.broken.add("ahead next-30")
    for name, reason in (("next-70", "too large"), ("next-30", "worker lost")):
        switch = switch_of(host)
        host.events.clear()
        await switch.load(name)
        assert "pause" in host.events
        assert host.events[-1] == f"publish {name}"
        assert not host.manager.loading_ahead, "the workers are free for the plans of their model"
        assert host.events[host.events.index("pause") - 1].endswith("keeps to all")
        assert reason in switch.report.note


async def test_open_answers_that_need_the_memory_are_not_waited_for_without_end(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After FINISH_SECONDS the present model ends first."""
    monkeypatch.setattr(model_switch, "FINISH_SECONDS", 0.02)
    monkeypatch.setattr(model_switch, "POLL_SECONDS", 0.001)
    host.manager = Manager(host)
    host.parts.loop.fitting = False
    switch = switch_of(host)
    await switch.load("next-50")
    assert host.events[-1] == "publish next-50"
    assert "load ahead next-50" not in host.events
    assert "open answers" in switch.report.note


async def test_a_coordinator_without_workers_loads_ahead_for_the_next_epoch(host: Host) -> None:
    """It has both models in memory, or ends the present one first."""
    host.manager = Manager(host, workers=False)
    ahead = []
    for name in ("next-50", "large-90"):
        await switch_of(host).load(name)
        ahead.append(host.parts.model.made_ahead)
    assert ahead == [[2], []]
    assert host.events[0] == "hold"
    assert "pause" in host.events
