"""`mtp-coord replan` against a server with a cluster, and a server without one."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from coordinator.api.context import ApiOptions
from coordinator.cli import app as commands
from coordinator.cli import cluster_commands as command
from proto.errors import AccessError, DeadlineError, UsageError
from tests.support.api.api_client import ApiClient
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeStatus

KEY = "secret-key"


class Cluster:
    """An app whose replans are counted, and answered unless `silent`."""

    def __init__(self, *, silent: bool = False) -> None:
        self.requested = 0
        self.silent = silent
        self.status = FakeStatus()
        self.api = ApiClient(
            status=self.status, options=ApiOptions(api_keys=(KEY,)), replan=self.replan
        )

    def replan(self) -> None:
        """Count a request and answer it."""
        self.requested += 1
        self.status.replans += not self.silent


def run(*arguments: str, key: str = "") -> Result:
    runner = CliRunner(env={"COLUMNS": "120", "MTP_API_KEY": key})
    return runner.invoke(commands, ["replan", *arguments])


def test_a_replan_waits_and_shows_its_result() -> None:
    """The command prints the new plan. The key comes from the option or from the environment."""
    cluster = Cluster()
    with serving(cluster.api.app) as url:
        done = run("--url", f"{url}/v1", "--api-key", KEY)
        assert done.exit_code == 0, done.output
        assert done.output == "plan 3 serves. Layers: mac-1 0-3, mac-2 4-7\n"
        assert run("--url", url.removeprefix("http://"), key=KEY).exit_code == 0
        assert cluster.requested == 2


def test_a_replan_without_a_result_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is bounded."""
    monkeypatch.setattr(command, "REPLAN_SECONDS", 0.3)
    with serving(Cluster(silent=True).api.app) as url:
        assert isinstance(run("--url", url, key=KEY).exception, DeadlineError)


def test_mistakes_are_explained() -> None:
    """A missing key and a server without a cluster are errors, and nothing is planned."""
    cluster = Cluster()
    with serving(cluster.api.app) as url:
        with pytest.raises(AccessError, match="--api-key"):
            command.replan(url, None)
        assert cluster.requested == 0
    alone = ApiClient(options=ApiOptions(api_keys=(KEY,)))
    with serving(alone.app) as url, pytest.raises(UsageError, match="single-node mode"):
        command.replan(url, KEY)
