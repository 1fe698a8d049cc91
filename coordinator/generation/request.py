"""A generation request and the events it produces: the seam between `api`/`cli` and the generation loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from proto.frame import TokenLogprob
from proto.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class GenerationRequest:
    """Tokens in, and how to go on from them. Text, chat templates and stop strings are the caller's business.

    `stop_tokens` end the text when the model chooses one; the token itself is not emitted. `request_id` is for logs.
    The last two are for the prefix cache and change no token: how much of the prompt a conversation's next turn begins
    with (0 where that is not known), and whether a later prompt may begin with this one and its answer.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: frozenset[int] = frozenset()
    request_id: str = ""
    turn: int = 0
    continued: bool = True


@dataclass(frozen=True)
class PrefillProgress:
    """`done` of `total` prompt tokens have passed the last stage; `cached` of them came from the prefix cache."""

    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True)
class TokenChunk:
    """Tokens that are final: emitted once, never taken back. `logprobs` matches `tokens` or is empty.

    They came from a window with `drafted` drafts, of which `accepted` were kept.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class GenerationStats:
    """What one request cost. Times in seconds. `drafted_by_position[i]` windows held a draft at position i+1,
    `accepted_by_position[i]` of those kept it; counts stop where the text ended."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    windows: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def drafted(self) -> int:
        return sum(self.drafted_by_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)


@dataclass(frozen=True)
class Finished:
    """The last event of every request. `error` is one line for the client when `reason` is `error`."""

    reason: FinishReason
    stats: GenerationStats
    error: str | None = None


GenerationEvent = PrefillProgress | TokenChunk | Finished


class Generator(Protocol):
    """Serves requests. The real one is `generation.GenerationLoop`."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield events, the last a `Finished`. Closing the iterator cancels the request on every stage.

        Raises RequestError before the first event when the request can never be served,
        CapacityError when the queue is full, NotReadyError when no plan is serving.
        """
        ...
