"""The conversation that all dialects build, and the form in which chat templates read it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from coordinator.text.schemas import Json, dumps

Role = Literal["system", "user", "assistant", "tool"]

RoleName = Literal["system", "developer", "user", "assistant", "tool", "function"]
"""The roles of messages in all dialects."""

_OTHER_NAMES: dict[RoleName, Role] = {"developer": "system", "function": "tool"}


def role_of(name: RoleName) -> Role:
    """Return the role of a message as chat templates know it."""
    return _OTHER_NAMES.get(name) or cast(Role, name)


def newest_of_user(roles: Sequence[str]) -> int:
    """Return the index of the newest message of the user, or -1 if the assistant or a tool has followed it."""
    for index in reversed(range(len(roles))):
        if roles[index] != "system":
            return index if roles[index] == "user" else -1
    return -1


@dataclass(frozen=True)
class Call:
    """A tool call of the history. `arguments` are an object, or its JSON text as the model wrote it."""

    id: str
    name: str
    arguments: Any

    @property
    def values(self) -> Json | None:
        """The arguments as an object, or None for text that is none."""
        found = self.arguments
        if isinstance(found, str) or found is None:
            try:
                found = json.loads(found or "{}", strict=False)
                found = json.loads(dumps(found) or "null") if r"\u" in str(self.arguments) else found
            except (ValueError, RecursionError):
                return None
        return found if isinstance(found, dict) else None


IMAGE_PLACE = f"image {secrets.token_hex(16)}"
"""It stands for an image until the prompt is rendered. What spells its tokens in a client's text is ordinary text."""


@dataclass(frozen=True)
class Turn:
    """A message. `images` are the URLs of the images that have a place in `text`.

    Templates read images of the user and of tools. Those of others are named in the text.
    """

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    images: tuple[str, ...] = ()
    call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.images and self.role not in ("user", "tool"):
            object.__setattr__(self, "text", self.text.replace(IMAGE_PLACE, "[image]"))
            object.__setattr__(self, "images", ())

    def for_template(self, markers: tuple[str, str]) -> Json:
        """Return the message as chat templates read it. A call without an object stands between `markers` as text."""
        start, end = markers
        texts, calls = [self.text] if self.text else [], []
        for number, call in enumerate(self.calls):
            if (values := call.values) is None:
                texts.append(f"{start}\n{call.name}: {call.arguments}\n{end}")
                continue
            function = {"name": call.name, "arguments": values}
            calls.append({"id": call.id or str(number), "type": "function", "function": function})
        found: Json = {"role": self.role, "content": "\n\n".join(texts)}
        optional = {
            "reasoning_content": self.reasoning,
            "tool_calls": calls,
            "tool_call_id": self.call_id,
            "name": self.name,
        }
        return found | {name: value for name, value in optional.items() if value}


def template_messages(turns: Iterable[Turn], markers: tuple[str, str]) -> list[Json]:
    """Return a conversation as chat templates read it, with at most one system message, which is the first message.

    Those at the beginning are joined. Later ones become marked messages of the user, since most templates reject them,
    and as part of the first they would change the prompt from its beginning. Without a message of the user an empty
    one is added, which templates of Qwen3.5 and later require.
    """
    rest = list(turns)
    system = []
    while rest and rest[0].role == "system":
        system.append(rest.pop(0).text)
    text = "\n\n".join(filter(None, map(without_changing_lines, system)))
    first = [Turn("system", text)] if text else []
    for index, turn in enumerate(rest):
        if turn.role == "system":
            marked = f"<system>\n{without_changing_lines(turn.text)}\n</system>"
            rest[index] = replace(turn, role="user", text=marked)
    if not any(turn.role == "user" for turn in rest):
        rest.insert(0, Turn("user"))
    return [turn.for_template(markers) for turn in [*first, *rest]]


_CHANGING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n+|$)")
"""The first line of Claude Code's system prompt. It has a hash of each request, after which no prefix is known."""


def without_changing_lines(system: str) -> str:
    """Return a system prompt without the lines that agents change with every request and the model does not need."""
    return _CHANGING.sub("", system)


def template_tool(name: str, description: str | None, parameters: Any) -> Json:
    """Return a tool in OpenAI's format, as chat templates read it."""
    fields = {"name": name, "description": description, "parameters": parameters}
    function = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


FREEFORM = "input"
"""The argument of a custom tool, which takes any text."""


def freeform_tool(name: str, description: str | None, form: Any) -> Json:
    """Return a custom tool, whose input is a text, as a function. `form` is the format that OpenAI's models force."""
    texts = [description] if description else []
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        texts.append(f"The input has this grammar ({form.get('syntax')}):\n{form['definition']}")
    schema = {"type": "object", "properties": {FREEFORM: {"type": "string"}}, "required": [FREEFORM]}
    return template_tool(name, "\n\n".join(texts) or None, schema)


def freeform_input(arguments: str) -> str:
    """Return the input of a call of a custom tool, or its only value, as far as it goes if it was cut off."""
    for end in ("", '"}'):
        with suppress(ValueError):
            values = json.loads(arguments + end)
            (found,) = values.values() if len(values) == 1 else (values.get(FREEFORM),)
            return found if isinstance(found, str) else "" if found is None else json.dumps(found)
    return ""


NOTE_CHARACTERS = 20_000
"""Longest text of a part of the history that this server does not know."""

_UNTOLD = (
    *("type", "id", "status", "index", "signature", "role", "format", "media_type", "mime_type"),
    *("mimeType", "annotations", "citations", "logprobs", "file_data", "cache_control", "detail"),
)
"""Fields without words, besides ids and what is encrypted."""

MEDIA = ("audio", "video", "image", "file", "document")
"""Words in the types of parts whose absence the model should know."""

LONGEST_WORD = 2000
"""Characters of the longest text without blanks. A longer one is data in Base64, and left out."""


def note_of(part: dict[str, Any]) -> str:
    """Return a line about a part of the history that another server made, or nothing if it has no words.

    A document of text is its text. No part of a history is refused: the client could not go on.
    """
    kind = str(part.get("type") or "")
    words = "\n".join(dict.fromkeys(_words(part)))[:NOTE_CHARACTERS]
    if words:
        return f"\n[{kind}] {words}\n"
    return f"\n[{kind}: not readable here]\n" if any(word in kind for word in MEDIA) else ""


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value and (len(value) < LONGEST_WORD or " " in value[:LONGEST_WORD]):
            yield value
    elif isinstance(value, list):
        for each in value:
            yield from _words(each)
    elif isinstance(value, dict):
        for name, part in value.items():
            hidden = name in _UNTOLD or name.endswith("_id") or name.startswith("encrypted")
            if not hidden and not (name == "data" and value.get("type") != "text"):
                yield from _words(part)


def joined(turns: Sequence[Turn]) -> Turn:
    """Return consecutive messages of one role as one."""
    return replace(
        turns[0],
        text="".join(turn.text for turn in turns),
        reasoning="\n".join(turn.reasoning for turn in turns if turn.reasoning),
        calls=tuple(call for turn in turns for call in turn.calls),
        images=tuple(image for turn in turns for image in turn.images),
    )
