"""A plan of real stage engines in one process, whose hops, signals, backups and deaths are virtual.

Frames are encoded and decoded at every hop. The engines compute at once, on this thread, and virtual time passes
between them. Each fault is one method.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from coordinator.planning.capacity import Capacity
from mtp.device import FrameLimits
from proto.backup import LayerState, ReceivedStates, by_layer
from proto.control import Rollback
from proto.errors import ClusterError, StaleEpochError, WorkerLostError
from proto.frame import Frame, decode, encode
from proto.frame_stamps import StampRing
from tests.support.protocol.simulation import PipelineWithoutWorkers
from tests.support.stages.token_stages import TokenBackup
from worker.engine.frame_engine import FrameEngine
from worker.engine.stage_backups import ReceivedBackup
from worker.engine.stage_state import relayed_tokens

STAGE_SECONDS, HOP_SECONDS, SIGNAL_SECONDS = 0.010, (0.0005, 0.004), (0.0002, 0.03)
"""Virtual seconds. Time of a frame in a stage, and the shortest and longest times of a hop and of a signal."""

TRANSFER_SECONDS = (0.002, 0.08)
"""Virtual seconds. Shortest and longest transfer of a stage's part of a backup."""

FAILURE_TIMEOUT = 2.0
"""Virtual seconds. Time until silence counts as the loss of a worker."""


class EnginePlan(PipelineWithoutWorkers):
    """The implementation of `coordinator.pipeline.pipeline.Pipeline` over engines of this process."""

    def __init__(
        self,
        engines: Sequence[FrameEngine],
        capacity: Capacity,
        chance: random.Random,
        counts: Counter[str],
    ) -> None:
        """Serve with `engines`. `counts` are those of the run."""
        self.engines = engines
        self.epoch, self.capacity, self.stages = engines[0].epoch, capacity, len(engines)
        self.suspect: str | None = None
        self.makes_backups = True
        self.has_disk = False
        self.frame_limits = FrameLimits()
        self.stamps = StampRing()
        self.returned = 0
        """Frames that have returned to the coordinator."""
        self.proven = asyncio.Event()
        """Set once a frame has returned, or the plan has failed."""
        self.ended = asyncio.Event()
        self._chance, self._counts = chance, counts
        self._clock = asyncio.get_running_loop()
        self._inboxes: list[deque[Frame]] = [deque() for _ in engines]
        self._busy = [False] * self.stages
        self._hop_ends = [0.0] * (self.stages + 2)
        """Arrival of the newest message of each hop, and of the relayed tokens. Later ones keep the order."""
        self._results: asyncio.Queue[Frame | ClusterError] = asyncio.Queue()
        self._dead: set[int] = set()
        self._cut_hops: set[int] = set()
        self._damage: dict[int, Callable[[bytes], list[bytes]]] = {}
        self._deaf: set[int] = set()
        self._breaking: set[int] = set()
        self._paused_until = 0.0
        self._next_backup_fails = False
        self.failed = False
        self.sent: list[bytes] = []
        """Some frames of this plan, as stage 0 received them, for a later plan to refuse."""

    # ---- frames

    def send_frame(self, frame: Frame) -> None:
        """Send a frame to stage 0."""
        data = encode(frame)
        if len(self.sent) < 3:
            self.sent.append(data)
        self._hop(0, data)

    def _hop(self, hop: int, data: bytes) -> None:
        """Carry a frame to stage `hop`, or to the coordinator after the last stage."""
        if hop in self._cut_hops or self.failed:
            return
        damage = self._damage.pop(hop, None)
        for copy in damage(data) if damage else [data]:
            self._at(hop, partial(self._arrive, hop, copy))

    def _at(self, hop: int, then: Callable[[], None]) -> None:
        now = max(self._clock.time(), self._paused_until)
        arrival = max(now + self._chance.uniform(*HOP_SECONDS), self._hop_ends[hop] + 1e-6)
        self._hop_ends[hop] = arrival
        self._clock.call_at(arrival, then)

    def _arrive(self, hop: int, data: bytes) -> None:
        if self.failed or hop in self._dead:
            return
        try:
            frame = decode(data)
        except ClusterError as error:
            self._fail_soon(error)
            return
        if hop == self.stages:
            self.returned += 1
            self.proven.set()
            self._results.put_nowait(frame)
            return
        self._inboxes[hop].append(frame)
        self._step(hop)

    def _step(self, stage: int) -> None:
        """Let an idle stage compute its oldest frame, unless the frame waits for relayed tokens."""
        engine, inbox = self.engines[stage], self._inboxes[stage]
        if self._busy[stage] or not inbox or engine.lacks_tokens(inbox[0]):
            return
        try:
            frame = inbox.popleft()
            # Real times would make the choice of a depth, and with it the run, another one each time.
            micros = int(STAGE_SECONDS * 1e6)
            out = replace(engine.process(frame), stage_us=(*frame.stage_us, micros))
            if stage in self._breaking:
                raise WorkerLostError("the engine failed after it had changed its state")
        except ClusterError as error:
            self._fail_soon(error)
            return
        self._busy[stage] = True
        self._clock.call_later(STAGE_SECONDS, self._leave, stage, out)

    def _leave(self, stage: int, out: Frame) -> None:
        """Send a computed frame on, and its tokens back to stage 0."""
        self._busy[stage] = False
        if self.failed or stage in self._dead:
            return
        message = relayed_tokens(out) if stage == self.stages - 1 > 0 else None
        if message is not None:
            self._at(self.stages + 1, partial(self._relay, encode(message)))
        self._hop(stage + 1, encode(out))
        self._step(stage)

    def _relay(self, data: bytes) -> None:
        if self.failed or 0 in self._dead:
            return
        self.engines[0].receive_tokens(decode(data))
        self._step(0)

    async def receive_frame(self) -> Frame:
        """Wait for the next frame from the last stage."""
        result = await self._results.get()
        if isinstance(result, ClusterError):
            self._results.put_nowait(result)
            raise result
        return result

    # ---- signals

    def broadcast_rollback(self, rollback: Rollback) -> None:
        """Send a rollback to every stage, each after a time of its own."""
        r = rollback
        self._signal(lambda engine: engine.rollback(self.epoch, r.seq_id, r.window, r.trim))

    def broadcast_cancel(self, seq_id: int) -> None:
        """Send a cancellation to every stage, each after a time of its own."""
        self._signal(lambda engine: engine.cancel(self.epoch, seq_id))

    def _signal(self, deliver: Callable[[FrameEngine], None]) -> None:
        def arrive(stage: int) -> None:
            """Apply the signal unless the stage has gone."""
            if not self.failed and stage not in self._dead:
                with suppress(ClusterError):  # a worker ignores a signal that it cannot apply
                    deliver(self.engines[stage])

        for stage in range(self.stages):
            copies = 0 if stage in self._deaf else self._chance.choice((1, 1, 1, 2))
            for _ in range(copies):
                self._clock.call_later(self._chance.uniform(*SIGNAL_SECONDS), arrive, stage)

    # ---- backups

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        """Return the newest backup of a sequence, read from every stage in turn."""
        states: list[LayerState] = []
        lengths, began = set(), self._clock.time()
        for stage in range(self.stages):
            await self._transfer(stage)
            found = cast(TokenBackup, self.engines[stage].backups.take_backup(seq_id))
            lengths.add(found.length)
            states += found.states
        assert len(lengths) == 1, f"the backups of a sequence have {lengths} tokens"
        return ReceivedStates(lengths.pop(), states, self._clock.time() - began)

    async def write_backup(self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]) -> None:
        """Give every stage its part of a backup, in turn."""
        for stage, engine in enumerate(self.engines):
            await self._transfer(stage)
            span = engine.stage.modules.span
            end = span.end + (stage == self.stages - 1)
            own = by_layer(s for s in states if span.start <= s.layer < end)
            engine.receive_backup(seq_id, ReceivedBackup(tuple(tokens), own))
        self._counts["backups written"] += 1

    async def _transfer(self, stage: int) -> None:
        await asyncio.sleep(self._chance.uniform(*TRANSFER_SECONDS))
        if self._next_backup_fails:
            self._next_backup_fails = False
            raise WorkerLostError("a transfer of a backup broke")
        if self.failed or stage in self._dead:
            raise WorkerLostError("a stage is gone")

    # ---- faults

    def fail(self, error: ClusterError) -> None:
        """End the plan at once, as a broken connection does."""
        if not self.failed:
            self._end()
            self._results.put_nowait(error)

    def _fail_soon(self, error: ClusterError) -> None:
        """End the plan after the stage's report of an error has arrived."""
        self._clock.call_later(self._chance.uniform(*HOP_SECONDS), self.fail, error)

    def stop_stage(self, stage: int) -> None:
        """Stop a stage without a sign. The silence is detected after the timeout."""
        self._dead.add(stage)
        seconds = self._chance.uniform(0.5, 1.0) * FAILURE_TIMEOUT
        self._clock.call_later(seconds, self.fail, WorkerLostError("a stage is silent"))

    def cut_hop(self, hop: int) -> None:
        """Lose all further frames of a hop without a sign."""
        self._cut_hops.add(hop)
        self._clock.call_later(FAILURE_TIMEOUT, self.fail, WorkerLostError("no frame has moved"))

    def pause(self, seconds: float) -> None:
        """Delay everything that is sent meanwhile, for less than the timeout."""
        self._paused_until = self._clock.time() + seconds

    def damage_frame(self, hop: int, damage: Callable[[bytes], list[bytes]]) -> None:
        """Replace the next frame of a hop by others."""
        self._damage[hop] = damage

    def break_engine(self, stage: int) -> None:
        """Fail the engine of a stage in the middle of its next frame."""
        self._breaking.add(stage)

    def deafen(self, stage: int) -> None:
        """Lose all signals to a stage from now on. The headers of frames repeat them."""
        self._deaf.add(stage)

    def break_backup(self) -> None:
        """Break the next transfer of a backup."""
        self._next_backup_fails = True

    def refuse_stale(self, frames: Sequence[bytes]) -> None:
        """Give frames of an older plan to every stage, and assert that they change nothing."""
        for engine in self.engines:
            before = engine.frames_done, engine.report_state()
            for data in frames:
                try:
                    engine.process(decode(data))
                except StaleEpochError:
                    continue
                raise AssertionError(f"a frame of an older plan ran in epoch {engine.epoch}")
            assert (engine.frames_done, engine.report_state()) == before

    # ---- the end

    async def close(self) -> None:
        """End the plan."""
        self._end()

    def _end(self) -> None:
        self.failed = True
        self.proven.set()
        self.ended.set()
