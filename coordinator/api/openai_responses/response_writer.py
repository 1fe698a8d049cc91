"""The format of responses, whole and as events with sequence numbers."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.api.answer.events import (
    AnswerEvent,
    CallDelta,
    CallEnd,
    ChoiceEnd,
    ReasoningDelta,
    TextDelta,
)
from coordinator.api.answer.generated_answer import GeneratedAnswer
from coordinator.api.answer.writer import EVENT_STREAM, sse_comment, sse_event
from coordinator.api.openai_responses.output import OutputItem
from coordinator.api.request.errors import error_body
from coordinator.api.stored.stored_answer import AnswerStatus
from coordinator.text.model_info import Json


class ResponseWriter:
    """The AnswerWriter of `POST /v1/responses`.

    `fields` are the fields of the response object that repeat the request.
    """

    media_type = EVENT_STREAM

    def __init__(self, answer: GeneratedAnswer, fields: Json) -> None:
        assert len(answer.choices) == 1
        self._answer = answer
        self._fields = fields
        self._failure: Json | None = None
        self._items: list[OutputItem] = []
        self._number = 0

    def whole(self) -> Json:
        """See AnswerWriter."""
        (choice,) = self._answer.choices
        if choice.reasoning:
            self._add("reasoning").append("".join(choice.reasoning))
        if choice.content or not choice.calls:
            self._add("message").append("".join(choice.content))
        for call in [*choice.complete_calls, *([choice.cut_call] if choice.cut_call else [])]:
            self._add("function_call", call.id, call.name).append(call.arguments)
        for item in self._items:
            item.close(complete=item is not self._items[-1] or self._status() == "completed")
        return self._response(self._status())

    def result(self, status: AnswerStatus) -> Json:
        """See StoredWriter."""
        return self._response(self._status() if status == "ended" else status)

    def opening(self) -> bytes:
        """See AnswerWriter."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """See AnswerWriter."""
        return b"".join(self._write(event) for event in events)

    def progress(self, done: int, total: int) -> bytes:
        """See AnswerWriter."""
        return sse_comment(f"prefill {done}/{total}")

    def keep_alive(self) -> bytes:
        """See AnswerWriter."""
        return sse_comment("keep-alive")

    def closing(self) -> bytes:
        """See AnswerWriter."""
        response = self._response(self._status())
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: Exception) -> bytes:
        """See AnswerWriter."""
        details = error_body(error)["error"]
        code = details["code"] or details["type"]
        self._failure = {"code": code, "message": details["message"]}
        return self._event("response.failed", response=self._response("failed"))

    def cancelled(self) -> bytes:
        """See StoredWriter."""
        return self._event("response.cancelled", response=self._response("cancelled"))

    def interrupted(self, error: Exception) -> bytes:
        """See StoredWriter."""
        details = error_body(error)["error"]
        fields = {"code": details["code"], "message": details["message"], "param": None}
        return sse_event("error", {"type": "error", "sequence_number": self._number, **fields})

    def _write(self, event: AnswerEvent) -> bytes:
        match event:
            case TextDelta():
                opened, item = self._open("message")
            case ReasoningDelta():
                opened, item = self._open("reasoning")
            case CallDelta(id=str() as call_id):
                closed = self._close()
                item = self._add("function_call", call_id, event.name or "")
                opened = closed + self._added(item)
            case CallDelta():
                opened, item = b"", self._items[-1]
            case CallEnd(complete=complete):
                return self._close(complete=complete)
            case ChoiceEnd():
                return self._close(complete=event.reason != "length")
        text = event.arguments if isinstance(event, CallDelta) else event.text
        item.append(text)
        return opened + self._part_event(item, "delta", delta=text)

    def _open(self, kind: str) -> tuple[bytes, OutputItem]:
        """Return the open item of `kind`, after the events that close the previous item and open this one."""
        if self._items and self._items[-1].open and self._items[-1].kind == kind:
            return b"", self._items[-1]
        closed = self._close()
        item = self._add(kind)
        return closed + self._added(item), item

    def _add(self, kind: str, call_id: str = "", name: str = "") -> OutputItem:
        item = OutputItem(kind, len(self._items), self._answer.id, call_id, name)
        self._items.append(item)
        return item

    def _added(self, item: OutputItem) -> bytes:
        added = self._event(
            "response.output_item.added", output_index=item.index, item=item.as_json()
        )
        if item.part() is None:
            return added
        return added + self._part_event(item, "added", part={**(item.part() or {}), "text": ""})

    def _close(self, *, complete: bool = True) -> bytes:
        if not self._items or not self._items[-1].open:
            return b""
        item = self._items[-1]
        item.close(complete=complete)
        content = b""
        if complete or item.kind != "function_call":  # arguments that were cut off are never done
            content = self._part_event(item, "done", **item.final_fields())
        if (part := item.part()) is not None:
            content += self._event(
                "response.content_part.done",
                item_id=item.id,
                output_index=item.index,
                content_index=0,
                part=part,
            )
        return content + self._event(
            "response.output_item.done", output_index=item.index, item=item.as_json()
        )

    def _part_event(self, item: OutputItem, stage: str, **fields: object) -> bytes:
        """Return an event about the content of an item: `added`, `delta` or `done`."""
        name = "response.content_part.added" if stage == "added" else f"{item.event}.{stage}"
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
