"""The commands of `mtp-coord`.

A command is a function, whose signature typer reads. Its file is imported when the command is called. So
`mtp-coord --help` answers at once, and a command imports its modules at the top of its file.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from proto.terminal import console

PROGRAM = "mtp-coord"

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo_command", "Run a whole cluster on this machine with the built-in model."),
    "generate": (
        "generate_command",
        "Generate text from one prompt in this process, without workers.",
    ),
    "serve": ("serve_command", "Serve a model to OpenAI clients at http://HOST:PORT/v1."),
    "status": (
        "cluster_commands",
        "Show a cluster: nodes, layers, memory, health, tokens a second, acceptance.",
    ),
    "load": ("cluster_commands", "Serve another model without a restart."),
    "trace": ("cluster_commands", "Write the path of every frame of the last seconds to a file."),
    "plan": (
        "plan_command",
        "Show how a model would be split over your Macs, and the predicted speed.",
    ),
    "convert": (
        "convert_commands",
        "Convert a checkpoint for MLX, and keep its MTP head and its vision part.",
    ),
    "add-mtp": ("convert_commands", "Add the MTP head to an MLX checkpoint that lacks it."),
    "doctor": (
        "doctor_command",
        "Check this machine, its kernels and its workers, and print advice.",
    ),
    "token": (
        "trust_commands",
        "Create, list or revoke the tokens with which machines join the cluster.",
    ),
    "node": ("trust_commands", "List the machines of the cluster, or remove one."),
    "key": ("trust_commands", "Create, list or revoke the API keys of HTTP clients."),
    "ca": ("trust_commands", "Rotate the certificate authority of the cluster."),
    "models": (
        "model_commands",
        "List the models on this machine that can be served, and the problems of the others.",
    ),
    "inspect": (
        "model_commands",
        "Show a checkpoint's layers, sizes, quantization and MTP head.",
    ),
}
"""The file and the line on the help page of every command, in the order in which a new user needs them."""


def import_command(name: str) -> TyperCommand:
    """Import the file of the command `name`, and return the command."""
    function = name.replace("-", "_")
    module = import_module(f"{__name__}.{COMMANDS[name][0]}")
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    alone.command(name)(getattr(module, function))
    command = get_command(alone)
    assert isinstance(command, TyperCommand)
    return command


class LazyGroup(TyperGroup):
    """A group that shows the summaries of commands, and loads a command when it is called."""

    def resolve_command(
        self, ctx: Any, args: list[str]
    ) -> tuple[str | None, TyperCommand | None, list[str]]:
        """Return the loaded command that `args` name. See click."""
        name, known, rest = super().resolve_command(ctx, args)
        return name, import_command(name) if name and known else None, rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _name, (_, _summary) in COMMANDS.items():
    app.command(_name, help=_summary)(lambda: None)  # until its file is imported


@app.callback()
def coordinator(version: Annotated[bool, console.version_option(PROGRAM)] = False) -> None:
    """Serve one Qwen model from several machines, drafting with the model's own MTP head.

    Start mtp-worker on each machine, then mtp-coord serve on one of them. Without workers the same engine
    runs in this process. `--model builtin` names the small model that ships with this program.
    """


def main() -> None:
    """Entry point of `mtp-coord`."""
    console.run_process(PROGRAM, lambda: app(prog_name=PROGRAM))
