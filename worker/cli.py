"""`mtp-worker`: the command line of one worker process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import typer

from proto.announcement import JOIN_PREFIX
from proto.state_dir import state_dir
from proto.terminal import console
from proto.terminal.config_file import kept_flags
from proto.terminal.logs import configure
from proto.terminal.options import takes_options
from proto.terminal.user_service import Service, service_app
from worker.node.options import PROGRAM, WorkerOptions

app = typer.Typer(
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


CONFIG, USUAL = "worker.toml", "layers model listen name memory_limit join version"


@app.command()
@takes_options(WorkerOptions, usual=USUAL, file=CONFIG)
def worker(options: WorkerOptions) -> None:
    """Hold some of a model's layers and run them for a coordinator.

    Start one on each machine, then `mtp-coord serve` on one of them. On Ctrl-C or SIGTERM the worker waits until the
    coordinator has planned without it, and ends.
    """
    configure(options.log_level, options.log_format, file=options.log_file)
    options.check()
    # It imports MLX, which --help and a wrong flag do not need.
    from worker.node.process import run

    asyncio.run(run(options))


def _service(state: Path) -> Service:
    return Service(PROGRAM, (), state)


service = service_app("Run mtp-worker as a service, at every login.", _service)


@service.command()
@takes_options(WorkerOptions, usual=USUAL)
def install(options: WorkerOptions) -> None:
    """Start mtp-worker with these flags, now and at every login. The flags are kept in worker.toml.

    With --join the machine joins now. The service needs no token.
    """
    options.check()
    state = state_dir(options.state_dir).absolute()
    if options.join:
        from worker.node.process import join_now

        asyncio.run(join_now(options))
    file = _service(state).install(kept_flags(state / CONFIG, options))
    typer.echo(f"{file}: installed and started. Its log: {PROGRAM} service logs")


def main() -> None:
    """Entry point of `mtp-worker`, also of `mtp-worker service`."""
    words = _with_join(sys.argv[1:])
    if words[:1] == ["service"]:
        console.run_process(PROGRAM, lambda: service(words[1:], prog_name=f"{PROGRAM} service"))
    console.run_process(PROGRAM, lambda: app(words, prog_name=PROGRAM))


def _with_join(words: list[str]) -> list[str]:
    """Return the arguments with one --join before a token, which users paste alone or with the line that shows it."""
    found: list[str] = []
    for word in words:
        if JOIN_PREFIX in word and not word.startswith("--join="):
            while found and found[-1] in (PROGRAM, "join", "--join"):
                found.pop()
            found.append("--join")
        found.append(word)
    return found
