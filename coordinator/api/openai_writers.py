"""The formats of OpenAI's chat and text completions, whole and streamed."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from coordinator.api.choice import AnswerEvent, ChoiceEnd, GeneratedAnswer, GeneratedCall
from coordinator.api.delivery import AnswerWriter, sse_data
from coordinator.api.errors import error_body
from coordinator.api.openai_schemas import StreamOptions
from coordinator.text.calls import CallArguments, CallEnd, CallStart, Json
from coordinator.text.chat_parser import Content, Reasoning
from coordinator.text.tokenizer import Tokenizer
from proto.frame import TokenLogprob


def usage_of(answer: GeneratedAnswer) -> Json:
    """Return the `usage` of an answer so far. A prompt counts once for all its choices."""
    completion = answer.completion_tokens
    accepted = sum(choice.accepted for choice in answer.choices)
    details = {
        "reasoning_tokens": sum(choice.reasoning_tokens for choice in answer.choices),
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(c.drafted for c in answer.choices) - accepted,
    }
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": details,
    }


LOWEST = -9999.0
"""The value for minus infinity, which JSON cannot represent; OpenAI documents this number."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> Json:
    """Return `logprobs` of a chat choice, with an entry for every token, also of reasoning and calls."""
    content = [
        {
            **_token(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_token(tokenizer, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offsets: Sequence[int]
) -> Json:
    """Return `logprobs` of a text completion. `offsets` count characters of the choice's text."""
    top = [{_name(tokenizer, token): _finite(value) for token, value in e.top} for e in entries]
    return {
        "tokens": [_name(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(offsets),
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    content = tokenizer.token_bytes(token)
    return {
        "token": content.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(content),
    }


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text, or its bytes if they are not whole characters, so that all names differ."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST


DONE = b"data: [DONE]\n\n"


class ChunkWriter(AnswerWriter):
    """The writer of both completion endpoints.

    `kind` and `chunk_kind` are OpenAI's names of the object, whole and streamed.
    """

    kind: str
    chunk_kind: str

    def __init__(
        self, answer: GeneratedAnswer, tokenizer: Tokenizer, options: StreamOptions | None = None
    ) -> None:
        super().__init__(answer)
        self._tokenizer = tokenizer
        self._options = options or StreamOptions()

    @abc.abstractmethod
    def choice_result(self, index: int) -> Json:
        """Return the entry of a complete choice in `choices`."""

    @abc.abstractmethod
    def choice_entry(self, event: AnswerEvent) -> Json:
        """Return the entry of an event in a chunk's `choices`. A CallEnd has none."""

    def whole(self) -> Json:
        choices = [self.choice_result(choice.index) for choice in self._answer.choices]
        return {**self._head(self.kind), "choices": choices, "usage": usage_of(self._answer)}

    def write_event(self, event: AnswerEvent) -> bytes:
        # The next chunk shows that a call has ended.
        return b"" if isinstance(event.part, CallEnd) else self.chunk(self.choice_entry(event))

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        last = {**self._head(self.chunk_kind), "choices": [], "usage": usage_of(self._answer)}
        return sse_data(last) + DONE

    def error(self, error: Exception) -> bytes:
        return sse_data(error_body(error))

    def chunk(self, entry: Json) -> bytes:
        """Return one chunk with the entry of one choice."""
        chunk = {**self._head(self.chunk_kind), "choices": [entry]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage_of(self._answer)
        elif self._options.include_usage:
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


class ChatWriter(ChunkWriter):
    """The writer of `POST /v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(
            self.chunk(self._entry(choice.index, role)) for choice in self._answer.choices
        )

    def choice_result(self, index: int) -> Json:
        choice = self._answer.choices[index]
        message: Json = {"role": "assistant", "content": "".join(choice.content)}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if calls := choice.shown_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_call(call, call.arguments) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def choice_entry(self, event: AnswerEvent) -> Json:
        reason: str | None = None
        match event.part:
            case Content(text):
                delta: Json = {"content": text}
            case Reasoning(text):
                delta = {"reasoning_content": text}
            case CallStart() if event.call:
                delta = {"tool_calls": [{"index": event.call.index, **_call(event.call, "")}]}
            case CallArguments(text) if event.call:
                part = {"index": event.call.index, "function": {"arguments": text}}
                delta = {"tool_calls": [part]}
            case ChoiceEnd(reason):
                delta = {}
            case _:
                raise AssertionError("the end of a call has no chunk")
        entry = self._entry(event.choice, delta, event.logprobs, reason)
        if self._options.token_origins and reason is None:
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


def _call(call: GeneratedCall, arguments: str) -> Json:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class CompletionWriter(ChunkWriter):
    """The writer of `POST /v1/completions`. With `echoes`, each choice's text begins with its prompt."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        answer: GeneratedAnswer,
        tokenizer: Tokenizer,
        options: StreamOptions | None = None,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(answer, tokenizer, options)
        self._echoes = echoes

    def opening(self) -> bytes:
        return b"".join(
            self.chunk(self._entry(index, text)) for index, text in enumerate(self._echoes)
        )

    def choice_result(self, index: int) -> Json:
        choice = self._answer.choices[index]
        text = (self._echoes[index] if self._echoes else "") + "".join(choice.content)
        return self._entry(index, text, choice.logprobs, choice.offsets, choice.finish_reason)

    def choice_entry(self, event: AnswerEvent) -> Json:
        if isinstance(event.part, Content):
            return self._entry(event.choice, event.part.text, event.logprobs, event.offsets)
        reason = self._answer.choices[event.choice].finish_reason
        return self._entry(event.choice, "", finish_reason=reason)

    def _entry(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob] = (),
        offsets: Sequence[int] = (),
        finish_reason: str | None = None,
    ) -> Json:
        found = completion_logprobs(self._tokenizer, logprobs, offsets) if logprobs else None
        return {
            "index": index,
            "text": text,
            "logprobs": found,
            "finish_reason": finish_reason,
        }
