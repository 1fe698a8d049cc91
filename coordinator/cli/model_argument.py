"""The model of a command: an argument, as in `plan builtin`, or an option, as in `plan --model builtin`."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp.checkpoint.hub.resolve import BUILTIN
from proto.errors import UsageError

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A directory, a hub repo, or 'builtin'.", show_default=False
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The same, as an option.")
]


def required_model(argument: str | None, option: str | None) -> str:
    """Return the model named by argument or option. Raises UsageError if none is named, or two."""
    model = _named_model(argument, option)
    if model is None:
        raise UsageError("name one model: a directory, a hub repo, or 'builtin'")
    return model


def model_or_builtin(argument: str | None, option: str | None) -> str:
    """Return the model named by argument or option, or `builtin`. Raises UsageError if two are named."""
    return _named_model(argument, option) or BUILTIN


def _named_model(argument: str | None, option: str | None) -> str | None:
    if argument is not None and option is not None:
        raise UsageError(f"name one model, not both {argument!r} and --model {option!r}")
    return argument if option is None else option
