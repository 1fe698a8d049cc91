"""`mtp-coord demo`: three workers and a coordinator on this machine, one prompt through HTTP, the figures, a chat.

Everything a cluster does, with real processes and sockets, on the model that ships with this program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from coordinator.cli.status_command import parse, render
from mtp.depth.controller import MtpMode
from proto.errors import WorkerLostError

PROMPT = 'def read_config(path):\n    """Read the configuration file and return a dictionary."""\n'
"""Completed, not chatted about: the built-in model has read Python and little else."""

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 2}
"""Greedily a model of this size soon repeats itself."""

START_SECONDS = 120.0
"""Longest wait for a process to be ready; importing MLX on a busy machine takes seconds."""

STOP_SECONDS = 15.0
REPLY_SECONDS = 300.0


@dataclass(frozen=True)
class Program:
    """One of our programs, running, and the file its JSON log goes to."""

    process: subprocess.Popen[bytes]
    log: Path


def demo(
    workers: Annotated[int, typer.Option(min=1, max=8, help="Worker processes to start.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 120,
    mtp: Annotated[str, typer.Option(help="Drafts a step: auto, off, a number, or filled.")] = "2",
    prompt: Annotated[str, typer.Option(help="Text for the model to continue.")] = PROMPT,
) -> None:
    """Run a whole cluster on this machine with the built-in model, and stream an answer from it.

    On a terminal it then offers a chat. Everything it started is stopped when it ends.
    """
    MtpMode.parse(mtp)
    console = Console(highlight=False, emoji=False)
    signal.signal(signal.SIGTERM, _leave)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtp-demo-")))
        console.print(f"[dim]starting {workers} workers and a coordinator on loopback …[/dim]")
        names = [f"worker-{i + 1}" for i in range(workers)]
        started = [stack.enter_context(_worker(folder, name)) for name in names]
        addresses = [_wait_for(program, "worker ready", "address") for program in started]
        coordinator = stack.enter_context(_coordinator(folder, addresses, mtp))
        url = _wait_for(coordinator, "serving", "url")
        client = stack.enter_context(httpx.Client(base_url=url, timeout=REPLY_SECONDS))
        console.print(f"[dim]serving at {url}[/dim]\n")
        _complete(client, console, prompt, max_tokens)
        _figures(client, console)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _chat(client, console)


def _leave(number: int, _: object) -> None:
    """End as Ctrl-C does, so that what was started is stopped."""
    sys.exit(128 + number)


@contextmanager
def _worker(folder: Path, name: str) -> Iterator[Program]:
    command = ["--listen", "127.0.0.1:0", "--name", name, "--model", "builtin", "--no-mdns"]
    with _process(folder / f"{name}.log", "worker.cli", command) as program:
        yield program


@contextmanager
def _coordinator(folder: Path, addresses: list[str], mtp: str) -> Iterator[Program]:
    command = ["serve", "--model", "builtin", "--port", "0", "--no-mdns", "--mtp", mtp]
    # It serves as soon as all are there, which on a busy machine takes its time.
    command += ["--wait", "60"]
    for address in addresses:
        command += ["--worker", address]
    with _process(folder / "coordinator.log", "coordinator.cli", command) as program:
        yield program


@contextmanager
def _process(log: Path, module: str, arguments: list[str]) -> Iterator[Program]:
    """One of our programs, stopped by its pid when the block ends."""
    start = f"from {module} import main; main()"
    noted: list[int] = []
    # A signal that comes while the process is being made would lose it: nobody could stop it then.
    handlers = {
        number: signal.signal(number, lambda n, _: noted.append(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", start, *arguments, "--log-format", "json"],
            # A key of the user's own servers is not for this one.
            env={name: value for name, value in os.environ.items() if name != "MTP_API_KEY"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for caught in noted[:1]:
            signal.raise_signal(caught)
        yield Program(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)


def _wait_for(program: Program, message: str, field: str) -> str:
    """`field` of the first record that says `message` and has it.

    Raises WorkerLostError when the program ends before, or does not say it in time.
    """
    name, deadline = program.log.stem, time.monotonic() + START_SECONDS
    while True:
        # Asked before the log is read: what a program says last is there once it has ended.
        status, said = program.process.poll(), program.log.read_text(errors="replace")
        for line in said.splitlines():
            record = _record(line)
            if record.get("message") == message and field in record:
                return str(record[field])
        if status is not None:
            raise WorkerLostError(f"{name} ended with status {status}: {said[-500:].strip()}")
        if time.monotonic() > deadline:
            raise WorkerLostError(
                f"{name} was not ready after {START_SECONDS:g} s; its log ends with: {said[-500:]}"
            )
        time.sleep(0.1)


def _record(line: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}  # half a line, or a traceback
    return record


def _complete(client: httpx.Client, console: Console, prompt: str, max_tokens: int) -> None:
    """Stream one completion and say how fast it came."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **SAMPLING}
    body["stream_options"] = {"include_usage": True}
    console.print(prompt, style="bold", end="", markup=False, soft_wrap=True)
    started, first, usage = time.monotonic(), 0.0, None
    for event in _events(client, "/completions", body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            first = first or time.monotonic()
            console.print(choice["text"], end="", markup=False, soft_wrap=True)
    seconds = time.monotonic() - (first or started)
    console.print("\n")
    if usage:
        _usage(console, usage, first - started, seconds)


def _usage(console: Console, usage: dict[str, Any], first: float, seconds: float) -> None:
    details = usage.get("completion_tokens_details") or {}
    kept = details.get("accepted_prediction_tokens", 0)
    drafted = kept + details.get("rejected_prediction_tokens", 0)
    share = f"{100 * kept / drafted:.0f} % of {drafted} drafts kept" if drafted else "no drafts"
    rate = usage["completion_tokens"] / max(seconds, 1e-9)
    console.print(
        f"[dim]{usage['completion_tokens']} tokens, first after {first:.2f} s, "
        f"then {rate:.1f} tokens/s; {share}[/dim]\n"
    )


def _figures(client: httpx.Client, console: Console) -> None:
    root = client.base_url.copy_with(path="/status")
    status = parse(client.get(root).content)
    console.print(render(status))


def _chat(client: httpx.Client, console: Console) -> None:
    """Questions from the terminal until an empty line or the end of input.

    The model is led past its reasoning, where there is little to read of one so small; what it reasons all the same is
    shown dimly.
    """
    console.print(
        "\n[dim]Chat with it: an empty line ends. It has read Python and little else.[/dim]"
    )
    messages: list[dict[str, str]] = []
    while question := _ask(console):
        messages.append({"role": "user", "content": question})
        answer = ""
        body = {
            "messages": messages,
            "max_tokens": 200,
            "temperature": 0.6,
            "stream": True,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        for event in _events(client, "/chat/completions", body):
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                answer += piece
                thought = choice["delta"].get("reasoning_content") or ""
                console.print(thought, style="dim", end="", markup=False, soft_wrap=True)
                console.print(piece, end="", markup=False, soft_wrap=True)
        console.print()
        messages.append({"role": "assistant", "content": answer})


def _ask(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The data of a server-sent event stream. Raises WorkerLostError for an error in it."""
    with client.stream("POST", path.removeprefix("/"), json={"model": "builtin", **body}) as reply:
        if reply.status_code != 200:
            raise WorkerLostError(f"the coordinator refused: {reply.read().decode()[:500]}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise WorkerLostError(str(event["error"].get("message", event["error"])))
            yield event
