"""The flags of mtp-worker and mtp-coord, and the command lines in the pages and service files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from typer.main import get_command

from coordinator.cli import COMMANDS, app, import_command
from worker.cli import app as worker_app

PROGRAMS = ("mtp-worker", "mtp-coord")
_END_OF_COMMAND = {"|", "||", "&", "&&", ";", ">", "2>", "<", "#"}
_FENCE = re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
_CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


@dataclass(frozen=True)
class CommandLine:
    """One call of one of this project's programs, as a page or a service file shows it."""

    source: str
    program: str
    args: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source}: {' '.join([self.program, *self.args])}"

    @property
    def command(self) -> str | None:
        """The command of mtp-coord. None for mtp-worker, or if the line names no command."""
        if self.program == "mtp-worker" or not self.args or self.args[0].startswith("-"):
            return None
        return self.args[0]

    def unknown_flags(self) -> list[str]:
        """Return the flags that the program does not have. Raises KeyError if the command does not exist."""
        known = {"--help", "-h", "--version"}
        if self.program == "mtp-worker":
            known |= {flag for param in get_command(worker_app).params for flag in _flags(param)}
        elif self.command is not None:
            known |= _flags_of_command(self.command)
        else:
            known |= {flag for param in get_command(app).params for flag in _flags(param)}
        given = [arg.partition("=")[0] for arg in self.args if re.match(r"-{1,2}[a-z]", arg)]
        return [flag for flag in given if flag not in known]


def _flags_of_command(name: str) -> set[str]:
    if name not in COMMANDS:
        raise KeyError(f"mtp-coord has no command {name!r}")
    command = import_command(name)
    inner = getattr(command, "commands", {}).values()
    return {flag for one in (command, *inner) for param in one.params for flag in _flags(param)}


def _flags(param: object) -> Iterator[str]:
    yield from getattr(param, "opts", [])
    yield from getattr(param, "secondary_opts", [])


def from_words(source: str, words: Sequence[str]) -> CommandLine | None:
    """Return the call that `words` make, or None if they call another program. A path before the program is dropped."""
    program = words[0].rpartition("/")[2] if words else ""
    if program not in PROGRAMS:
        return None
    end = next((i for i, word in enumerate(words) if word in _END_OF_COMMAND), len(words))
    return CommandLine(source, program, tuple(words[1:end]))


def from_shell(source: str, text: str) -> Iterator[CommandLine]:
    """Yield every call in a piece of shell. Prompts such as `mac-1 $`, comments and continued lines are understood."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        command = re.sub(r"^\S* ?\$ ", "", line.strip())
        words = shlex.split(command.replace("…", ""), comments=True) if "mtp-" in command else []
        if found := from_words(source, words):
            yield found


def from_markdown(source: str, text: str) -> Iterator[CommandLine]:
    """Yield every call in the fenced blocks and code spans of a page."""
    for block in _FENCE.findall(text):
        yield from from_shell(source, block)
    for span in _CODE_SPAN.findall(_FENCE.sub("", text)):
        yield from from_shell(source, span.replace("\n", " "))
