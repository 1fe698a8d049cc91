"""Discovery over real mDNS: on loopback, between processes, between network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from coordinator.cluster import discovery as discovery_module
from coordinator.cluster.discovery import Discovery
from coordinator.pipeline.worker_connection import Candidate
from proto.announcement import SERVICE_TYPE, Announcement
from tests.support.processes.mdns_peer import PORT
from tests.support.processes.network_namespaces import two_machines
from tests.support.processes.processes import SHARED_MEMORY, ending, launch
from tests.support.processes.waits import until
from worker.node import announce as announce_module
from worker.node.announce import announced

ROOT = Path(__file__).parents[2]
PEER = ROOT / "tests" / "support" / "processes" / "mdns_peer.py"
PATIENCE = 60.0
"""Seconds for news to arrive: announcing takes about one, and a shared machine may be slow."""


def unique_announcement() -> Announcement:
    """Return the announcement of a worker with a unique id."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    return Announcement(uuid.uuid4().hex, name, 4242)


async def known(discovery: Discovery, worker_id: str, address: str = "127.0.0.1:4242") -> Candidate:
    """Wait for the candidate with this worker id and address."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for candidate in discovery.candidates():
                said = candidate.announcement
                if said and said.worker_id == worker_id and candidate.addresses == (address,):
                    return candidate
            await asyncio.sleep(0.02)


# ---- one process, loopback


async def test_a_worker_on_loopback_is_found_and_lost() -> None:
    """A running worker is found with its announced fields, and is removed soon after its goodbye."""
    announcement = replace(unique_announcement(), cluster="ab" * 8, node="cd" * 8)
    async with Discovery() as discovery:
        async with announced(announcement, "127.0.0.1"):
            found = await known(discovery, announcement.worker_id)
            said = found.announcement
            assert said == announcement
        await until(lambda: found not in discovery.candidates(), "the end of the worker")


async def test_malformed_records_are_passed_over() -> None:
    """Malformed records under our service type are ignored and do not stop the search."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    good = unique_announcement()
    nonsense: list[dict[str | bytes, str | bytes | None]] = [
        {},
        {"v": "1"},
        {b"v": b"\xff\xfe", b"id": b"\x00"},
        {"id": "x", "cluster": "9-2"},
    ]
    zeroconf = AsyncZeroconf(interfaces=["127.0.0.1"])
    try:
        names = [f"{uuid.uuid4().hex}.{SERVICE_TYPE}" for _ in nonsense]
        registered = [
            await zeroconf.async_register_service(
                AsyncServiceInfo(
                    SERVICE_TYPE,
                    name,
                    port=1,
                    properties=txt,
                    parsed_addresses=["127.0.0.1"],
                    server=f"{uuid.uuid4().hex}.local.",
                ),
                cooperating_responders=True,  # skips the wait for others of the same name
            )
            for name, txt in zip(names, nonsense, strict=True)
        ]
        await asyncio.wait_for(asyncio.gather(*registered), PATIENCE)
        async with Discovery() as discovery:
            async with announced(good, "127.0.0.1"):
                await known(discovery, good.worker_id)
            assert not {candidate.id for candidate in discovery.candidates()} & set(names)
        gc.collect()  # a task that failed unheard says so when it is collected
        assert failures == []
    finally:
        await zeroconf.async_close()


# ---- no multicast


@pytest.mark.parametrize("error", [OSError(19, "No such device"), RuntimeError("No interfaces to listen on")], ids=repr)
async def test_blocked_multicast_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """With blocked multicast neither side fails or hangs; one warning names the alternative."""

    tries: Counter[str] = Counter()

    def refuse(name: str, *_: object, **__: object) -> None:
        tries[name] += 1
        raise error

    for module in (announce_module, discovery_module):
        monkeypatch.setattr(module, "AsyncZeroconf", partial(refuse, module.__name__))
        monkeypatch.setattr(module, "RESCAN_SECONDS", 0.01)
    ours = {module.__name__ for module in (announce_module, discovery_module)}
    with caplog.at_level(logging.WARNING):
        async with (
            Discovery(["10.9.8.7:1"]) as discovery,
            announced(unique_announcement(), "127.0.0.1"),
            asyncio.timeout(PATIENCE),
        ):
            while min(tries[name] for name in ours) < 5:  # refused, and tried again
                await asyncio.sleep(0.01)
                assert len(discovery.candidates()) == 1
    warnings = [record for record in caplog.records if record.name in ours]
    assert sorted(record.name for record in warnings) == sorted(ours)
    assert all("--worker" in record.message for record in warnings)


async def test_leaving_early_is_quick_and_clean() -> None:
    """An end during announcing and resolving leaves no task and no socket."""
    before = asyncio.all_tasks()
    seconds: list[float] = []
    while min(seconds, default=60.0) >= 5.0:  # not always: a machine may be busy, but not again and again
        assert len(seconds) < 3, seconds
        async with Discovery(), announced(unique_announcement(), "127.0.0.1"):
            await asyncio.sleep(0.05)
            left = asyncio.get_running_loop().time()
        seconds.append(asyncio.get_running_loop().time() - left)
    async with asyncio.timeout(PATIENCE):
        while others := asyncio.all_tasks() - before:
            await asyncio.wait(others)


# ---- processes, namespaces


@contextlib.contextmanager
def announcing(*prefix: str, name: str, host: str) -> Iterator[None]:
    """Run a process that announces a worker, under the command `prefix`."""
    command = [*prefix, sys.executable, str(PEER), "announce", name, host]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"announcing\n"
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()


def browse(*prefix: str, name: str) -> list[str] | None:
    """Return the addresses that another process finds for the worker `name`."""
    command = [*prefix, sys.executable, str(PEER), "browse", name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=100)
    found: list[str] | None = json.loads(output.stdout)
    return found


def test_processes_of_one_machine_find_each_other() -> None:
    """A worker and a coordinator on one machine find each other on loopback, both on port 5353."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    with announcing(name=name, host="127.0.0.1"):
        assert browse(name=name) == [f"127.0.0.1:{PORT}"]


def test_machines_on_one_network_find_each_other() -> None:
    """Another machine finds a worker on all interfaces at its network address, and a worker on loopback not at all.

    The own machine finds the worker on loopback, at that address only.
    """
    name = f"test-{uuid.uuid4().hex[:12]}"
    hidden = f"test-{uuid.uuid4().hex[:12]}"
    with (
        two_machines() as (here, there),
        announcing(*here.prefix, name=hidden, host="127.0.0.1"),
        announcing(*here.prefix, name=name, host="0.0.0.0"),
    ):
        assert browse(*there.prefix, name=name) == [f"10.213.77.1:{PORT}"]
        assert browse(*here.prefix, name=hidden) == [f"127.0.0.1:{PORT}"]


def test_a_stranger_is_never_planned(tmp_path: Path) -> None:
    """A coordinator on loopback refuses a worker of another machine that mDNS announces and no user admitted.

    It says so once, with what to do, and ends without a plan instead of giving layers and prompts to a stranger.
    """
    listen = ("--listen", "0.0.0.0:0", "--insecure", "--name", "stranger", *SHARED_MEMORY)
    wait = ("serve", "--port", "0", "--nodes", "1", "--wait", "4")
    with two_machines() as (here, there):
        worker = launch(tmp_path, "worker", "worker.cli", listen, prefix=here.prefix)
        coordinator = launch(tmp_path, "coordinator", "coordinator.cli", wait, prefix=there.prefix)
        with ending(worker), ending(coordinator):
            worker.wait_for("worker ready")
            refusal = coordinator.wait_for("no worker")
            assert "--listen" in refusal["error"]
            assert coordinator.popen.wait(60) != 0
    assert not coordinator.records("worker joined")
