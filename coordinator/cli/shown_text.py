"""Text of an answer on stdout, with reasoning dimmed on a terminal and left out of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from coordinator.text.chat_parser import Content, Part, Reasoning

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class ShownText:
    """The text printed so far. With `enabled` False nothing is printed."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.content = ""
        self._enabled = enabled
        self._terminal = sys.stdout.isatty()
        self._in_reasoning = False

    def show_parts(self, parts: Sequence[Part]) -> None:
        """Print the parts of a chat answer."""
        for part in parts:
            match part:
                case Reasoning(text):
                    self.show_reasoning(text)
                case Content(text):
                    self.show_content(text)

    def show_reasoning(self, text: str) -> None:
        """Print reasoning in dim characters on a terminal, and not at all in a pipe."""
        if text and self._terminal:
            self._in_reasoning = True
            self._write(f"{DIM}{text}{PLAIN}")

    def show_content(self, text: str) -> None:
        """Print text of the answer. After reasoning it starts in a new paragraph."""
        if not text:
            return
        if self._in_reasoning:
            self._in_reasoning = False
            self._write("\n\n")
        self.content += text
        self._write(text)

    def end_line(self) -> None:
        """End the last line, unless it has ended."""
        if not self.content.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        if self._enabled:
            sys.stdout.write(text)
            sys.stdout.flush()
