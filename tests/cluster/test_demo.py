"""`mtp-coord demo` runs a whole cluster, prints an answer with its figures, and leaves no process running."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from coordinator.cli import PROGRAM, app
from coordinator.cli.demo_command import _chat
from proto.terminal import console
from tests.support.processes.processes import WITHOUT_TORCH

DEMO_SECONDS = 180.0
"""Five processes import MLX: ten seconds on two idle cores, and minutes where others work."""

PROMPT = "def at(x, y): return x[i] + y[a:key:b] if x[/i] else"
"""Brackets and colons that mean something to rich."""

QUESTION = "Write a function that adds two numbers."

COMMAND = [
    sys.executable,
    "-c",
    f"{WITHOUT_TORCH}; from coordinator.cli import main; main()",
    "demo",
]


@contextmanager
def demo(*flags: str, terminal: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run the demo in a session of its own, to find the processes it starts.

    It reads from and writes to `terminal`, or has no terminal."""
    with subprocess.Popen(
        [*COMMAND, *flags],
        stdin=subprocess.DEVNULL if terminal is None else terminal,
        stdout=subprocess.DEVNULL if terminal is None else terminal,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            for left in descendants(process.pid):
                left.kill()
            process.kill()


class Terminal:
    """The user's end of a terminal."""

    def __init__(self) -> None:
        self.person, self.program = os.openpty()
        self._shown = b""

    @property
    def text(self) -> str:
        """Return the text on the terminal, without colours."""
        return STYLE.sub("", self._shown.decode(errors="replace")).replace("\r", "")

    def look(self) -> None:
        """Record what is on the terminal."""
        while select.select([self.person], [], [], 0)[0]:
            self._shown += os.read(self.person, 65536)

    def type(self, text: str) -> None:
        os.write(self.person, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.person)
        os.close(self.program)


STYLE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def descendants(pid: int) -> list[psutil.Process]:
    """Return every living process that `pid` started, directly or not."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def words_of(processes: list[psutil.Process]) -> set[str]:
    """Return every word of the command lines of these processes."""
    words: set[str] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words |= set(process.cmdline())
    return words


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Return `refused(status, *flags)`, which runs the demo in this process and returns its stderr."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no Python today' >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    handler = signal.getsignal(signal.SIGTERM)

    def run(status: int, *flags: str) -> str:
        with pytest.raises(SystemExit) as end:
            console.run(PROGRAM, lambda: app(["demo", *flags], prog_name=PROGRAM))
        assert end.value.code == status
        return capsys.readouterr().err

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_an_invalid_mode_is_refused_before_anything_starts(refused: Callable[..., str]) -> None:
    """An invalid mode ends with status 2 and the valid modes, before any process starts."""
    assert "--mtp 'banana': write auto" in refused(2, "--mtp", "banana")


@pytest.mark.timeout(60)
def test_a_program_that_ends_at_once_is_not_waited_for(refused: Callable[..., str]) -> None:
    """A process that ends early ends the demo with status 1 and its last lines."""
    assert "worker-1 ended with status 3: no Python today" in refused(1, "--workers", "1")


@pytest.mark.timeout(DEMO_SECONDS + 60)
def test_the_demo_from_start_to_end() -> None:
    """The demo prints text, accepted drafts and the stages, chats on a terminal, and ends all its processes."""
    flags = ("--max-tokens", "24", "--prompt", PROMPT)
    with Terminal() as terminal, demo(*flags, terminal=terminal.program) as process:
        started: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + DEMO_SECONDS
        typing = [f"{QUESTION}\n", "\x04"]
        seen = 0
        while process.poll() is None and time.monotonic() < deadline:
            started |= {child.pid: child for child in descendants(process.pid)}
            terminal.look()
            if typing and terminal.text[seen:].endswith("\n> "):
                seen = len(terminal.text)
                terminal.type(typing.pop(0))
            time.sleep(0.1)
        terminal.look()
        output = terminal.text
        assert process.returncode == 0, output
    head, _, chat = output.partition("Chat with it")
    assert not typing, output
    _, question, answer = chat.partition(f"> {QUESTION}\n")
    assert question, chat
    assert answer.rpartition("\n> ")[0].strip(), chat
    output = head
    assert PROMPT in output
    assert re.search(r"24 tokens, first after [\d.]+ s, then [\d.]+ tokens/s", output), output
    assert re.search(r"\d+ % of \d+ drafts accepted", output), output
    rows = re.findall(r"(worker-\d) +(\d)-(\d) ", output)
    assert {name for name, _, _ in rows} == {"worker-1", "worker-2", "worker-3"}
    layers = sorted(n for _, a, b in rows for n in range(int(a), int(b) + 1))
    assert layers == list(range(8)), output
    assert len(started) >= 4  # some run a program for a moment, to know their hardware
    assert not any(child.is_running() for child in started.values())


def test_a_chat_shows_all_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning in the chat is dim and no part of the next turn."""
    asked: list[dict[str, Any]] = []
    questions = iter(["first?", "second?", ""])
    said = {"first?": ({"reasoning_content": "let me [see]"}, {"content": "an [answer]"})}

    def events(client: object, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        asked.append(json.loads(json.dumps(body)))
        for delta in said.get(body["messages"][-1]["content"], ()):
            yield {"choices": [{"delta": delta}]}

    monkeypatch.setattr("coordinator.cli.demo_command.stream_events", events)
    monkeypatch.setattr("coordinator.cli.demo_command._ask", lambda console: next(questions))
    shown = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False
    )
    with httpx.Client() as client:
        _chat(client, shown)
    assert isinstance(shown.file, io.StringIO)
    assert "\x1b[2mlet me [see]\x1b[0man [answer]\n" in shown.file.getvalue()
    assert [body["chat_template_kwargs"] for body in asked] == [{"enable_thinking": False}] * 2
    assert [turn["content"] for turn in asked[1]["messages"]] == [
        "first?",
        "an [answer]",
        "second?",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.timeout(DEMO_SECONDS + 120)
def test_the_demo_interrupted(number: signal.Signals) -> None:
    """An interrupted demo ends all its processes."""
    with demo("--workers", "1", "--max-tokens", "4000") as process:
        deadline = time.monotonic() + DEMO_SECONDS
        while not {"--listen", "serve"} <= words_of(started := descendants(process.pid)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(DEMO_SECONDS) != 0
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
