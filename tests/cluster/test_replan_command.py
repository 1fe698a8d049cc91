"""`mtp-coord replan` against a server with a cluster, one without, and none."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from coordinator.api.context import ApiOptions
from coordinator.cli import app as commands
from coordinator.cli import replan_command as command
from proto.errors import AccessError, NotReadyError, ProtocolError
from tests.support.api.api_client import ApiClient
from tests.support.api.api_server import serving

KEY = "secret-key"


def app(replan: Callable[[], None] | None) -> ApiClient:
    return ApiClient(options=ApiOptions(api_keys=(KEY,)), replan=replan)


def run(*arguments: str, key: str = "") -> Result:
    runner = CliRunner(env={"COLUMNS": "120", "MTP_API_KEY": key})
    return runner.invoke(commands, ["replan", *arguments])


def test_a_plan_is_asked_for_once() -> None:
    """With a key, by option or environment; the command says that it has begun."""
    asked: list[str] = []
    with serving(app(lambda: asked.append("replan")).app) as url:
        done = run("--url", url, "--api-key", KEY)
        assert done.exit_code == 0, done.output
        assert done.output.startswith("looking for a better plan"), done.output
        assert asked == ["replan"]
        assert run("--url", url, key=KEY).exit_code == 0
        assert len(asked) == 2


def test_what_goes_wrong_says_what_to_do() -> None:
    """No key, a server without a cluster, no server: told so, and nothing is planned."""
    asked: list[str] = []
    with serving(app(lambda: asked.append("replan")).app) as url:
        with pytest.raises(AccessError, match="--api-key"):
            command.replan(url, None)
        assert asked == []
    with serving(app(None).app) as url, pytest.raises(ProtocolError, match="serve with workers"):
        command.replan(url, KEY)
    with socket.socket() as taken:  # nobody listens there, and nobody else will
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(NotReadyError, match="start mtp-coord serve"):
            command.replan(f"http://127.0.0.1:{port}", None)
