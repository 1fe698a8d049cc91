"""The advice for a worker that no coordinator uses."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from coordinator.trust.cluster_trust import JoinServer
from coordinator.trust.registry import Registry
from proto.trust.certificates import Role
from tests.support.trust.cluster_ca import make_authority, trust_of
from worker.node import advice
from worker.node.advice import Advisor


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("kept", "does not use this worker. mtp-coord status there shows the reason"),
        ("deleted", "has another cluster than this machine, such as after its state was deleted"),
        ("stopped", "does not answer. Start mtp-coord serve there"),
    ],
)
async def test_a_member_learns_why_its_coordinator_does_not_use_it(
    tmp_path: Path, state: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks the coordinator that it joined, names it, and says the same only once."""
    monkeypatch.setattr(advice, "LONELY_SECONDS", 0.0)
    monkeypatch.setattr(advice, "REPEAT_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    own, other = make_authority(tmp_path / "a"), make_authority(tmp_path / "b")
    now = other if state == "deleted" else own
    async with JoinServer(now, Registry(tmp_path / "a")).listening("127.0.0.1", 0) as port:
        address, file = f"127.0.0.1:{1 if state == 'stopped' else port}", tmp_path / "coordinator.json"
        file.write_text(json.dumps({"join": address}))
        advisor = Advisor(file, trust_of(own, Role.WORKER), "start one")
        await advisor.advise()
        await advisor.advise()
        advisor.record_coordinator("mac-1:8080")
        await advisor.advise()
    said = [r.message for r in caplog.records if r.name == advice.__name__]
    assert [text.partition(words)[0] for text in said] == [
        f"no coordinator yet. {where} at {address} " for where in ("The one", "mac-1")
    ]
    assert ("--join TOKEN" in said[0]) == (state != "kept")
    assert json.loads(file.read_text()) == {"join": address, "name": "mac-1:8080"}


async def test_a_worker_of_no_other_machine_says_how_to_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not before LONELY_SECONDS."""
    caplog.set_level(logging.INFO)
    advisor = Advisor(tmp_path / "coordinator.json", None, "start one")
    await advisor.advise()
    assert not caplog.records
    advisor._due = 0.0
    await advisor.advise()
    assert [r.message for r in caplog.records] == ["no coordinator yet. start one"]
