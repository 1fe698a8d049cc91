"""The advice after `No route to host`: only if macOS may have refused a host of an own network."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import sys
from pathlib import Path

import httpx
import pytest

from coordinator.cli import doctor_checks
from coordinator.cli.client import no_answer
from coordinator.pipeline.worker_connection import Candidate
from proto import local_network
from proto.errors import ClusterError, WorkerLostError
from proto.local_network import NO_ROUTE_NUMBER, REFUSES, refusal
from proto.rpc import data_connection
from proto.rpc.status_codes import from_status
from proto.trust import joining

NETWORKS = [ipaddress.IPv4Network("10.0.0.0/24"), ipaddress.IPv4Network("192.168.1.0/24")]


@pytest.mark.parametrize(
    ("platform", "number", "host", "answers", "words"),
    [
        ("darwin", 65, "10.0.0.2", None, "macOS refuses this program the local network, unless that machine is off."),
        ("darwin", 65, "10.0.0.2", True, "macOS refuses this program the local network."),
        ("darwin", 65, "10.0.0.2", False, ""),
        ("darwin", 65, "mac-2.local", None, REFUSES),
        ("darwin", 65, "fe80::1%en0", None, REFUSES),
        ("darwin", 65, "169.254.3.4", None, REFUSES),
        ("darwin", 65, "10.0.1.2", None, ""),  # behind a router, which macOS does not refuse
        ("darwin", 65, "mac-2", None, ""),
        ("darwin", 65, "", None, ""),
        ("darwin", 61, "10.0.0.2", None, ""),
        ("darwin", 64, "10.0.0.2", None, ""),
        ("linux", 65, "10.0.0.2", None, ""),
        ("linux", errno.EHOSTUNREACH, "10.0.0.2", True, ""),
    ],
)
def test_a_refusal_is_told_apart(platform: str, number: int, host: str, answers: bool | None, words: str) -> None:
    """The platform, the errno, the host's network and a ping decide."""
    found = refusal(platform, number, host, NETWORKS, answers)
    assert (found == "") == (words == "")
    assert found.startswith(words)


NO_ROUTE = OSError(NO_ROUTE_NUMBER, "No route to host")
GRPC_TEXT = (
    "failed to connect to all addresses; last error: FAILED_PRECONDITION: ipv4:10.0.0.2:50505: connect failed: "
    "addr: ipv4:10.0.0.2:50505 error: No route to host"
)


def fail(*_: object, **__: object) -> None:
    """Fail as a connection that macOS refuses."""
    raise NO_ROUTE


async def errors_of_connections(tmp_path: Path) -> list[ClusterError]:
    """Return the errors of a call, a data connection, a join and a command, each to a host without a route."""
    found: list[ClusterError] = [from_status("UNAVAILABLE", GRPC_TEXT, None, "mac-2:50505")]
    offer = data_connection.TicketOffer(b"t" * 16, 50506)
    with pytest.raises(WorkerLostError) as failed:
        data_connection.dial("10.0.0.2:50505", None, "", offer, 1.0)
    found.append(failed.value)
    token = joining.new_token("c" * 32, b"a" * 32, "10.0.0.2:50504")
    with pytest.raises(WorkerLostError) as failed:
        await joining.join(token, "mac-1", tmp_path)
    found.append(failed.value)
    refused = httpx.ConnectError(f"[Errno {NO_ROUTE_NUMBER}] No route to host")
    return [*found, no_answer("https://10.0.0.2:8080", refused)]


@pytest.mark.parametrize(("platform", "networks"), [("darwin", NETWORKS), ("darwin", []), ("linux", NETWORKS)])
async def test_every_connection_has_the_same_words(
    platform: str, networks: list[ipaddress.IPv4Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls, data connections, joins and commands name the refusal on a Mac for a host of its own networks alone."""
    monkeypatch.setattr(local_network, "own_networks", lambda: networks)
    monkeypatch.setattr(socket, "create_connection", fail)
    monkeypatch.setattr(asyncio, "open_connection", fail)
    monkeypatch.setattr(sys, "platform", platform)
    for error in await errors_of_connections(tmp_path):
        assert (f"{REFUSES}, unless that machine is off. In System Settings" in str(error)) == (
            platform == "darwin" and networks != []
        ), error


@pytest.mark.parametrize(
    ("answer", "words"), [("1 packets received", f"answers ping, but {REFUSES}. In System"), ("", "is unreachable")]
)
def test_the_doctor_settles_it_by_a_ping(answer: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that answers a ping was refused to the program. Another one is unreachable."""
    for module in (local_network, doctor_checks):
        monkeypatch.setattr(module, "own_networks", lambda: NETWORKS)
    monkeypatch.setattr(doctor_checks, "command_output", lambda *_: answer)
    monkeypatch.setattr(sys, "platform", "darwin")
    error = from_status("UNAVAILABLE", GRPC_TEXT, None, "10.0.0.2:50505")
    finding = doctor_checks._unreachable(Candidate("mac-2", ("10.0.0.2:50505",)), error)
    assert finding.figure == "10.0.0.2:50505 is lost: No route to host"
    assert words in finding.advice
