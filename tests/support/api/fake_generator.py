"""A generator with scripted answers for tests of the API, and a scripted status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from coordinator.schedule.request import (
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    GenerationStats,
    PrefillProgress,
    TokenChunk,
)
from coordinator.status.cluster_status import ClusterStatus, NodeStatus
from coordinator.text.tokenizer import Tokenizer
from mtp.sampling.constraint import closing_tokens
from mtp.sampling.grammar import Answer
from proto.errors import ClusterError
from proto.frame import TokenLogprob


@dataclass
class FakeGenerator:
    """A generator that answers every request with the tokens of `text`, `window` tokens at a time.

    It raises `refuse` at once, and ends a request with the error `failure` after `fail_after` windows. It sleeps
    `pause` seconds before each window. After `hang_after` windows it releases `hanging` and waits without end. `answer`
    returns the text for a request. The emitted tokens of a request are not repeated.
    """

    tokenizer: Tokenizer
    text: str = "Hello world, how are you?"
    window: int = 2
    accepted: int = 0
    """Accepted drafts of each window."""
    cached: int = 0
    refuse: Exception | None = None
    failure: ClusterError | None = None
    fail_after: int | None = None
    hang_after: int | None = None
    end: FinishReason = "stop"
    pause: float = 0.0
    prefill_steps: int = 0
    prefill_pause: float = 0.0
    """A slow prefill: the number of its progress events, and the seconds before each."""
    answer: Callable[[GenerationRequest], str] | None = None
    position: int | None = None
    """The position of every request in the queue."""
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    hanging: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def prompt_text(self, index: int = -1) -> str:
        """Return the text of a prompt, of the last one by default."""
        prompt = self.requests[index].prompt
        return b"".join(map(self.tokenizer.token_bytes, prompt)).decode()

    def submit(self, request: GenerationRequest, deliver: Callable[[GenerationEvent], None]) -> Callable[[], None]:
        """Deliver the scripted events. See Generator."""
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        task = asyncio.create_task(self._deliver_all(request, deliver))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

        def cancel() -> None:
            """Stop the events."""
            task.cancel()

        return cancel

    def queue_position(self, request: GenerationRequest) -> int | None:
        """Return the scripted position. See Generator."""
        return self.position

    async def _deliver_all(self, request: GenerationRequest, deliver: Callable[[GenerationEvent], None]) -> None:
        try:
            async with contextlib.aclosing(self.events_of(request)) as events:
                async for event in events:
                    deliver(event)
        except ClusterError as error:
            deliver(Finished("error", self._stats(request, 0), error.public))

    async def events_of(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the scripted events of a request."""
        finished = False
        try:
            for step in range(self.prefill_steps):
                await asyncio.sleep(self.prefill_pause)
                yield PrefillProgress(step, self.prefill_steps, self.cached)
            yield PrefillProgress(len(request.prompt) // 2, len(request.prompt), self.cached)
            yield PrefillProgress(len(request.prompt), len(request.prompt), self.cached)
            text = self.answer(request) if self.answer else self.text
            tokens = self._limited(request, self.tokenizer.encode(text))[: request.max_tokens]
            for index, start in enumerate(range(len(request.emitted), len(tokens), self.window)):
                await self._obstacle(index)
                chunk = tokens[start : start + self.window]
                accepted = min(self.accepted, len(chunk))
                yield TokenChunk(chunk, self._logprobs(request, chunk), accepted, accepted)
            await self._obstacle(-1)
            reason: FinishReason = "length" if len(tokens) == request.max_tokens else self.end
            finished = True
            error = "the last worker is gone" if reason == "error" else None
            yield Finished(reason, self._stats(request, len(tokens)), error)
        finally:
            if not finished:
                self.cancelled.append(request.request_id)

    def _limited(self, request: GenerationRequest, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return `tokens` with the reasoning closed as the last stage does; the text goes on after its own end mark."""
        for length in range(len(tokens)):
            if closing := closing_tokens(request.params, Answer(pending=tokens), length):
                place = tokens.index(closing[-1]) + 1 if closing[-1] in tokens else len(tokens)
                return (*tokens[:length], *closing, *tokens[place:])
        return tokens

    async def _obstacle(self, window: int) -> None:
        if self.failure is not None and window == self.fail_after:
            raise self.failure
        if window == self.hang_after:
            self.hanging.release()
            await asyncio.Event().wait()
        await asyncio.sleep(self.pause)

    def _logprobs(self, request: GenerationRequest, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        if (count := request.params.logprobs) is None:
            return ()
        top = tuple((other, -0.5 - other / 1000) for other in range(count))
        return tuple(TokenLogprob(token, -token / 1000, top) for token in tokens)

    def _stats(self, request: GenerationRequest, tokens: int) -> GenerationStats:
        return GenerationStats(
            prompt_tokens=len(request.prompt),
            completion_tokens=tokens,
            cached_tokens=self.cached,
            windows=5,
            drafted_by_position=(5, 4),
            accepted_by_position=(4, 2),
        )


@dataclass
class FakeStatus:
    """The status of a cluster of three nodes, one of them refused."""

    ready: bool = True

    def status(self) -> ClusterStatus:
        """See StatusSource."""
        return ClusterStatus(
            ready=self.ready,
            model="tiny",
            detail="" if self.ready else "loading: 1 GB of 2 GB",
            epoch=3,
            mtp="auto",
            nodes=(
                NodeStatus(
                    name="mac-1",
                    address="10.0.0.1:7000",
                    span="0-3",
                    health="ready",
                    memory_used=2**30,
                    memory_limit=2**31,
                    stage_ms=12.5,
                ),
                NodeStatus(
                    name="mac-2",
                    address="10.0.0.2:7000",
                    span="4-7",
                    health="loading",
                    memory_used=2**29,
                    loaded=0.5,
                ),
                NodeStatus(
                    name="mac-3",
                    address="10.0.0.3:7000",
                    health="refused",
                    detail="it holds another checkpoint",
                ),
            ),
            running=2,
            waiting=1,
            waiting_limit=64,
            tokens_per_second=41.5,
            drafted_by_position=(100, 80),
            accepted_by_position=(80, 40),
            recoveries=1,
            uptime_seconds=125.0,
            phase_seconds=90.0,
        )
