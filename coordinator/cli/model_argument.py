"""A model named as an argument, `plan builtin`, or as all other commands have it, `plan --model builtin`."""

from __future__ import annotations

from typing import Annotated

import typer

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


def the_model(argument: str | None, option: str | None) -> str:
    """The model named in either way. Raises UsageError when none is, or two are."""
    if (argument is None) == (option is None):
        raise UsageError("name one model: a directory, a hub repo, or 'builtin'")
    return argument or option or ""
