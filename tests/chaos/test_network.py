"""A worker whose peers vanish from the network, in a network namespace."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.faults import wait_until
from tests.chaos.network import Network, network, why_no_network
from tests.support.processes.processes import SHARED_MEMORY

WORKER = """
import sys
from unittest.mock import patch
sys.modules["torch"] = None
from worker import cli
service = "worker.node.service.KEEPALIVE"
with patch(f"{service}_SECONDS", 0.5), patch(f"{service}_REPLY_SECONDS", 0.5):
    cli.main()
"""

CLIENTS = """
import grpc, sys, time
own = [("grpc.use_local_subchannel_pool", 1)]
channels = [grpc.insecure_channel(sys.argv[1], options=own) for _ in range(3)]
for channel in channels:
    grpc.channel_ready_future(channel).result(90)
print("connected", flush=True)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    if reason := why_no_network():
        pytest.skip(reason)
    with network(1, seed=1) as made:
        yield made


def test_a_worker_forgets_connections_of_a_machine_that_vanished(net: Network) -> None:
    """Connections that end without a packet are closed after a ping without reply, and others are kept."""
    flags = ["--insecure", "--no-mdns", "--log-format", "json", *SHARED_MEMORY]
    listen = ["--listen", f"{net.address(0)}:0"]
    worker = [*net.prefix(0), sys.executable, "-c", WORKER, *listen, *flags]
    with subprocess.Popen(worker, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            logged = (json.loads(line) for line in process.stderr)
            address = next(str(r["address"]) for r in logged if r["message"] == "worker ready")
            before = _descriptors(process.pid)
            clients = [sys.executable, "-c", CLIENTS, address]
            with subprocess.Popen(clients, stdout=subprocess.PIPE, text=True) as vanishing:
                assert vanishing.stdout is not None
                assert vanishing.stdout.readline()
                time.sleep(2.0)  # the pings of this time have replies
                assert _descriptors(process.pid) >= before + 3
                net.cut(0, net.own)
                net.cut(net.own, 0)
                vanishing.kill()
            assert wait_until(lambda: _descriptors(process.pid) <= before, 40.0)
        finally:
            net.mend()
            process.kill()


def _descriptors(pid: int) -> int:
    return psutil.Process(pid).num_fds()
