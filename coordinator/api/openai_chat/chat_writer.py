"""The format of chat completions."""

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
from coordinator.api.openai_chat.chunk_writer import ChunkWriter
from coordinator.api.openai_chat.logprobs import chat_logprobs
from coordinator.api.openai_chat.schemas import StreamOptions
from coordinator.api.request.errors import error_body
from coordinator.api.stored.stored_answer import AnswerStatus
from coordinator.text.model_info import Json
from coordinator.text.tokenizer import Tokenizer
from proto.errors import WorkerLostError
from proto.frame import TokenLogprob


class ChatWriter(ChunkWriter):
    """The writer of `POST /v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        answer: GeneratedAnswer,
        tokenizer: Tokenizer,
        stream_options: StreamOptions | None = None,
    ) -> None:
        super().__init__(answer, stream_options)
        self._tokenizer = tokenizer
        self._token_origins = bool(stream_options and stream_options.token_origins)
        self._failure: Exception | None = None

    def opening(self) -> bytes:
        """See AnswerWriter."""
        role = {"role": "assistant", "content": ""}
        return b"".join(
            self.chunk(self._entry(choice.index, role)) for choice in self._answer.choices
        )

    def result(self, status: AnswerStatus) -> Json:
        """See StoredWriter."""
        failure = {} if self._failure is None else error_body(self._failure)
        return {**self.whole(), **failure}

    def error(self, error: Exception) -> bytes:
        """See AnswerWriter."""
        self._failure = error
        return super().error(error)

    def cancelled(self) -> bytes:
        """See StoredWriter."""
        return self.error(WorkerLostError("the answer was cancelled"))

    def interrupted(self, error: Exception) -> bytes:
        """See StoredWriter."""
        return super().error(error)

    def choice_result(self, index: int) -> Json:
        """See ChunkWriter."""
        choice = self._answer.choices[index]
        message: Json = {"role": "assistant", "content": "".join(choice.content)}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        # A call that the limit cut off is included as far as it goes, and the finish reason is `length`.
        calls = [*choice.complete_calls, *([choice.cut_call] if choice.cut_call else [])]
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def choice_entry(self, event: AnswerEvent) -> Json:
        """See ChunkWriter."""
        reason = None
        match event:
            case TextDelta():
                delta: Json = {"content": event.text}
            case ReasoningDelta():
                delta = {"reasoning_content": event.text}
            case CallDelta():
                call = _call(event.id, event.name, event.arguments)
                delta = {"tool_calls": [{"index": event.call, **call}]}
            case ChoiceEnd():
                delta, reason = {}, event.reason
            case CallEnd():
                raise AssertionError("the end of a call has no chunk")
        entry = self._entry(event.choice, delta, event.logprobs, reason)
        if self._token_origins and not isinstance(event, ChoiceEnd):
            entry["token_origins"] = event.origins
        return entry

    def _entry(
        self,
        index: int,
        delta: Json,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> Json:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json | None:
        return chat_logprobs(self._tokenizer, entries) if entries else None


def _call(call_id: str | None, name: str | None, arguments: str) -> Json:
    """Return a call, or a further part of one if `call_id` is None."""
    if call_id is None:
        return {"function": {"arguments": arguments}}
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
