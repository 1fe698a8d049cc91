"""The answer to one HTTP request, and its choices: engine's events in, the event stream of the dialects out."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

from coordinator.prompts import request_settings
from coordinator.prompts.image_parts import prompt_of
from coordinator.schedule.request import Finished, GenerationEvent, GenerationRequest, PrefillProgress, TokenChunk
from coordinator.text.answer_reader import (
    AnswerReader,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reasoning,
    join_parts,
)
from coordinator.text.grammars import OutputFormat
from coordinator.text.harmony import ChannelReader, reader_of
from coordinator.text.schemas import Json
from coordinator.text.tokenizer import Piece, TextStream, Tokenizer
from coordinator.web.context import Api
from proto.errors import RequestError, WorkerLostError
from proto.frame import TokenLogprob

DRAFTED, SAMPLED = "d", "s"
"""Origins of a token: an accepted draft, or the model's own choice after the drafts."""

EndReason = Literal["stop", "length", "tool_calls"]


@dataclass
class GeneratedCall:
    """One tool call of a choice. `parts` are the parts of its arguments' JSON text."""

    index: int
    id: str
    name: str
    parts: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def arguments(self) -> str:
        """The arguments so far. Those of a complete call are a JSON object."""
        return "".join(self.parts)


@dataclass(frozen=True)
class ChoiceEnd:
    """The last part of a choice."""

    reason: EndReason


@dataclass(frozen=True)
class AnswerEvent:
    """The next part of the choice with index `choice`. `call` is the call that the part belongs to.

    `logprobs` covers the tokens since the last event with logprobs; it is empty unless the client requested it.
    `origins` has one letter for each token since the last event.
    """

    choice: int
    part: Part | ChoiceEnd
    call: GeneratedCall | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    origins: str = ""


@dataclass(eq=False)
class Choice:
    """One choice while it is generated. Each token that adds text makes its own event.

    With `reader` the text is split into content, reasoning and calls; without it all text is content. `tokens`,
    `drafted` and `accepted` count up to the end of a stop string. `began` and `first_token_at` are times of
    `perf_counter`. `calls` includes calls that are not complete. With `one_call` it ends after its first call. `replay`
    restores it from the tokens `generated`, and `request` is then for the rest.
    """

    index: int
    request: GenerationRequest
    tokenizer: Tokenizer
    stop: tuple[str, ...]
    reader: AnswerReader | ChannelReader | None = None
    one_call: bool = False

    def __post_init__(self) -> None:
        self.tokens = 0
        self.cached = 0
        self.prompt_done = 0
        self.drafted = 0
        self.accepted = 0
        self.reasoning_tokens = 0
        self.began = time.perf_counter()
        self.first_token_at: float | None = None
        self.finish_reason: EndReason | None = None
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[GeneratedCall] = []
        self.logprobs: list[TokenLogprob] = []
        self._text = TextStream(
            self.tokenizer.text_bytes, self.stop, trims=self.reader is not None and self.tokenizer.trims_first_blank
        )
        self.generated: list[int] = []
        self._new: list[tuple[str, TokenLogprob | None]] = []  # of tokens without a piece yet
        self._held: list[tuple[str, TokenLogprob | None]] = []  # whose text the reader holds back
        """The origin and the log-probability of each token that no event has shown."""

    @property
    def done(self) -> bool:
        """True after the choice has ended."""
        return self.finish_reason is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice, or None."""
        return self._text.stop_string

    @property
    def complete_calls(self) -> list[GeneratedCall]:
        """The calls that are complete."""
        return [call for call in self.calls if call.complete]

    @property
    def shown_calls(self) -> list[GeneratedCall]:
        """The calls that are complete, and at the end the call that the limit cut off, as far as it goes."""
        cut = self.calls[-1:] if self.finish_reason == "length" else []
        return self.complete_calls + [call for call in cut if not call.complete]

    def apply_event(self, event: GenerationEvent) -> list[AnswerEvent]:
        """Apply an event of the engine; return the answer events, a ChoiceEnd at the end. Raises WorkerLostError."""
        match event:
            case PrefillProgress():
                if not self.tokens:  # later ones count restored tokens of the answer too
                    self.cached = max(self.cached, event.cached)
                    self.prompt_done = event.done
                return []
            case TokenChunk():
                return self._apply_tokens(event)
            case Finished():
                self.drafted, self.accepted = event.stats.drafted, event.stats.accepted
                if event.reason not in ("stop", "length"):
                    raise WorkerLostError(event.error or f"the request was {event.reason}")
                return self._end("stop" if event.reason == "stop" else "length")

    def replay(self, tokens: Sequence[int]) -> list[AnswerEvent]:
        """Restore the choice from `tokens`, read one by one as before; return the events. `request` goes on."""
        events: list[AnswerEvent] = []
        for token in tokens:
            if self.done:
                return events
            events += self.apply_event(TokenChunk((token,)))
        if not self.done and len(tokens) >= self.request.max_tokens:
            return events + self._end("length")
        self.request = replace(self.request, emitted=tuple(tokens))
        return events

    def _apply_tokens(self, chunk: TokenChunk) -> list[AnswerEvent]:
        self.first_token_at = self.first_token_at or time.perf_counter()
        origins = DRAFTED * chunk.accepted + SAMPLED * (len(chunk.tokens) - chunk.accepted)
        self._new += zip_longest(origins, chunk.logprobs)
        self.drafted += chunk.drafted
        self.accepted += chunk.accepted
        events: list[AnswerEvent] = []
        for token in chunk.tokens:
            self.tokens += 1
            self.generated.append(token)
            events += self._read_piece(self._text.add_token(token))
            if self._text.stopped or (self.one_call and self.complete_calls):
                return events + self._end("stop")
        return events

    def _end(self, reason: EndReason) -> list[AnswerEvent]:
        events = self._read_piece(self._text.finish())
        if self.reader is not None:
            events += self._record_parts(self.reader.finish(cut=reason == "length" or self._text.stopped))
        if self.complete_calls and reason == "stop":
            reason = "tool_calls"
        self.finish_reason = reason
        return [*events, AnswerEvent(self.index, ChoiceEnd(reason), **self._release())]

    def _read_piece(self, piece: Piece) -> list[AnswerEvent]:
        self._held += self._new[: len(piece.tokens)]
        del self._new[: len(piece.tokens)]
        if self.reader is None:
            if not piece.text and not any(logprob for _, logprob in self._held):
                return []
            self.content.append(piece.text)
            return [AnswerEvent(self.index, Content(piece.text), **self._release())]
        was_reasoning = self.reader.reasoning
        parts = self.reader.add_text(piece.text)
        if was_reasoning or self.reader.reasoning:
            self.reasoning_tokens += len(piece.tokens)
        return self._record_parts(parts)

    def _record_parts(self, parts: list[Part]) -> list[AnswerEvent]:
        events = [self._record_part(part) for part in join_parts(parts)]
        for place, event in reversed([*enumerate(events)]):
            if not isinstance(event.part, CallEnd):
                events[place] = replace(event, **self._release())
                break
        return events

    def _record_part(self, part: Part) -> AnswerEvent:
        match part:
            case Content(text):
                self.content.append(text)
                return AnswerEvent(self.index, part)
            case Reasoning(text):
                self.reasoning.append(text)
                return AnswerEvent(self.index, part)
            case CallStart(name):
                number = len(self.calls)  # with the request, it gives a restored call the same id
                digest = hashlib.sha256(f"{self.request.request_id}/{number}".encode()).hexdigest()
                self.calls.append(GeneratedCall(number, f"call_{digest[:24]}", name))
            case CallArguments(text):
                self.calls[-1].parts.append(text)
            case CallEnd(complete):
                self.calls[-1].complete = complete
        return AnswerEvent(self.index, part, self.calls[-1])

    def _release(self) -> dict[str, Any]:
        """Return the fields of an event about the tokens held back."""
        held, self._held = self._held, []
        logprobs = tuple(logprob for _, logprob in held if logprob is not None)
        self.logprobs += logprobs
        return {"logprobs": logprobs, "origins": "".join(origin for origin, _ in held)}


ID_LENGTH = 24
"""Characters of an answer's id after its prefix, as OpenAI's ids have."""


def new_id(prefix: str) -> str:
    """Return a new id of an answer, for the body, `X-Request-Id`, the engine's requests and the log."""
    return f"{prefix}{uuid.uuid4().hex[:ID_LENGTH]}"


@dataclass(frozen=True)
class GeneratedAnswer:
    """The choices of one or more prompts, `settings.n` consecutive ones each."""

    id: str
    model: str
    settings: request_settings.GenerationSettings
    choices: Sequence[Choice]
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        assert len(self.choices) % self.settings.n == 0
        assert [choice.index for choice in self.choices] == list(range(len(self.choices)))

    @property
    def done(self) -> bool:
        """True after all choices have ended."""
        return all(choice.done for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts. A prompt counts once for all its choices."""
        return sum(len(choice.request.prompt) for choice in self.choices[:: self.settings.n])

    @property
    def image_tokens(self) -> int:
        """Prompt tokens of images."""
        requests = [choice.request for choice in self.choices[:: self.settings.n]]
        return sum(i.span.end - i.span.start for each in requests for i in each.images)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return sum(choice.cached for choice in self.choices[:: self.settings.n])

    @property
    def prompt_done(self) -> int:
        """Prompt tokens that are computed or cached."""
        return sum(choice.prompt_done for choice in self.choices[:: self.settings.n])

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.tokens for choice in self.choices)


async def text_answer(
    api: Api,
    settings: request_settings.GenerationSettings,
    prompts: Sequence[tuple[int, ...]],
    answer_id: str,
    *,
    output: OutputFormat | None = None,
) -> GeneratedAnswer:
    """Return the continuations of `prompts`, before their first token. Raises RequestError for an invalid request."""
    forced = {}
    if output is not None:
        forced["grammar"] = await api.compiler.compile([output])
    stop_tokens, stop = request_settings.stops_of(api, settings)
    requests = request_settings.requests_of(api, settings, prompts, answer_id, stop_tokens, forced)
    choices = [Choice(index, each, api.tokenizer, stop) for index, each in enumerate(requests)]
    return GeneratedAnswer(answer_id, api.model.id, settings, choices)


async def chat_answer(
    api: Api,
    chat: request_settings.ChatRequest,
    answer_id: str,
    restored: GenerationRequest | None = None,
    emitted: Sequence[int] = (),
) -> GeneratedAnswer:
    """Return the answer before its first token, or that of a `restored` request after `emitted`. Raises RequestError.

    The choice reads the emitted tokens later.
    """
    prompt, images = await prompt_of(api, chat)
    stop_tokens, stop = request_settings.stops_of(api, chat.settings)
    if restored is not None and images:
        if restored.prompt[: len(prompt.tokens)] != prompt.tokens:
            raise RequestError("the images of this answer have changed since it began")
        restored = replace(restored, images=images)
    if restored is not None:
        restored = _with_limit(restored, emitted, request_settings.reasoning_limit(api, chat, prompt))
    requests = [restored] if restored else []
    if restored is None:
        forced = await request_settings.constraint_fields(api, chat, prompt, stop_tokens)
        requests = [
            replace(request, turn=prompt.turn, continued=prompt.continued, images=images)
            for request in request_settings.requests_of(
                api, chat.settings, [prompt.tokens], answer_id, stop_tokens, forced
            )
        ]
    choices = [
        Choice(
            index,
            request,
            api.tokenizer,
            stop,
            reader_of(api.tokenizer.marks, thinking=prompt.thinking, reasons=prompt.reasons, tools=chat.tools),
            one_call=chat.one_call,
        )
        for index, request in enumerate(requests)
    ]
    return GeneratedAnswer(answer_id, api.model.id, chat.settings, choices)


def _with_limit(request: GenerationRequest, emitted: Sequence[int], limit: Json) -> GenerationRequest:
    """Return a restored request with the limit of its reasoning, which earlier releases kept beside it.

    They left the tokens that close the reasoning out of `emitted`. Raises RequestError if the limit ended without them.
    """
    if not limit or request.params.reasoning_budget is not None:
        return request
    budget, mark = limit["reasoning_budget"], limit["reasoning_end"][-1]
    if len(emitted) >= budget and mark not in emitted[:budget]:
        raise RequestError("an earlier release began this answer and limited its reasoning. Send the request again.")
    return replace(request, params=replace(request.params, **limit))
