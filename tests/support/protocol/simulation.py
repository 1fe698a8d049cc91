"""A pipeline of stages that sleep and links that delay, under the real loop, scheduler and frames.

Time is virtual by default: an idle event loop jumps to its next timer. Sixteen stages of 10 ms then cost only the
coordinator's own work, and the figures are those of the schedule, not of the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.pipeline.pipeline import Pipeline
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import GenerationRequest, TokenChunk, generate
from coordinator.schedule.scheduler import Scheduler
from coordinator.status.frame_trace import ProcessTrace
from mtp.device import FrameLimits
from proto import cluster_pb2 as pb
from proto.backup import LayerState, ReceivedStates
from proto.control import Rollback
from proto.errors import ClusterError, NotReadyError
from proto.frame import Frame, decode, encode
from proto.frame_stamps import StampRing
from tests.support.stages.token_stages import WORDS, FakeLastStage
from worker.engine.stage_state import RelayedTokens, relayed_tokens

T = TypeVar("T")

SKIP_SECONDS = 1e-5
"""Seconds. Time of a stage for a frame that it skips."""

ROOM = Capacity(sequences=64, kv_tokens=2**20, prefix_bytes=0)


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances the clock where a real selector would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Advance the clock by `timeout` and return the ready events."""
        assert timeout is not None, "nothing is left that could ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds pass at once."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass(frozen=True)
class Timing:
    """The times of a simulated pipeline, in seconds.

    A frame takes `stage` in each stage, and `hop` between neighbours. Each further row of windows adds `row`, each
    prompt token `token`, and each draft in the last stage `draft`. By default the cost does not depend on the content
    of a frame, as if reading the weights took all the time. The coordinator takes `apply` from a result to the frames
    that follow from it.
    """

    stages: int
    stage: float = 0.010
    hop: float = 0.001
    row: float = 0.0
    draft: float = 0.0
    apply: float = 0.0
    token: float = 0.0

    def of(self, frame: Frame, stage: int) -> float:
        """Return the seconds of a frame in a stage."""
        windows = [s for s in frame.segments if s.open]
        further = max(0, sum(s.width for s in windows) - 1)
        drafts = max((s.drafts for s in windows), default=0) if stage == self.stages - 1 else 0
        tokens = sum(s.width for s in frame.segments if not s.open)
        return self.stage + further * self.row + drafts * self.draft + tokens * self.token

    @property
    def step(self) -> float:
        """Seconds of one frame through an empty pipeline and back."""
        return self.stages * self.stage + (self.stages + 1) * self.hop


class PipelineWithoutWorkers:
    """The methods of `coordinator.pipeline.pipeline.Pipeline` that need worker processes, disks or real times."""

    async def find_prefix(self, tokens: Sequence[int]) -> int:
        """Return 0: no stage has a disk."""
        return 0

    async def load_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Do nothing."""

    def record_worker_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        """Do nothing: no worker process takes part."""

    async def collect_trace(self, window_ns: int) -> list[ProcessTrace]:
        """Return no traces: the times are virtual."""
        return []


@dataclass
class SimulatedPipeline(PipelineWithoutWorkers):
    """The implementation of `coordinator.pipeline.pipeline.Pipeline` in virtual time."""

    timing: Timing
    last: FakeLastStage = field(default_factory=FakeLastStage)
    epoch: int = 0
    capacity: Capacity = ROOM
    suspect: str | None = None
    makes_backups: bool = False
    has_disk: bool = False
    frame_limits: FrameLimits = field(default_factory=FrameLimits)
    stamps: StampRing = field(default_factory=StampRing)

    def __post_init__(self) -> None:
        self.stages = self.timing.stages
        self._loop = asyncio.get_running_loop()
        self._free_at = [0.0] * self.stages
        self._hops: list[deque[Frame]] = [deque() for _ in range(self.stages + 1)]
        self._results: asyncio.Queue[Frame | ClusterError] = asyncio.Queue()
        self._relayed = RelayedTokens(self.epoch, WORDS)
        self._parked: deque[Frame] = deque()

    def send_frame(self, frame: Frame) -> None:
        """Send a frame through the stages."""
        self.last.send(decode(encode(frame)))  # decides at once; time passes below
        self._hops[0].append(self.last.newest)
        self._loop.call_later(self.timing.hop, self._arrive, 0)

    def _arrive(self, stage: int) -> None:
        frame = self._hops[stage].popleft()  # timers that are due together come in any order
        if stage == self.stages:
            assert self.last.come_back() is frame
            times = [self.timing.of(frame, stage) for stage in range(self.stages)]
            stage_us = tuple(int(seconds * 1e6) for seconds in times)
            result = decode(encode(replace(frame, stage_us=stage_us)))
            self._loop.call_later(self.timing.apply, self._results.put_nowait, result)
        elif stage == 0 and self.stages > 1:
            self._parked.append(frame)
            self._run_parked()
        else:
            self._run(frame, stage)

    def _run_parked(self) -> None:
        """Let stage 0 run the frames whose tokens have arrived, in order."""
        while self._parked and not self._relayed.lacks(self._parked[0]):
            self._run(self._parked.popleft(), 0)

    def _run(self, frame: Frame, stage: int) -> None:
        start = max(self._loop.time(), self._free_at[stage])
        # The last stage knows the invalidated windows and skips them. The others may not know them yet.
        invalidated = frame.segments and all(outcome.cancelled for outcome in frame.outcomes)
        skipped = invalidated and stage == self.stages - 1
        self._free_at[stage] = start + (SKIP_SECONDS if skipped else self.timing.of(frame, stage))
        self._hops[stage + 1].append(frame)
        arrives = self._free_at[stage] + self.timing.hop
        self._loop.call_at(arrives, self._arrive, stage + 1)
        message = relayed_tokens(frame) if stage == self.stages - 1 > 0 else None
        if message is not None:
            self._loop.call_at(arrives, self._relay, message)

    def _relay(self, message: Frame) -> None:
        """Let stage 0 receive relayed tokens."""
        self._relayed.receive_tokens(message, self.last.sequences)
        self._run_parked()

    async def receive_frame(self) -> Frame:
        """Wait for the next frame from the last stage and return it."""
        result = await self._results.get()
        if isinstance(result, ClusterError):
            raise result
        return result

    def broadcast_rollback(self, rollback: Rollback) -> None:
        """Do nothing: stages that sleep have nothing to restore."""

    def broadcast_cancel(self, seq_id: int) -> None:
        """Do nothing: stages that sleep have nothing to skip."""

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        """Raise NotReadyError: the stages hold no state."""
        raise NotReadyError("a simulated pipeline makes no backups")

    async def write_backup(self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]) -> None:
        """Do nothing: the stages hold no state."""

    def fail(self, error: ClusterError) -> None:
        """Make `receive_frame` raise `error`."""
        self._results.put_nowait(error)

    async def close(self) -> None:
        """Do nothing: the pipeline holds no resources."""


class OnePipeline:
    """A source with one pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    async def acquire(self) -> Pipeline:
        """Return the pipeline."""
        return self.pipeline

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        """Raise AssertionError: the simulated pipeline must not fail."""
        raise AssertionError(f"the simulated pipeline failed: {error}") from error


class Simulation:
    """A loop over a simulated pipeline, and the measurements of its clients. Use it as an async context manager."""

    def __init__(
        self,
        timing: Timing,
        *,
        chunk: int = 64,
        mtp: str = "off",
        last: FakeLastStage | None = None,
        frame: int | None = None,
        room: Capacity = ROOM,
    ) -> None:
        self.timing = timing
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        limits = Limits(context=2**18, prefill_chunk=chunk, step_tokens=frame or chunk)
        self.scheduler = Scheduler(limits, Controller(MtpMode.parse(mtp)))
        pipeline = SimulatedPipeline(timing, last or FakeLastStage(), capacity=room)
        self.loop = GenerationLoop(OnePipeline(pipeline), self.scheduler, self.clock)

    async def __aenter__(self) -> Simulation:
        await self.loop.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.loop.close()

    async def stream(self, prompt: int, tokens: int, seed: int = 0, client: str = "") -> list[float]:
        """Run one request with `prompt` prompt tokens. Return the times at which its tokens arrived."""
        words = tuple(i % 40 for i in range(seed, seed + prompt))
        request = GenerationRequest(words, tokens, client=client)
        times: list[float] = []
        async for event in generate(self.loop, request):
            if isinstance(event, TokenChunk):
                times += [self.clock()] * len(event.tokens)
        return times


async def decode_rate(timing: Timing, streams: int, tokens: int = 40) -> float:
    """Return the tokens per second of `streams` equal streams, without the first and last tokens."""
    async with Simulation(timing) as simulation:
        times = await asyncio.gather(*(simulation.stream(3, tokens, i) for i in range(streams)))
    start = max(t[0] for t in times)
    end = min(t[-1] for t in times)
    counted = sum(1 for t in times for moment in t if start < moment <= end)
    return counted / (end - start)


async def prefill_seconds(timing: Timing, chunks: int) -> float:
    """Return the time to the first token of a prompt of `chunks` chunks in an idle pipeline."""
    async with Simulation(timing) as simulation:
        started = simulation.clock()
        times = await simulation.stream(64 * chunks, 1)
        return times[0] - started


async def longest_gap(timing: Timing, chunks: int) -> float:
    """Return the longest wait between two tokens of a running stream while `chunks` prompt chunks are prefilled."""
    async with Simulation(timing) as simulation:
        open_stream = asyncio.create_task(simulation.stream(3, 200))
        await asyncio.sleep(5 * timing.step)
        prefill = asyncio.create_task(simulation.stream(64 * chunks, 1, seed=1))
        started = simulation.clock()
        ended = (await prefill)[0]
        times = await open_stream
        gaps = [b - a for a, b in itertools.pairwise(times) if a < ended and b > started]
        return max(gaps)


async def stream_seconds(timing: Timing, mtp: str, chance: float, tokens: int) -> float:
    """Return the time from the first token to the last of one stream with draft acceptance `chance`."""
    async with Simulation(timing, mtp=mtp, last=FakeLastStage(chance=chance)) as simulation:
        times = await simulation.stream(7, tokens)
    return times[-1] - times[0]
