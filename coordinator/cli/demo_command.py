"""`mtp-coord demo`: a cluster of real processes on this machine, one streamed answer, the status, and a chat."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console

from coordinator.cli.cluster_commands import parse, render
from coordinator.trust.keys import API_KEY
from proto.errors import WorkerLostError
from proto.rpc.listener import bind_listener
from proto.state_dir import STATE_DIR

PROMPT = 'def read_config(path):\n    """Read the configuration file and return a dictionary."""\n'
"""Text to continue. The built-in model was trained on Python and little else."""

QUESTION = "Why is the sky blue? Answer in two sentences."
"""The question for a model that `--model` names, which has to have a chat template."""

BUILTIN = "builtin"

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 2}
"""Sampling of the answer. With greedy decoding a model of this size soon repeats itself."""

START_SECONDS = 120.0
"""Seconds. Deadline for a process to be ready. Importing MLX on a busy machine takes some of them."""

STOP_SECONDS = 15.0
"""Seconds. Deadline for a process to end after SIGTERM, before it is killed."""

REPLY_SECONDS = 300.0
"""Seconds without a byte of an answer after which the demo fails."""


@dataclass(frozen=True)
class Program:
    """A running program of the demo, and the file of its JSON log."""

    process: subprocess.Popen[bytes]
    log: Path


def demo(
    workers: Annotated[int, typer.Option(min=1, max=8, help="Worker processes to start.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 120,
    model: Annotated[str, typer.Option(help="Directory or repo of a model that answers a question.")] = BUILTIN,
) -> None:
    """Run a whole cluster on this machine with the built-in model.

    It streams an answer from it. On a terminal it then serves its page until you press Enter. Everything it started is
    stopped when it ends.
    """
    console = Console(highlight=False, emoji=False)
    # As after Ctrl-C, the started processes are stopped.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtp-demo-")))
        programs: list[Program] = []
        stack.callback(lambda: [program.process.poll() for program in programs])  # they have ended by then
        stack.enter_context(_stopping_children())
        names = [f"worker-{i + 1}" for i in range(workers)]
        port, *ports = _free_ports(workers + 1)
        progress = stack.enter_context(console.status(f"starting {', '.join(names)}, coordinator"))
        options = ["--model", model, "--no-mdns"]
        share = f"{psutil.virtual_memory().total * 3 // 4 // workers}B"
        for name, own in zip(names, ports, strict=True):
            flags = ["--listen", f"127.0.0.1:{own}", "--name", name, "--memory-limit", share, *options]
            programs.append(_start(folder / f"{name}.log", "worker.cli", flags))
        # The coordinator serves as soon as all are there, which on a busy machine takes its time.
        command = ["serve", *options, "--port", str(port), "--wait", "60"]
        command += ["--mtp", "2"] if model == BUILTIN else []
        command += [f"--worker=127.0.0.1:{own}" for own in ports]
        coordinator = _start(folder / "coordinator.log", "coordinator.cli", command)
        programs.append(coordinator)
        for count, program in enumerate(programs[:-1], 1):
            _wait_for(program, "worker ready", "address")
            progress.update(f"starting: {count} of {len(programs)} programs are ready")
        url = _wait_for(coordinator, "serving", "url")
        progress.stop()
        console.print(f"The page: {url.removesuffix('v1')}\n")
        client = stack.enter_context(httpx.Client(base_url=url, timeout=REPLY_SECONDS))
        path, asked, body = "completions", PROMPT, dict[str, Any](prompt=PROMPT)
        if model != BUILTIN:
            path, asked, body = (
                "chat/completions",
                f"{QUESTION}\n",
                {"messages": [{"role": "user", "content": QUESTION}]},
            )
        console.print(asked, style="bold", end="", markup=False, soft_wrap=True)
        _stream(client, console, path, {"model": model, "max_tokens": max_tokens, **SAMPLING, **body})
        console.print(render(parse(client.get(client.base_url.copy_with(path="/status")).content)))
        if sys.stdin.isatty() and sys.stdout.isatty():
            console.print(f"\n[bold]Chat with it in a browser: {url.removesuffix('/v1')}/[/bold]")
            console.input("[dim]Enter ends the demo.[/dim] ")


def _free_ports(count: int) -> list[int]:
    """Return ports that no program uses now."""
    with ExitStack() as stack:
        found = [stack.enter_context(bind_listener("demo", "127.0.0.1", 0)) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


@contextmanager
def _stopping_children() -> Iterator[None]:
    """Stop the processes that the block starts, also one whose start a signal interrupts."""
    before = psutil.Process().children()
    try:
        yield
    finally:
        started = [each for each in psutil.Process().children() if each not in before]
        for process in started:
            process.terminate()
        _, left = psutil.wait_procs(started, STOP_SECONDS)
        for process in left:
            process.kill()


def _start(log: Path, module: str, arguments: list[str]) -> Program:
    """Run `main` of `module` in a process."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()", *arguments, "--log-format", "json"],
            # The user's API key and cluster belong to other servers.
            env={n: v for n, v in os.environ.items() if n != API_KEY} | {STATE_DIR: str(log.parent / "state")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
    return Program(process, log)


def _wait_for(program: Program, message: str, field: str) -> str:
    """Return `field` of the first log record with `message`. Raises WorkerLostError without one in START_SECONDS."""
    name, deadline = program.log.stem, time.monotonic() + START_SECONDS
    while True:
        # First, because the log of an ended program is complete.
        status, said = program.process.poll(), program.log.read_text(errors="replace")
        for line in said.splitlines():
            with suppress(ValueError):  # an incomplete line, or a traceback
                record = json.loads(line)
                if record.get("message") == message and field in record:
                    return str(record[field])
        if status is not None:
            raise WorkerLostError(f"{name} ended with status {status}: {said[-500:].strip()}")
        if time.monotonic() > deadline:
            raise WorkerLostError(f"{name} was not ready after {START_SECONDS:g} s; its log ends with: {said[-500:]}")
        time.sleep(0.1)


def _stream(client: httpx.Client, console: Console, path: str, body: dict[str, Any]) -> None:
    """Stream one answer and print its speed. Raises WorkerLostError for an error of the server."""
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    started, first, tokens = time.monotonic(), 0.0, 0
    with client.stream("POST", path, json=body) as reply:
        if reply.is_error:
            raise WorkerLostError(f"the answer failed: {reply.read().decode(errors='replace')[:300]}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise WorkerLostError(event["error"]["message"])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                first = first or time.monotonic()
                text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                console.print(text, end="", markup=False, soft_wrap=True)
    rate = tokens / max(time.monotonic() - first, 1e-9)
    console.print(f"\n\n[dim]{tokens} tokens, first after {first - started:.2f} s, then {rate:.1f} tokens/s[/dim]\n")
