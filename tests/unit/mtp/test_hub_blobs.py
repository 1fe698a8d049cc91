"""Downloads of whole repos stop at once, keep what has arrived, and continue from there."""

from __future__ import annotations

import math
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from mtp.checkpoint.hub.resolve import find_model, resolve_model
from proto.errors import CheckpointError, NotReadyError
from tests.conftest import Checkpoints
from tests.support.checkpoints.hub import Hub

REPO = "someone/some-model"


@pytest.fixture
def source(checkpoints: Checkpoints) -> Path:
    return checkpoints(shards=3)


@pytest.fixture
def hub(hub: Hub, source: Path) -> Hub:
    hub.add(REPO, source)
    return hub


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_an_interrupted_download_stops_and_continues(hub: Hub, source: Path) -> None:
    """A stopped download ends within a second. The next one fetches only the missing bytes."""
    total = sum(map(len, weights(source).values()))
    hub.faults.hold_at = total // 2
    stop = threading.Event()
    seen: list[tuple[int, int]] = []

    def on_progress(done: int, of: int) -> None:
        seen.append((done, of))
        if hub.weights_sent >= hub.faults.hold_at:
            stop.set()

    with pytest.raises(NotReadyError, match="The next start continues it"):
        resolve_model(REPO, on_progress, stop)
    assert find_model(REPO) is None
    assert 0 < seen[-1][0] < total
    assert {of for _, of in seen} == {total}
    hub.faults.hold_at = math.inf
    time.sleep(0.5)  # the server's held replies end
    hub.sent.clear()
    found = resolve_model(REPO, lambda done, of: seen.append((done, of)))
    assert weights(found) == weights(source)
    assert hub.weights_sent < total
    assert not list(found.parents[1].rglob("*.part"))


def test_progress_is_reported_every_second(hub: Hub, source: Path) -> None:
    """A download that receives nothing still reports, so that a bar moves and an interruption is noticed."""
    hub.faults.hold_at = 1
    times: list[float] = []
    stop = threading.Event()

    def on_progress(done: int, of: int) -> None:
        times.append(time.monotonic())
        if len(times) == 4:
            stop.set()

    with pytest.raises(NotReadyError):
        resolve_model(REPO, on_progress, stop)
    hub.faults.hold_at = math.inf
    assert max(b - a for a, b in pairwise(times)) < 1


def test_a_hub_names_no_file_outside_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash that is a path is refused, and no weights are requested. The cache names its files by hashes."""
    outside = tmp_path / "outside"
    etag = hub.etag

    def lying_etag(file: Path) -> str:
        return f"../../../../{outside.name}" if file.suffix == ".safetensors" else etag(file)

    monkeypatch.setattr(hub, "etag", lying_etag)
    with pytest.raises(CheckpointError, match="as the SHA-256 of"):
        resolve_model(REPO)
    assert hub.weights_sent == 0
    assert not list(tmp_path.glob("outside*"))
