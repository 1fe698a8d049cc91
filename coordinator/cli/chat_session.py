"""The state of `mtp-coord chat`: the conversation, the parameters, and the commands that change them. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from proto.errors import UsageError

HELP = """\
/seed N          fix the seed; /seed alone makes it random again
/temperature X   set the temperature; also /top_p, /top_k, /min_p, /max_tokens
/system TEXT     set the system message; alone it removes it
/think on|off    switch reasoning, if the model's template has the switch
/retry           answer the last message again
/new             start a new conversation
/mtp             show how many drafts are accepted, by position
/show            show the parameters
/quit            end; so does Ctrl-D. Ctrl-C stops an answer
End a line with \\ to continue it on the next one. A line of \"\"\" starts and ends a text of several lines."""

NUMBERS: dict[str, Callable[[str], float]] = {
    "seed": int,
    "max_tokens": int,
    "top_k": int,
    "temperature": float,
    "top_p": float,
    "min_p": float,
}
"""Commands that set a number, and the type of the number."""

LARGEST_SEED = 2**32
"""Random seeds are below this number: short enough to type again."""

SWITCH = {"on": True, "off": False}


@dataclass
class ChatSession:
    """A conversation with its parameters. `last_seed` is the seed of the last answer."""

    messages: list[dict[str, str]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    system: str = ""
    thinking: bool | None = None
    last_seed: int = 0

    def set_parameter(self, name: str, value: str) -> str:
        """Set or remove a parameter. Return a line about the new state. Raises UsageError for a wrong value."""
        if name == "system":
            self.system = value
            return "system message set" if value else "no system message"
        if name == "think":
            if value not in SWITCH:
                raise UsageError("/think: write /think on or /think off")
            self.thinking = SWITCH[value]
            return f"reasoning {value}"
        if not value:
            self.numbers.pop(name, None)
            return f"{name}: the server's default" if name != "seed" else "seed: random"
        try:
            self.numbers[name] = NUMBERS[name](value)
        except ValueError:
            raise UsageError(f"/{name} {value}: write a number") from None
        return f"{name}: {value}"

    def body(self) -> dict[str, Any]:
        """Return the request for an answer to the last message. A random seed is chosen here, to be shown later."""
        self.last_seed = int(self.numbers.get("seed", secrets.randbelow(LARGEST_SEED)))
        first = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            **self.numbers,
            "seed": self.last_seed,
            "messages": [*first, *self.messages],
            "stream_options": {"include_usage": True},
        }
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return body

    def add_message(self, text: str) -> None:
        """Add a message of the user."""
        self.messages.append({"role": "user", "content": text})

    def add_answer(self, text: str, *, complete: bool = True) -> None:
        """Add the answer of the model. An incomplete answer without text removes its question as well."""
        if text or complete:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def drop_answer(self) -> None:
        """Remove the last answer, to retry. Raises UsageError without one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UsageError("/retry: there is no answer yet")
        self.messages.pop()

    def parameters(self) -> str:
        """Return one line with all parameters that are set."""
        parts = [f"{name} {value:g}" for name, value in sorted(self.numbers.items())]
        if self.thinking is not None:
            parts.append(f"reasoning {'on' if self.thinking else 'off'}")
        if self.system:
            parts.append(f"system: {self.system}")
        return ", ".join(parts) or "the server's defaults"


@dataclass
class MessageReader:
    """The assembly of a message from lines. `add_line` returns the message once it is complete."""

    lines: list[str] = field(default_factory=list)
    is_block: bool = False

    @property
    def continues(self) -> bool:
        """True while a message is incomplete."""
        return self.is_block or bool(self.lines)

    def add_line(self, line: str) -> str | None:
        """Add one line."""
        if self.is_block:
            if line.strip() == '"""':
                self.is_block = False
                return self._complete()
            self.lines.append(line)
            return None
        if line.strip() == '"""' and not self.lines:
            self.is_block = True
            return None
        if line.endswith("\\"):
            self.lines.append(line[:-1])
            return None
        self.lines.append(line)
        return self._complete()

    def _complete(self) -> str:
        text, self.lines = "\n".join(self.lines).strip(), []
        return text
