"""`mtp-worker`: the command line of one worker process."""

from __future__ import annotations

from typing import Annotated

import typer

from proto import console

PROGRAM = "mtp-worker"

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(console.version_line(PROGRAM))
        raise typer.Exit


@app.command()
def worker(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Hold some of a model's layers and run them for a coordinator."""


def main() -> None:
    """Entry point of `mtp-worker`."""
    console.run(PROGRAM, lambda: app(prog_name=PROGRAM))
