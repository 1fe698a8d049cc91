"""`mtp-worker`: the command line of one worker process."""

from __future__ import annotations

import asyncio

import typer

from proto.terminal import console
from proto.terminal.logs import configure
from proto.terminal.options import takes_options
from worker.node.options import PROGRAM, WorkerOptions

app = typer.Typer(
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@takes_options(WorkerOptions, usual="layers model listen name memory_limit join version")
def worker(options: WorkerOptions) -> None:
    """Hold some of a model's layers and run them for a coordinator.

    Start one on each machine, then `mtp-coord serve` on one of them. On Ctrl-C or SIGTERM the worker waits until the
    coordinator has planned without it, and ends.
    """
    configure(options.log_level, options.log_format)
    options.check()
    # It imports MLX, which --help and a wrong flag do not need.
    from worker.node.process import run

    asyncio.run(run(options))


def main() -> None:
    """Entry point of `mtp-worker`."""
    console.run_process(PROGRAM, lambda: app(prog_name=PROGRAM))
