"""The input items of the Responses API, and their translation to messages of a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from coordinator.api.request.body import Body, Many
from coordinator.api.request.chat import call_message, with_system_first
from coordinator.text.model_info import Json

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Body):
    """Text of a message, of reasoning or of a tool's output."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Body):
    """A message. Items that the server sent may be sent back."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[TextPart]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class CallItem(Body):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: None = None


class CallOutputItem(Body):
    """The output of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[TextPart]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Body):
    """The reasoning of an earlier answer. Encrypted reasoning of another model is ignored."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Many[TextPart] | None = None
    content: Many[TextPart] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ReferenceItem(Body):
    """A reference to an output item of a stored response. Clients send it instead of the item."""

    type: Literal["item_reference"]
    id: str


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="send an item of type message, function_call, function_call_output, reasoning or "
        "item_reference",
    ),
]


def template_messages(
    instructions: str | None, items: Sequence[Item], markers: tuple[str, str]
) -> list[Json]:
    """Return the conversation as chat templates read it.

    Consecutive items of the assistant (reasoning, messages and calls) become one message.
    """
    turns: list[Json] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    pending: list[Item] = []
    for item in items:
        if _is_assistants(item):
            pending.append(item)
            continue
        turns += _assistant(pending, markers)
        pending = []
        if isinstance(item, CallOutputItem):
            output = item.output if isinstance(item.output, str) else _text(item.output)
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            turns.append({"role": role, "content": _content(item)})
    return with_system_first([*turns, *_assistant(pending, markers)])


def _is_assistants(item: Item) -> bool:
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return isinstance(item, CallItem | ReasoningItem)


def _assistant(items: Iterable[Item], markers: tuple[str, str]) -> list[Json]:
    items = list(items)
    if not items:
        return []
    text = "".join(_content(item) for item in items if isinstance(item, MessageItem))
    calls = [(i.call_id, i.name, i.arguments) for i in items if isinstance(i, CallItem)]
    turn = call_message(text, calls, markers)
    thoughts = [_text(i.content or ()) for i in items if isinstance(i, ReasoningItem)]
    if any(thoughts):
        turn["reasoning_content"] = "\n".join(thoughts)
    return [turn]


def _content(item: MessageItem) -> str:
    return item.content if isinstance(item.content, str) else _text(item.content)


def _text(parts: Iterable[TextPart]) -> str:
    return "".join(part.text for part in parts)
