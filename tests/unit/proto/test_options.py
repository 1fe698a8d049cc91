"""Commands whose flags are the fields of a dataclass: proto/terminal/options.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from proto.errors import UsageError
from proto.span import Span
from proto.terminal.options import Parsed, takes_options

FOUR = Span(0, 4)


@dataclass(frozen=True)
class Options:
    """One field of each form."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory."), typer.Option()]
    layers: Annotated[Span | None, typer.Option(), Parsed(Span.parse)] = FOUR
    stop: Annotated[tuple[str, ...], typer.Option()] = ()
    port: Annotated[int, typer.Option(min=0, envvar="PORT")] = 8080


def options_of(*words: str, **environment: str) -> Options:
    """Return the options of the words. Raises the errors of the command."""
    found: list[Options] = []
    app = typer.Typer()

    @app.command()
    @takes_options(Options, {"--old": "Use --port."})
    def command(options: Options) -> None:
        found.append(options)

    outcome = CliRunner().invoke(app, words, env=environment, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return found[0]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["m"], {}),
        (["--model", "m"], {}),
        (["m", "--layers", "2-5"], {"layers": Span(2, 6)}),
        (["m", "--stop", "a", "--stop", "b"], {"stop": ("a", "b")}),
        (["m", "--port", "0"], {"port": 0}),
    ],
)
def test_each_flag_sets_its_field(words: list[str], change: dict[str, Any]) -> None:
    """Positions, parsed texts, repeated flags and plain types become the values of the fields."""
    assert vars(options_of(*words)) == vars(Options("m")) | change


def test_the_environment_sets_a_field() -> None:
    """The variable of an option is read."""
    assert options_of("m", PORT="7").port == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--model", "b"], "name one model, not both 'a' and --model 'b'"),
        ([], "name a model. A directory."),
        (["m", "--old"], "--old was removed. Use --port."),
        (["m", "--layers", "x"], "layers 'x'"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], message: str) -> None:
    """Two values, none, a removed flag and an unreadable text are errors that name the flag."""
    with pytest.raises(UsageError) as raised:
        options_of(*words)
    assert message in str(raised.value)
