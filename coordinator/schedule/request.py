"""A generation request and its events: the seam between `api` or `cli` and the generation loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from proto.frame import TokenLogprob
from proto.images import ImageSpan
from proto.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, eq=False)
class PromptImage:
    """A prompt's image, and its rows `dtype [rows x columns, hidden]`, which `owner` keeps in memory."""

    span: ImageSpan
    dtype: str
    data: memoryview
    owner: object = None

    def row_bytes(self, start: int, end: int) -> memoryview:
        """Return the rows of the prompt's tokens from `start` to `end`."""
        size = len(self.data) // (self.span.end - self.span.start)
        first = self.span.start
        return self.data[(start - first) * size : (end - first) * size]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt in tokens, and how to continue it. The caller handles text, chat templates and stop strings.

    A token of `stop_tokens` ends the text and is not emitted. `request_id` is for logs. `turn` and `continued` help
    the prefix cache and change no token. `turn` is the number of prompt tokens with which the conversation's next turn
    begins, 0 if unknown. `continued` says whether a later prompt may begin with this prompt and its answer.
    `emitted` are the first tokens of the answer, which an earlier process emitted. They count towards `max_tokens` and
    are not emitted again. Requests of one `client` share its part of the queue and of the pipeline. The tokens of
    `images` are ids above every vocabulary. `drafts` is the number of drafts of each window, None for the controller's
    choice. It changes no token.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: frozenset[int] = frozenset()
    request_id: str = ""
    turn: int = 0
    continued: bool = True
    emitted: tuple[int, ...] = ()
    client: str = ""
    images: tuple[PromptImage, ...] = ()
    drafts: int | None = None

    def image_at(self, position: int) -> PromptImage | None:
        """Return the image whose rows are at `position` of the prompt, or None."""
        found = (i for i in self.images if i.span.start <= position < i.span.end)
        return next(found, None)


@dataclass(frozen=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are computed, `cached` of them from the cache."""

    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True)
class TokenChunk:
    """Final tokens, with `logprobs` for each or none, of a window of `drafted` drafts, `accepted` of them right."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class GenerationStats:
    """The cost of one request. Times are in seconds.

    `drafted_by_position[i]` drafts of the head at position i + 1 have a result, and `accepted_by_position[i]` of them
    were accepted. `ngram_drafted` drafts came from the text. Drafts after the end of the text are not counted.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    windows: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    ngram_drafted: int = 0
    ngram_accepted: int = 0

    @property
    def drafted(self) -> int:
        """Drafts of the head at all positions, and from the text."""
        return sum(self.drafted_by_position) + self.ngram_drafted

    @property
    def accepted(self) -> int:
        """Accepted drafts."""
        return sum(self.accepted_by_position) + self.ngram_accepted


@dataclass(frozen=True)
class Finished:
    """The last event of every request. `error` is one line for the client if `reason` is `error`."""

    reason: FinishReason
    stats: GenerationStats
    error: str | None = None


GenerationEvent = PrefillProgress | TokenChunk | Finished


class Generator(Protocol):
    """A server of generation requests. `schedule.loop.GenerationLoop` implements it."""

    def submit(self, request: GenerationRequest, deliver: Callable[[GenerationEvent], None]) -> Callable[[], None]:
        """Queue `request`. Each of its events goes to `deliver` on the event loop, the last one a `Finished`.

        Return a function that cancels the request on every stage; it may be called at any time. Raises RequestError if
        the request can never be served, CapacityError if the queue is full, and NotReadyError if no plan serves.
        """

    def queue_position(self, request: GenerationRequest) -> int | None:
        """Return the position of `request` among the waiting ones, 1 for the next one, or None if it does not wait."""


async def generate(generator: Generator, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
    """Yield the events of `request`. Closing the iterator cancels it. Raises the errors of `Generator.submit`."""
    queue: asyncio.Queue[GenerationEvent] = asyncio.Queue()
    cancel = generator.submit(request, queue.put_nowait)
    try:
        while True:
            event = await queue.get()
            yield event
            if isinstance(event, Finished):
                return
    finally:
        cancel()
