"""The stream format that chat completions and completions share: chunks of one choice each, usage, `[DONE]`."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from coordinator.api.answer.events import AnswerEvent, CallEnd
from coordinator.api.answer.generated_answer import GeneratedAnswer
from coordinator.api.answer.writer import EVENT_STREAM, sse_comment, sse_data
from coordinator.api.openai_chat.schemas import StreamOptions
from coordinator.api.openai_chat.usage import usage_of
from coordinator.api.request.errors import error_body
from coordinator.text.model_info import Json

DONE = b"data: [DONE]\n\n"


class ChunkWriter(abc.ABC):
    """The AnswerWriter of both completion endpoints.

    `kind` and `chunk_kind` are OpenAI's names of the object, whole and streamed.
    """

    kind: str
    chunk_kind: str
    media_type = EVENT_STREAM

    def __init__(
        self, answer: GeneratedAnswer, stream_options: StreamOptions | None = None
    ) -> None:
        self._answer = answer
        options = stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._continuous_usage = bool(options.continuous_usage_stats)

    @abc.abstractmethod
    def choice_result(self, index: int) -> Json:
        """Return the entry of a complete choice in `choices`."""

    @abc.abstractmethod
    def choice_entry(self, event: AnswerEvent) -> Json:
        """Return the entry of an event in a chunk's `choices`. A CallEnd has none."""

    def whole(self) -> Json:
        """See AnswerWriter."""
        choices = [self.choice_result(choice.index) for choice in self._answer.choices]
        return {**self._head(self.kind), "choices": choices, "usage": usage_of(self._answer)}

    def opening(self) -> bytes:
        """See AnswerWriter."""
        return b""

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """See AnswerWriter."""
        # The next chunk shows that a call has ended.
        shown = [event for event in events if not isinstance(event, CallEnd)]
        return b"".join(self.chunk(self.choice_entry(event)) for event in shown)

    def progress(self, done: int, total: int) -> bytes:
        """See AnswerWriter."""
        return sse_comment(f"prefill {done}/{total}")

    def keep_alive(self) -> bytes:
        """See AnswerWriter."""
        return sse_comment("keep-alive")

    def closing(self) -> bytes:
        """See AnswerWriter."""
        if not self._include_usage:
            return DONE
        last = {**self._head(self.chunk_kind), "choices": [], "usage": usage_of(self._answer)}
        return sse_data(last) + DONE

    def error(self, error: Exception) -> bytes:
        """See AnswerWriter."""
        return sse_data(error_body(error))

    def chunk(self, entry: Json) -> bytes:
        """Return one chunk with the entry of one choice."""
        chunk = {**self._head(self.chunk_kind), "choices": [entry]}
        if self._continuous_usage:
            chunk["usage"] = usage_of(self._answer)
        elif self._include_usage:
            chunk["usage"] = None
        return sse_data(chunk)

    def _head(self, kind: str) -> Json:
        answer = self._answer
        return {
            "id": answer.id,
            "object": kind,
            "created": answer.created,
            "model": answer.model,
        }
