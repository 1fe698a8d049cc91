"""Commands whose flags are the fields of a dataclass, so that each option is written once.

A field is annotated as `Annotated[int, typer.Option(help=…)]`, and its flag has its name. Two forms are ours:
`Annotated[Span, typer.Option(…), Parsed(Span.parse)]` parses the text of the flag, and
`Annotated[str, typer.Argument(…), typer.Option(…)]` is given by position or by the flag. A tuple is a repeatable flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from proto.control import Kernels
from proto.errors import UsageError
from proto.state_dir import STATE_DIR
from proto.terminal.logs import LogFormat, LogLevel

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar=STATE_DIR,
        help="Directory of the cluster's certificates and keys.",
        show_default="the user's state directory",
    ),
]

KernelsOption = Annotated[
    Kernels,
    typer.Option(help="This project's kernels, MLX's operations, or on a Mac the faster ones."),
]
LogLevelOption = Annotated[LogLevel, typer.Option(help="Least severity to log.")]
LogFormatOption = Annotated[LogFormat, typer.Option(help="Log lines for people or as JSON.")]

Options = TypeVar("Options")
Command = Callable[[Options], None]


@dataclass(frozen=True)
class Parsed:
    """The parser of a flag's text. `kind` is the type that typer checks, such as a Literal of texts."""

    parse: Callable[[str], Any]
    kind: Any = str


_BY_POSITION = "_by_position"
"""Suffix of the parameter that holds the value of a field that is given by position."""


ADVANCED = "Advanced"
"""The panel of the help page with the flags that few need."""


def takes_options(
    options: type[Options],
    removed: Mapping[str, str] | None = None,
    usual: str = "",
) -> Callable[[Command[Options]], Callable[..., None]]:
    """Return a decorator that makes a command of typer from a function of the dataclass `options`.

    `removed` has the advice for flags of earlier releases, by `--flag` or `--flag VALUE`. They raise UsageError. With
    `usual`, the help page shows all fields but those named there in a panel of their own.
    """
    hints = get_type_hints(options, include_extras=True)
    flags = [_Flag(field, hints[field.name]) for field in fields(options)]  # type: ignore[arg-type]
    for flag in flags if usual else ():
        if flag.option and flag.field.name not in usual.split():
            flag.option.rich_help_panel = ADVANCED
    parameters = [parameter for flag in flags for parameter in flag.parameters()]
    parameters += [_removed_parameter(*entry) for entry in (removed or {}).items()]
    signature = Signature(parameters)

    def decorate(command: Command[Options]) -> Callable[..., None]:
        @wraps(command)
        def call(**values: Any) -> None:
            command(options(**{k: v for flag in flags for k, v in flag.read(values)}))

        vars(call)["__signature__"] = signature
        return call

    return decorate


class _Flag:
    """The parameters of typer for one field, and the value of the field from their values."""

    def __init__(self, field: Field[Any], hint: Any) -> None:
        self.field = field
        self.type, *metadata = get_args(hint)
        self.repeatable = get_origin(self.type) is tuple
        self.argument = next((m for m in metadata if isinstance(m, ArgumentInfo)), None)
        option = next((m for m in metadata if isinstance(m, OptionInfo)), None)
        self.option = copy(option)  # other commands have the same one
        if self.option and self.type is bool:
            self.option.metavar = ""  # typer shows <bool>
        self.parsed = next((m for m in metadata if isinstance(m, Parsed)), None)
        self.default = Parameter.empty if field.default is MISSING else field.default

    def parameters(self) -> Iterator[Parameter]:
        kind, default = self.type, self.default
        if self.parsed is not None:
            kind, default = self.parsed.kind | None, None if default is None else str(default)
        elif self.repeatable:
            kind, default = list[get_args(self.type)[0]] | None, None  # type: ignore[misc]
        elif self.argument and self.option:
            kind, default = kind | None, None
        if self.argument:
            name = self.field.name + _BY_POSITION
            yield _parameter(name, Annotated[kind, self.argument], default)
        if self.option:
            yield _parameter(self.field.name, Annotated[kind, self.option], default)

    def read(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the field's name and value, or nothing for its default. Raises UsageError."""
        name = self.field.name
        value, placed = values.get(name), values.get(name + _BY_POSITION)
        if value is not None and placed is not None:
            raise UsageError(f"name one {name}, not both {placed!r} and --{name} {value!r}")
        value = placed if value is None else value
        if value is not None:
            value = self.parsed.parse(value) if self.parsed else value
            yield name, tuple(value) if self.repeatable else value
        elif self.default is Parameter.empty:
            assert self.argument is not None
            raise UsageError(f"name a {name}. {self.argument.help}")


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _removed_parameter(flag: str, advice: str) -> Parameter:
    flag, takes_value, _ = flag.partition(" ")

    def refuse(given: object) -> None:
        if given:
            raise UsageError(f"{flag} was removed. {advice}")

    name = flag.removeprefix("--").replace("-", "_")
    option = typer.Option(flag, hidden=True, callback=refuse)
    kind, default = (str | None, None) if takes_value else (bool, False)
    return _parameter(name, Annotated[kind, option], default)
