"""`mtp-coord launch` without the programs themselves, which `make clients` installs and starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import import_command
from coordinator.serve.client_settings import AGENTS, Endpoint, other_clients
from coordinator.web.context import ApiOptions
from proto.errors import AccessError, NotReadyError, UsageError
from tests.support.api.api_client import ApiClient
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeStatus

SERVER = Endpoint("http://10.0.0.1:8080", "a-key", "org/model", 100_000)


@pytest.fixture
def url() -> Iterator[str]:
    with serving(ApiClient(options=ApiOptions(api_keys=("a-key",))).app) as found:
        yield found


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pretend that every program is installed, and record what is started."""
    found: list[Any] = []
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MTP_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("os.execve", lambda *call: found.extend(call))
    return found


def launch(*words: str) -> None:
    import_command("launch").main(list(words), standalone_mode=False)


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_gets_address_key_model_and_context(name: str) -> None:
    """Its settings have all four, and none of its user's files is among them."""
    setup = AGENTS[name].setup(SERVER)
    whole = json.dumps([setup.arguments, dict(setup.variables), dict(setup.files)])
    for part in ("http://10.0.0.1:8080", "a-key", "org/model"):
        assert part in whole, part
    assert "100000" in whole or "75000" in whole  # the prompt's part of it
    assert all("/" not in file for file in setup.files)
    assert "DIR" not in setup.placed("/tmp/x").text(name).replace("GLOBAL_DATA", "")
    assert not [text for _, _, text in other_clients(SERVER) if "10.0.0.1" not in text]


def test_a_program_is_started_with_its_arguments(url: str, started: list[Any], tmp_path: Path) -> None:
    """Files are private and in the state directory, and a variable that would lead elsewhere is gone."""
    launch("claude", "--url", url, "--api-key", "a-key", "--", "--continue")
    program, arguments, environment = started
    file = tmp_path / "state" / "launch" / "claude" / "settings.json"
    assert program == "/bin/claude"
    assert arguments == [program, "--settings", str(file), "--continue"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text())["env"]["ANTHROPIC_BASE_URL"] == url
    assert environment["ANTHROPIC_MODEL"] == "tiny"
    assert "ANTHROPIC_API_KEY" not in environment
    assert not (tmp_path / "home").exists()


def test_the_cost_of_the_first_turn_is_said_before_the_start(
    url: str, started: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time follows the measured speed of prompts. Without one it is not said, and the agent starts."""
    launch("claude", "--url", url, "--api-key", "a-key")
    assert "about 28,000 tokens. Computing it takes a while, once\n" in capsys.readouterr().err
    served = FakeStatus.status
    monkeypatch.setattr(FakeStatus, "status", lambda self: replace(served(self), prompt_tokens_per_second=373.0))
    launch("claude", "--url", url, "--api-key", "a-key")
    assert "about 28,000 tokens: about 75 s once, then kept\n" in capsys.readouterr().err
    launch("goose", "--url", url, "--api-key", "a-key")
    assert "prompt" not in capsys.readouterr().err
    assert len(started) == 9


def test_a_users_own_files_are_never_written(url: str, started: list[Any], tmp_path: Path) -> None:
    """A start writes into the state directory only, as often as it is made. There is no option for more."""
    own = tmp_path / "home" / ".claude" / "settings.json"
    own.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").write_text("{}")
    own.symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "home").rglob("*"))
    for agent in (*AGENTS, *AGENTS):
        launch(agent, "--url", url, "--api-key", "a-key")
    assert sorted((tmp_path / "home").rglob("*")) == before
    assert own.is_symlink()
    assert own.read_text() == "{}"
    with pytest.raises(Exception, match="No such option: --write"):
        launch("claude", "--url", url, "--api-key", "a-key", "--write")
    assert started


def test_what_is_missing_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown program, one that is not installed, a key, and a server that is not there."""
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(UsageError, match=r"no such program\. Known are claude, codex"):
        launch("cursor", "--url", url)
    with pytest.raises(UsageError, match="Install it: npm install --global @openai/codex"):
        launch("codex", "--url", url, "--api-key", "a-key")
    with pytest.raises(AccessError, match=r"needs a key\. Create one"):
        launch("codex", "--url", url)
    with pytest.raises(NotReadyError, match="no coordinator answers"):
        launch("codex", "--url", "127.0.0.1:1")


def test_the_settings_are_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    launch("opencode", "--url", url, "--api-key", "a-key", "--show")
    shown = capsys.readouterr().out
    assert "export MTP_CLUSTER_KEY=a-key" in shown
    assert shown.splitlines()[-1] == "opencode"
