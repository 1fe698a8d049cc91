"""The format of OpenAI's responses, whole and streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from coordinator.api.choice import AnswerEvent, ChoiceEnd, GeneratedAnswer
from coordinator.api.conversation import freeform_input
from coordinator.api.delivery import AnswerWriter, sse_event
from coordinator.api.error_responses import error_body
from coordinator.text.answer_reader import CallArguments, CallEnd, CallStart, Content, Reasoning
from coordinator.text.schemas import Json

AnswerStatus = Literal["queued", "in_progress", "ended", "failed", "cancelled"]

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
CALLS = ("function_call", "custom_tool_call")


@dataclass(eq=False)
class OutputItem:
    """An output item while it is generated. `kind` is its type, `index` its place in the output.

    `text` is the text or the arguments so far. `status` is `incomplete` for an item that the limit cut off, and for a
    call that cannot be parsed. `named` has the fields that name the function of a call.
    """

    kind: str
    index: int
    id: str
    call_id: str
    named: Json
    open: bool = True
    status: str = "in_progress"
    text: str = ""

    def part(self) -> Json | None:
        """Return the content part with the text so far, or None for a tool call."""
        if self.kind == "message":
            return {"type": "output_text", "text": self.text, "annotations": []}
        return {"type": "reasoning_text", "text": self.text} if self.kind == "reasoning" else None

    @property
    def arguments(self) -> Json:
        """The field of a call with what the model wrote. The input of a custom tool is sent when it is whole."""
        if self.kind == "function_call":
            return {"arguments": self.text}
        return {"input": "" if self.open else freeform_input(self.text)}

    def close(self, *, complete: bool) -> None:
        """End the item."""
        self.open = False
        self.status = "completed" if complete else "incomplete"

    def as_json(self) -> Json:
        """Return the item."""
        item: Json = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind in CALLS:
            return item | {"call_id": self.call_id, **self.named, **self.arguments}
        item["content"] = [] if self.open else [self.part()]
        own: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | own


class ResponseWriter(AnswerWriter):
    """The writer of `POST /v1/responses`. `fields` repeat the request; `names` has the client's names of functions."""

    def __init__(self, answer: GeneratedAnswer, fields: Json, names: Mapping[str, Json]) -> None:
        super().__init__(answer)
        assert len(answer.choices) == 1
        self._fields = fields
        self._names = names
        self._failure: Json | None = None
        self._items: list[OutputItem] = []
        self._number = 0

    def whole(self) -> Json:
        (choice,) = self._answer.choices
        if choice.reasoning:
            self._add("reasoning").text = "".join(choice.reasoning)
        content = "".join(choice.content)
        if content or not (choice.reasoning or choice.calls):
            self._add("message").text = content
        for call in choice.shown_calls:
            self._add_call(call.id, call.name).text = call.arguments
        for item in self._items:
            item.close(complete=item is not self._items[-1] or self._status() == "completed")
        return self._response(self._status())

    def result(self, status: AnswerStatus) -> Json:
        return self._response(self._status() if status == "ended" else status)

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def keep_alive(self, *, queued: bool) -> bytes:
        """Repeat the state of the response, with the number of the newest event: the numbers follow from the tokens."""
        status = "queued" if queued else "in_progress"
        event = {"type": f"response.{status}", "sequence_number": self._number - 1, "response": self._response(status)}
        return sse_event(f"response.{status}", event)

    def closing(self) -> bytes:
        response = self._response(self._status())
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: Exception) -> bytes:
        details = error_body(error)["error"]
        self._failure = {"code": details["code"] or details["type"], "message": details["message"]}
        return self._event("response.failed", response=self._response("failed"))

    def cancelled(self) -> bytes:
        return self._event("response.cancelled", response=self._response("cancelled"))

    def interrupted(self, error: Exception) -> bytes:
        """Return the end of a connection whose stream goes on later. It changes no state."""
        details = error_body(error)["error"]
        fields = {"code": details["code"], "message": details["message"], "param": None}
        return sse_event("error", {"type": "error", "sequence_number": self._number, **fields})

    def write_event(self, event: AnswerEvent) -> bytes:
        match event.part:
            case Content(text):
                opened, item = self._open("message")
            case Reasoning(text):
                opened, item = self._open("reasoning")
            case CallStart(name):
                assert event.call is not None
                return self._close() + self._added(self._add_call(event.call.id, name))
            case CallArguments(text):
                opened, item = b"", self._items[-1]
                if item.kind == "custom_tool_call":
                    item.text += text
                    return b""
            case CallEnd(complete):
                return self._close(complete=complete)
            case ChoiceEnd(reason):
                return self._close(complete=reason != "length")
        item.text += text
        return opened + self._part_event(item, f"{EVENTS[item.kind]}.delta", delta=text)

    def _open(self, kind: str) -> tuple[bytes, OutputItem]:
        """Return the open item of `kind`, after the events that close the previous item and open this one."""
        if self._items and self._items[-1].open and self._items[-1].kind == kind:
            return b"", self._items[-1]
        closed = self._close()
        item = self._add(kind)
        return closed + self._added(item), item

    def _add_call(self, call_id: str, name: str) -> OutputItem:
        named = {"type": "function_call", **self._names.get(name, {"name": name})}
        return self._add(named.pop("type"), call_id, named)

    def _add(self, kind: str, call_id: str = "", named: Json | None = None) -> OutputItem:
        index = len(self._items)
        item_id = f"{PREFIXES[kind]}_{self._answer.id.partition('_')[2]}{index}"
        item = OutputItem(kind, index, item_id, call_id, named or {})
        self._items.append(item)
        return item

    def _added(self, item: OutputItem) -> bytes:
        place = {"output_index": item.index, "item": item.as_json()}
        added = self._event("response.output_item.added", **place)
        if (part := item.part()) is None:
            return added
        return added + self._part_event(item, "response.content_part.added", part=part)

    def _close(self, *, complete: bool = True) -> bytes:
        if not self._items or not self._items[-1].open:
            return b""
        item = self._items[-1]
        item.close(complete=complete)
        content = b""
        if complete or item.kind not in CALLS:  # arguments that were cut off are never done
            final = {"text": item.text}
            if item.kind in CALLS:
                final = {"name": item.named["name"], **item.arguments}
            if item.kind == "custom_tool_call":
                content = self._part_event(item, f"{EVENTS[item.kind]}.delta", delta=final["input"])
            content += self._part_event(item, f"{EVENTS[item.kind]}.done", **final)
        if (part := item.part()) is not None:
            content += self._part_event(item, "response.content_part.done", part=part)
        place = {"output_index": item.index, "item": item.as_json()}
        return content + self._event("response.output_item.done", **place)

    def _part_event(self, item: OutputItem, name: str, /, **fields: object) -> bytes:
        place: Json = {"item_id": item.id, "output_index": item.index}
        if item.part() is not None:
            place["content_index"] = 0
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse_event(name, {"type": name, "sequence_number": number, **fields})

    def _status(self) -> str:
        return "incomplete" if self._answer.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str) -> Json:
        ended = status in ("completed", "incomplete")
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._answer.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": self._failure,
            "incomplete_details": details,
            "model": self._answer.model,
            "output": [item.as_json() for item in self._items] if ended else [],
            "usage": self._usage() if ended else None,
            **self._fields,
        }

    def _usage(self) -> Json:
        answer = self._answer
        return {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.choices[0].reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
