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

from proto.errors import UsageError
from proto.terminal import console

PROGRAM = "mtp-coord"

START, OPERATE, MODELS, TRUST = "Start", "A running cluster", "Models", "Trust"

COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": (START, "serve_command", "Serve a model to OpenAI clients at http://HOST:PORT/v1."),
    "demo": (START, "demo_command", "Run a whole cluster on this machine with the built-in model."),
    "launch": (
        START,
        "launch_command",
        "Start an agent's program against a running server, with every setting that it needs.",
    ),
    "generate": (START, "generate_command", "Generate text from one prompt in this process, without workers."),
    "status": (
        OPERATE,
        "cluster_commands",
        "Show a cluster: nodes, layers, memory, health, tokens a second, acceptance.",
    ),
    "load": (OPERATE, "cluster_commands", "Serve another model without a restart."),
    "trace": (OPERATE, "cluster_commands", "Write the path of every frame of the last seconds to a file."),
    "bench": (OPERATE, "bench_command", "Measure a running server: first token, time between tokens, streams, drafts."),
    "service": (OPERATE, "service_command", "Run mtp-coord serve as a service, at every login."),
    "doctor": (OPERATE, "doctor_command", "Check this machine, its kernels and its workers, and print advice."),
    "recommend": (
        MODELS,
        "recommend_command",
        "List the published models that fit your Macs, the largest first, each with its best plan.",
    ),
    "pull": (MODELS, "model_commands", "Download a model with its MTP head."),
    "models": (
        MODELS,
        "models_command",
        "List the models on this machine that can be served, and the problems of the others.",
    ),
    "plan": (
        MODELS,
        "plan_command",
        "Show how a model would be split over your Macs, and the predicted speed.",
    ),
    "inspect": (
        MODELS,
        "model_commands",
        "Show a checkpoint's layers, sizes, quantization and MTP head.",
    ),
    "convert": (
        MODELS,
        "convert_commands",
        "Convert a checkpoint for MLX, and keep its MTP head and its vision part.",
    ),
    "add-mtp": (
        MODELS,
        "convert_commands",
        "Add the MTP head to an MLX checkpoint that lacks it.",
    ),
    "token": (
        TRUST,
        "trust_commands",
        "Create, list or revoke the tokens with which machines join the cluster.",
    ),
    "node": (TRUST, "trust_commands", "List the machines of the cluster, or remove one."),
    "key": (TRUST, "trust_commands", "Create, list or revoke the API keys of HTTP clients."),
    "connect": (TRUST, "trust_commands", "Make this machine a client of a cluster."),
    "ca": (TRUST, "trust_commands", "Rotate the certificate authority of the cluster."),
}
"""The group on the help page, the file and the line of every command, in the order in which a new user needs them."""


_SERVE = "Use mtp-coord serve MODEL, which has a page to chat, or mtp-coord generate for one answer without a server"
_JOIN = "On the machine that joins, run the line that mtp-coord token create prints here: mtp-worker --join TOKEN"
OTHER_WORDS = {
    **dict.fromkeys(("run", "start", "chat"), _SERVE),
    **dict.fromkeys(("stop", "quit"), "Press Ctrl-C where mtp-coord serve runs, or use mtp-coord service uninstall"),
    **dict.fromkeys(("list", "ls"), "Use mtp-coord models for the models here, mtp-coord node list for the machines"),
    **dict.fromkeys(("ps", "top"), "Use mtp-coord status"),
    **dict.fromkeys(("join", "worker", "invite"), _JOIN),
    **dict.fromkeys(("download", "get"), "Use mtp-coord pull MODEL"),
    **dict.fromkeys(("help", "version"), "Use mtp-coord --help or mtp-coord --version"),
}
"""Advice for words that are commands of other programs."""


def import_command(name: str) -> TyperCommand | TyperGroup:
    """Import the file of the command `name`, and return the command."""
    function = name.replace("-", "_")
    module = import_module(f"{__name__}.{COMMANDS[name][1]}")
    found = getattr(module, function)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        alone.command(name)(found)
        found = alone
    command = get_command(found)
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


class LazyGroup(TyperGroup):
    """A group that shows the summaries of commands, and loads a command when it is called."""

    def resolve_command(
        self, ctx: Any, args: list[str]
    ) -> tuple[str | None, TyperCommand | TyperGroup | None, list[str]]:
        """Return the loaded command that `args` name. See click. Raises UsageError for a word of other programs."""
        if args and args[0] not in COMMANDS and (advice := OTHER_WORDS.get(args[0])):
            raise UsageError(f"{args[0]} is no command of {PROGRAM}. {advice}")
        name, known, rest = super().resolve_command(ctx, args)
        return name, import_command(name) if name and known else None, rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _name, (_panel, _, _summary) in COMMANDS.items():
    # until its file is imported
    app.command(_name, help=_summary, rich_help_panel=_panel)(lambda: None)


@app.callback()
def coordinator(version: Annotated[bool, console.version_option(PROGRAM)] = False) -> None:
    """Serve one model from several machines: any that mlx-lm has, with drafts by its MTP head where it has one.

    Start mtp-worker on each machine, then mtp-coord serve on one of them. Without workers the same engine
    runs in this process. `--model builtin` names the small model that ships with this program.
    """


def main() -> None:
    """Entry point of `mtp-coord`."""
    console.run_process(PROGRAM, lambda: app(prog_name=PROGRAM))
