"""The format of Anthropic's messages, whole and streamed."""

from __future__ import annotations

import json
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
from coordinator.api.anthropic.errors import anthropic_error
from coordinator.text.model_info import Json

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """The AnswerWriter of `POST /v1/messages`. A message has one choice, whose parts become content blocks.

    A call that the limit cut off is omitted from a whole message. A stream has its block as far as it goes.
    """

    media_type = EVENT_STREAM

    def __init__(self, answer: GeneratedAnswer) -> None:
        assert len(answer.choices) == 1
        self._answer = answer
        self._block = -1  # index of the current content block
        self._kind: tuple[str, int] | None = (
            None  # type of the open block, with the index of its call
        )

    def whole(self) -> Json:
        """See AnswerWriter."""
        (choice,) = self._answer.choices
        content: list[Json] = []
        if choice.reasoning:
            thinking = "".join(choice.reasoning)
            content.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if text := "".join(choice.content):
            content.append({"type": "text", "text": text})
        for call in choice.complete_calls:
            arguments = json.loads(call.arguments)
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
            )
        return {**self._message(content), **self._stop(), "usage": self._usage()}

    def opening(self) -> bytes:
        """See AnswerWriter."""
        unfinished = {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", message={**self._message([]), **unfinished})

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """See AnswerWriter."""
        return b"".join(self._write(event) for event in events)

    def progress(self, done: int, total: int) -> bytes:
        """See AnswerWriter."""
        return sse_comment(f"prefill {done}/{total}")

    def keep_alive(self) -> bytes:
        """See AnswerWriter."""
        return _event("ping")

    def closing(self) -> bytes:
        """See AnswerWriter."""
        return _event("message_delta", delta=self._stop(), usage=self._usage()) + _event(
            "message_stop"
        )

    def error(self, error: Exception) -> bytes:
        """See AnswerWriter."""
        return sse_event("error", anthropic_error(error))

    def _write(self, event: AnswerEvent) -> bytes:
        match event:
            case TextDelta():
                opened = self._open(("text", 0), {"type": "text", "text": ""})
                delta: Json = {"type": "text_delta", "text": event.text}
            case ReasoningDelta():
                block: Json = {"type": "thinking", "thinking": "", "signature": ""}
                opened = self._open(("thinking", 0), block)
                delta = {"type": "thinking_delta", "thinking": event.text}
            case CallDelta():
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                opened = self._open(("tool_use", event.call), block)
                delta = {"type": "input_json_delta", "partial_json": event.arguments}
            case CallEnd() | ChoiceEnd():
                return self._close()
        return opened + _event("content_block_delta", index=self._block, delta=delta)

    def _open(self, kind: tuple[str, int], block: Json) -> bytes:
        """Return the start of a content block, after the end of the previous one; empty if `kind` is already open."""
        if kind == self._kind:
            return b""
        closed = self._close()
        self._kind = kind
        self._block += 1
        return closed + _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _event("content_block_stop", index=self._block)

    def _message(self, content: list[Json]) -> Json:
        answer = self._answer
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": content,
        }

    def _stop(self) -> Json:
        (choice,) = self._answer.choices
        reason = STOP_REASONS[choice.finish_reason or "stop"]
        if choice.stop_string is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_string}

    def _usage(self) -> Json:
        cached = self._answer.cached_tokens
        return {
            "input_tokens": self._answer.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._answer.completion_tokens,
        }


def _event(name: str, /, **fields: object) -> bytes:
    return sse_event(name, {"type": name, **fields})
