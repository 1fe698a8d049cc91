"""The format of Ollama's answers: JSON lines with one token each, or one object."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from coordinator.api.answer.choice import GeneratedCall
from coordinator.api.answer.events import (
    AnswerEvent,
    CallDelta,
    CallEnd,
    ChoiceEnd,
    ReasoningDelta,
    TextDelta,
)
from coordinator.api.answer.generated_answer import GeneratedAnswer
from coordinator.api.answer.writer import json_line
from coordinator.api.ollama.errors import ollama_error
from coordinator.api.ollama.timestamp import utc_now
from coordinator.text.model_info import Json


class LineWriter:
    """The AnswerWriter of `/api/chat` and, with `flat`, of `/api/generate`, which has no message object.

    Ollama's calls have objects as arguments, so a line holds a complete call. A call that the limit cut off is
    omitted. Ollama's streams have no comments, so there is no sign of life during a pause.
    """

    media_type = "application/x-ndjson"

    def __init__(self, answer: GeneratedAnswer, *, flat: bool) -> None:
        assert len(answer.choices) == 1
        self._answer = answer
        self._flat = flat

    def whole(self) -> Json:
        """See AnswerWriter."""
        (choice,) = self._answer.choices
        calls = [_call(call) for call in choice.complete_calls]
        part = self._part("".join(choice.content), "".join(choice.reasoning), calls)
        return {**part, **self._end()}

    def opening(self) -> bytes:
        """See AnswerWriter."""
        return b""

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """See AnswerWriter."""
        return b"".join(self._write(event) for event in events)

    def progress(self, done: int, total: int) -> bytes:
        """See AnswerWriter."""
        return b""

    def keep_alive(self) -> bytes:
        """See AnswerWriter."""
        return b""

    def closing(self) -> bytes:
        """See AnswerWriter."""
        return json_line({**self._part(), **self._end()})

    def error(self, error: Exception) -> bytes:
        """See AnswerWriter."""
        return json_line(ollama_error(error))

    def _write(self, event: AnswerEvent) -> bytes:
        match event:
            case TextDelta():
                part = self._part(text=event.text)
            case ReasoningDelta():
                part = self._part(thinking=event.text)
            case CallEnd(complete=True):
                call = self._answer.choices[0].calls[event.call]
                part = self._part(calls=[_call(call)])
            case CallDelta() | CallEnd() | ChoiceEnd():
                return b""
        return json_line({**part, "done": False})

    def _part(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        content: Json = {"response" if self._flat else "content": text}
        if thinking:
            content["thinking"] = thinking
        if calls:
            content["tool_calls"] = list(calls)
        head = {"model": self._answer.model, "created_at": utc_now()}
        if self._flat:
            return {**head, **content}
        return {**head, "message": {"role": "assistant", **content}}

    def _end(self) -> Json:
        (choice,) = self._answer.choices
        now = time.perf_counter()
        first = choice.first_token_at or now
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(now - choice.began),
            "load_duration": 0,
            "prompt_eval_count": self._answer.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - choice.began),
            "eval_count": self._answer.completion_tokens,
            "eval_duration": _nanoseconds(now - first),
        }


def _call(call: GeneratedCall) -> Json:
    return {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
