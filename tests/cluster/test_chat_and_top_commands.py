"""`mtp-coord chat` and `mtp-coord top` against a server, and shell completion of both programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from coordinator.api.request.context import ApiOptions
from coordinator.cli import chat_command, top_command
from proto.errors import AccessError, NotReadyError
from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator

KEY = "secret-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve an app with an API key over a fake generator."""
    generator = FakeGenerator(tiny_tokenizer(), text="I think.</think>Hello world, how are you?")
    with serving(ApiClient(generator, options=ApiOptions(api_keys=(KEY,))).app) as url:
        yield url


def run(command: object, *arguments: str, text: str = "") -> Result:
    """Run one command in this process, without a key in the environment."""
    app = typer.Typer(add_completion=False)
    app.command("command")(command)  # type: ignore[type-var]
    env = {"COLUMNS": "120", "MTP_API_KEY": ""}
    return CliRunner(env=env).invoke(app, arguments, input=text)


def test_chat_answers_with_figures(url: str) -> None:
    """Commands change the request, and each answer has its figures and seed."""
    done = run(
        chat_command.chat,
        *("--url", url, "--api-key", KEY),
        text="/seed 7\nHi\n/retry\n/mtp\n/nonsense\n/quit\nnever sent\n",
    )
    assert done.exit_code == 0, done.output
    assert done.output.count("Hello world, how are you?") == 2
    assert done.output.count("seed 7") == 2
    assert "drafts kept" in done.output
    assert "mtp auto: 80% / 50%" in done.output
    assert "/nonsense: there is no such command" in done.output


def test_top_prints_one_screen(url: str) -> None:
    """Without a terminal one screen is printed."""
    done = run(top_command.top, "--url", url, "--api-key", KEY)
    assert done.exit_code == 0, done.output
    for part in ("mac-1", "0-3", "12.5", "it holds another checkpoint", "41.5"):
        assert part in done.output


@pytest.mark.parametrize("command", [chat_command.chat, top_command.top])
def test_errors_come_before_the_first_question(command: object, url: str) -> None:
    """A refused key and a wrong port are errors at once."""
    assert isinstance(run(command, "--url", url).exception, AccessError)
    assert isinstance(run(command, "--port", "9").exception, NotReadyError)


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        ("mtp-coord", "mtp-coord rep", "replan"),
        ("mtp-coord", "mtp-coord serve --single", "--single-node"),
        ("mtp-worker", "mtp-worker --mem", "--memory-limit"),
    ],
)
def test_shells_complete_commands_and_flags(program: str, words: str, expected: str) -> None:
    """Both programs complete in bash; the flags of a command come from its own file."""
    path = Path(sys.executable).with_name(program)
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    env = {
        **os.environ,
        variable: "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run([path], env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == [expected]
