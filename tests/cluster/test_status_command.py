"""`mtp-coord status` against a server, and against what is none."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
import typer
from pydantic import TypeAdapter
from typer.testing import CliRunner, Result

from coordinator.api.context import ApiOptions
from coordinator.cli import status_command as command
from coordinator.status.cluster_status import ClusterStatus, NodeStatus
from proto.errors import AccessError, NotReadyError, ProtocolError, UsageError
from tests.support.api.api_client import ApiClient
from tests.support.api.api_server import serving

KEY = "secret-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(ApiClient(options=ApiOptions(api_keys=(KEY,))).app) as url:
        yield url


def run(*arguments: str, columns: int = 120) -> Result:
    """On a terminal so wide."""
    app = typer.Typer(add_completion=False)
    app.command("status")(command.status)
    env = {"COLUMNS": str(columns), "MTP_API_KEY": ""}
    return CliRunner(env=env).invoke(app, arguments)


def test_once_shows_the_cluster(url: str) -> None:
    """Nodes with spans, memory, health and times; requests; acceptance by position."""
    done = run("--url", url, "--api-key", KEY, "--once")
    assert done.exit_code == 0, done.output
    for part in (
        *("serving", "plan 3", "tiny", "2 running", "1 of 64 waiting", "41.5", "80 / 50 %"),
        *("mac-1", "0-3", "ready", "1.07 GB of 2.15 GB", "12.5", "10.0.0.1:7000", "loading 50%"),
        "refused: it holds another checkpoint",
    ):
        assert part in done.output


def test_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What means a style or an emoji to rich is part of a name, a reason or an IPv6 address."""
    odd = NodeStatus("mac[/b]:key:", "[fe80::a:1]:7000", health="refused", detail="no [i] :key:")
    cluster = ClusterStatus(ready=False, model="[/x]:key:", nodes=(odd,))
    body = TypeAdapter(ClusterStatus).dump_json(cluster)
    monkeypatch.setattr(command, "fetch", lambda url, key: body)
    done = run("--once")
    for part in (odd.name, "[fe80::a:1]:7000", odd.detail, cluster.model):
        assert part in done.output


def test_a_narrow_terminal_shows_names_and_addresses_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may break over lines; an address is there to be copied."""
    node = NodeStatus(
        "macbook-pro-of-somebody", "192.168.100.123:50123", "32-63", "ready", memory_limit=48 << 30
    )
    body = TypeAdapter(ClusterStatus).dump_json(ClusterStatus(True, "m", nodes=(node,)))
    monkeypatch.setattr(command, "fetch", lambda url, key: body)
    done = run("--once", columns=80)
    assert "192.168.100.123:50123" in done.output
    assert "…" not in done.output


def test_an_idle_worker_comes_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """One held back is idle for a reason that it says itself; while nothing serves, a plan is looked for anyway."""
    nodes = (
        NodeStatus("spare", "10.0.0.3:7000"),
        NodeStatus("flapping", "10.0.0.4:7000", detail="held back 9 s after 3 losses"),
        NodeStatus("busy", "10.0.0.5:7000", "0-3", "ready"),
    )
    ready = True
    monkeypatch.setattr(
        command,
        "fetch",
        lambda url, key: TypeAdapter(ClusterStatus).dump_json(
            ClusterStatus(ready, "m", nodes=nodes)
        ),
    )
    advice = [line for line in run("--once").output.splitlines() if "mtp-coord replan" in line]
    ready = False
    assert "mtp-coord replan" not in run("--once").output
    assert len(advice) == 1
    assert "spare" in advice[0]
    assert "flapping" not in advice[0]
    assert "busy" not in advice[0]


def test_json_is_the_servers_own_object(url: str) -> None:
    """For scripts."""
    done = run("--url", url, "--api-key", KEY, "--json")
    assert json.loads(done.output)["epoch"] == 3


def test_what_goes_wrong_says_what_to_do(url: str) -> None:
    """No key, no server, another server, a URL that is none."""
    with pytest.raises(AccessError, match="--api-key"):
        command.fetch(url, None)
    with pytest.raises(ProtocolError, match="404"):
        command.fetch(f"{url}/elsewhere", KEY)
    with socket.socket() as taken:  # nobody listens there, and nobody else will
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(NotReadyError, match="start mtp-coord serve"):
            command.fetch(f"http://127.0.0.1:{port}", None)
    for wrong in ("ftp://x", "http://", "http://x:port", "http://x[/b]"):
        with pytest.raises(UsageError, match="--url"):
            command.fetch(wrong, None)
