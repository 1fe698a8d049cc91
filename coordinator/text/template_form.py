"""The reading of a published chat template: its variables, its levels of reasoning, and its form of past calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import jinja2.meta
import jinja2.sandbox

from coordinator.text.schemas import Json
from mtp.checkpoint.format.config import read_json_object

SWITCHES = ("enable_thinking", "thinking")
"""The variables that switch reasoning: that of Qwen and most others, and that of DeepSeek and Granite."""

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The levels of reasoning of clients, the lowest first."""

PROBE = {"needle": "hay"}
"""Arguments of a call that is rendered to learn whether a template writes objects as JSON."""


def separate_template(checkpoint: Path) -> dict[str, Any]:
    """Return the template of chat_template.json, which transformers gives to processors only, if there is no other."""
    file, usual = checkpoint / "chat_template.json", checkpoint / "tokenizer_config.json"
    if not file.is_file() or (checkpoint / "chat_template.jinja").exists():
        return {}
    if usual.is_file() and read_json_object(usual).get("chat_template") is not None:
        return {}
    return {"chat_template": read_json_object(file).get("chat_template")}


class TemplateForm:
    """The requirements of a chat template that is a text, or several named ones. Other ones have none that are known.

    `ids` is how the model was trained to number calls: as `functions.NAME:NUMBER` with "kimi", else by the template.
    """

    def __init__(self, template: object, ids: str = "") -> None:
        named = template if isinstance(template, dict) else {"": template}
        texts = [text for text in named.values() if isinstance(text, str)]
        self.source = "\n".join(texts)
        self.names = frozenset(name for text in texts for name in _template_names(text))
        """The variables that the template reads; empty if they cannot be determined."""
        self._by_kimi = ids == "kimi"
        self._nine = re.search(r"length\s*!=\s*9", self.source) is not None
        self._single = "tool_calls[0]" in self.source
        self._thinks = "message.thinking" in self.source
        self.takes_text = False
        """True if arguments of calls are rendered from their JSON text."""

    def uses(self, name: str) -> bool:
        """Return whether the template reads the variable `name`; True if its variables cannot be determined."""
        return not self.names or name in self.names

    @property
    def switches(self) -> tuple[str, ...]:
        """The variables that switch reasoning."""
        return tuple(name for name in SWITCHES if name in self.names) or SWITCHES[:1] * self.uses(SWITCHES[0])

    def level(self, effort: str) -> str:
        """Return the level that the template has and that is the nearest to `effort`, the higher one of two."""
        named = [level for level in LEVELS if re.search(rf"""["']{level}["']""", self.source)]
        if named == ["medium"]:  # the default of gpt-oss, which names no other
            named = ["low", "medium", "high"]
        if effort not in LEVELS or not named:
            return effort
        place = LEVELS.index(effort)
        return min(named, key=lambda level: (abs(LEVELS.index(level) - place), -LEVELS.index(level)))

    def probe(self, render: Callable[[Sequence[Json], Sequence[Json]], str]) -> None:
        """Find out whether the template requires arguments as text: it fails at objects, or writes Python's form."""
        function = {"name": "name", "description": "", "parameters": {"type": "object", "properties": {}}}
        call = {"id": "0", "type": "function", "function": {"name": "name", "arguments": PROBE}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        for self.takes_text in (False, True):
            with suppress(Exception):  # what the template rejects for another reason, it rejects in both forms
                messages = self.messages([{"role": "user", "content": "question"}, answer])
                if str(PROBE) not in render(messages, [{"type": "function", "function": function}]):
                    return
        self.takes_text = False

    def messages(self, messages: Sequence[Json]) -> list[Json]:
        """Return the messages with calls and reasoning in the fields and forms that the template reads."""
        found = _one_call_each(messages) if self._single else [*messages]
        numbers, counter = dict[str, str](), count()
        return [self._message(message, numbers, counter) for message in found]

    def _message(self, message: Json, numbers: dict[str, str], counter: Iterator[int]) -> Json:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if self._by_kimi:
                numbers[call.get("id", "")] = f"functions.{function['name']}:{next(counter)}"
            if self.takes_text and not isinstance(function["arguments"], str):
                function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            own = {"id": self._id(call["id"], numbers)} if "id" in call else {}
            calls.append(call | own | {"function": function})
        if calls:
            message = message | {"tool_calls": calls}
        if "tool_call_id" in message:
            message = message | {"tool_call_id": self._id(message["tool_call_id"], numbers)}
        if self._thinks and message.get("reasoning_content"):
            # With a call, gpt-oss' template takes one text only.
            texts = [message["reasoning_content"], message["content"] if calls else ""]
            content = "" if calls else message["content"]
            message = message | {"thinking": "\n\n".join(filter(None, texts)), "content": content}
        return message

    def _id(self, sent: str, numbers: Mapping[str, str]) -> str:
        if self._nine:  # the end of an id of this server is unlike that of others
            return re.sub(r"[^A-Za-z0-9]", "", sent)[-9:].rjust(9, "0")
        return numbers.get(sent, sent)


def _one_call_each(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with each call in a message of its own, before its result."""
    found: list[Json] = []
    waiting: list[Json] = []  # messages of calls without a result so far
    for message in messages:
        if waiting and message["role"] == "tool":
            sent = [each["tool_calls"][0].get("id") for each in waiting]
            place = sent.index(message["tool_call_id"]) if message.get("tool_call_id") in sent else 0
            found += [waiting.pop(place), message]
            continue
        found += waiting
        calls = [[call] for call in message.get("tool_calls", ())]
        waiting = [{"role": "assistant", "content": "", "tool_calls": call} for call in calls[1:]]
        if waiting:
            waiting.insert(0, message | {"tool_calls": calls[0]})
        else:
            found.append(message)
    return found + waiting


def _template_names(template: str) -> frozenset[str]:
    """Return the variables a chat template reads; an empty set if they cannot be determined."""
    environment = jinja2.sandbox.SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateSyntaxError:  # the template has tags of transformers' own
        return frozenset()
