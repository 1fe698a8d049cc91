"""Commands whose flags are the fields of a dataclass, so that each option is written once.

A field is annotated as `Annotated[int, typer.Option(help=…)]`, and its flag has its name. Two forms are ours:
`Annotated[Span, typer.Option(…), Parsed(Span.parse)]` parses the text of the flag, and
`Annotated[str, typer.Argument(…), typer.Option(…)]` is given by position or by the flag. A tuple is a repeatable flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from proto.errors import UsageError
from proto.kernels import Kernels
from proto.state_dir import STATE_DIR, state_dir
from proto.terminal.config_file import read_flags
from proto.terminal.logs import LOG_FILE, LogFormat, LogLevel

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

LogFileOption = Annotated[
    Path | None,
    typer.Option(LOG_FILE, help="Write the log to this file, which rotates, instead of stderr."),
]

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
    usual: str = "",
    file: str = "",
) -> Callable[[Command[Options]], Callable[..., None]]:
    """Return a decorator that makes a command of typer from a function of the dataclass `options`.

    With `usual`, the help page shows all fields but those named there in a panel of their own. With `file`, flags that
    are not given are read from that file of the state directory, or from the one that --config names.
    """
    hints = get_type_hints(options, include_extras=True)
    flags = [_Flag(field, hints[field.name]) for field in fields(options)]  # type: ignore[arg-type]
    for flag in flags if usual else ():
        if flag.option and flag.field.name not in usual.split():
            flag.option.rich_help_panel = ADVANCED
    parameters = [parameter for flag in flags for parameter in flag.parameters()]
    if file:
        parameters += [_parameter("context", typer.Context, Parameter.empty), _config_parameter(file)]
    signature = Signature(parameters)

    def decorate(command: Command[Options]) -> Callable[..., None]:
        @wraps(command)
        def call(**values: Any) -> None:
            kept = _kept_values(file, flags, values) if file else {}
            given = {k: v for flag in flags for k, v in flag.read(values, kept)}
            command(options(**given))

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

    def read(self, values: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the field's name and value, or nothing for its default. Raises UsageError.

        `kept` are values of a file, for the flags that are not among the given ones.
        """
        name = self.field.name
        if name in kept:
            yield name, self._of_file(kept[name])
            return
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

    def _of_file(self, value: Any) -> Any:
        """Return a value of a file, which has the type of the field or is the text of its flag. Raises UsageError."""
        kinds = [kind for kind in get_args(self.type) or (self.type,) if kind is not type(None)]
        try:
            if self.repeatable:
                return tuple(kinds[0](one) for one in value)
            self._check_range(value)
            if self.parsed is not None:
                is_number = type(value) is int and int in kinds
                return value if is_number else self.parsed.parse(str(value))
            kind = kinds[0] if get_origin(self.type) is not Literal else str
            if (kind is bool) != isinstance(value, bool):
                raise ValueError("true or false is needed, or another flag is meant")
            return kind(value)
        except (ValueError, TypeError) as error:
            flag = self.field.name.replace("_", "-")
            raise UsageError(f"{flag} = {value!r:.80} in the file of flags: {error}") from error

    def _check_range(self, value: Any) -> None:
        """Raise ValueError for a value of a file that typer would refuse on the command line."""
        allowed = get_args(self.parsed.kind) if self.parsed else ()
        if allowed and str(value) not in allowed:
            raise ValueError(f"{' or '.join(allowed)} is needed")
        low, high = (self.option.min, self.option.max) if self.option else (None, None)
        if isinstance(value, int | float) and not ((low is None or value >= low) and (high is None or value <= high)):
            raise ValueError(f"a number from {low} to {high or 'any'} is needed")


def _kept_values(file: str, flags: Sequence[_Flag], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the file of flags for those that the command line and the environment do not set."""
    context: typer.Context = values.pop("context")
    given: Path | None = values.pop("config")
    place = given or state_dir(values.get("state_dir")) / file
    if given is not None and not given.is_file():
        raise UsageError(f"--config {given}: no such file")
    found = read_flags(place, {flag.field.name for flag in flags})

    def is_set(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")

    if found:
        typer.echo(f"flags from {place}: {', '.join(found)}", err=True)
    names = {name for name in found if is_set(name) or is_set(name + _BY_POSITION)}
    return {name: value for name, value in found.items() if name not in names}


def _config_parameter(file: str) -> Parameter:
    option = typer.Option(
        "--config",
        help=f"File of flags, as service install writes it.  [default: {file} in the state directory]",
        rich_help_panel=ADVANCED,
    )
    return _parameter("config", Annotated[Path | None, option], None)


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
