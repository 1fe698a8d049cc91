"""Prefixes on the disks of stages: a prompt starts from one, and does not wait for a disk that is stuck."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.pipeline.pipeline import FoundPrefix, Move, longest_prefix, prefix_with_moves
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import GenerationRequest, TokenChunk, generate
from coordinator.schedule.scheduler import Scheduler
from proto import cluster_pb2 as pb
from proto.backup import LayerState, prefix_key
from proto.errors import NotReadyError
from proto.frame import Frame, SavePrefix
from proto.span import Span
from tests.support.protocol.simulation import OnePipeline, SimulatedPipeline, Timing, run_virtually
from tests.support.stages.token_stages import FakeLastStage, plain

ROOM = Capacity(sequences=2, kv_tokens=10_000, prefix_bytes=2**20, token_bytes=1)
LIMITS = Limits(context=4096)
PROMPT = tuple(range(400))
STORED = 320
"""Tokens of the prompt that the disks have."""

STUCK = 1000.0
"""Seconds of a disk that does not answer."""


@dataclass
class DiskPipeline(SimulatedPipeline):
    """A simulated pipeline whose stages have STORED tokens on disk, or fail in the way that `disk` names."""

    disk: str = "good"
    loaded: int = 0

    async def find_prefix(self, tokens: Sequence[int]) -> int:
        """Return the length of the stored prefix."""
        await asyncio.sleep(STUCK if self.disk == "search is stuck" else 0.001)
        found = FoundPrefix(STORED if len(tokens) > STORED else 0)
        found.share = 1.0 if "move" in self.disk else 0.0
        found.own = 0 if found.share else int(found)
        return found

    async def load_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Give the stages the state after `tokens`."""
        await asyncio.sleep(STUCK if "is stuck" in self.disk else 0.001)
        if self.disk == "damaged":
            raise NotReadyError("the prefix cannot be read")
        self.loaded += 1
        state = LayerState(0, False, json.dumps(list(tokens)).encode())
        self.last.receive_backup(seq_id, [state])


async def answer(disk: str, *prompts: tuple[int, ...]) -> tuple[list[int], float, DiskPipeline]:
    """Return the tokens of the last of some requests, the seconds until its first token, and the pipeline."""
    clock = asyncio.get_running_loop().time
    pipeline = DiskPipeline(Timing(2), FakeLastStage(1), 1, ROOM, has_disk=disk != "", disk=disk)
    scheduler = Scheduler(LIMITS, Controller(MtpMode(0)))
    loop = GenerationLoop(OnePipeline(pipeline), scheduler, clock)
    await loop.start()
    tokens, first = list[int](), 0.0
    for prompt in prompts or (PROMPT,):
        tokens, started = [], clock()
        async for event in generate(loop, GenerationRequest(prompt, 20)):
            if isinstance(event, TokenChunk):
                first = clock() - started if not tokens else first
                tokens += event.tokens
    await loop.close()
    return tokens, first, pipeline


async def tokens_of(loop: GenerationLoop) -> list[int]:
    """Return the tokens of an answer to PROMPT."""
    events = [event async for event in generate(loop, GenerationRequest(PROMPT, 20))]
    return [t for event in events if isinstance(event, TokenChunk) for t in event.tokens]


def positions(frames: Sequence[Frame]) -> list[int]:
    return [segment.position for frame in frames for segment in frame.segments]


def test_a_prompt_starts_from_the_disk() -> None:
    """The stages compute only what is new, and save the prefix in memory for the next request."""
    tokens, _, pipeline = run_virtually(answer("good", PROMPT, PROMPT))
    assert tokens == plain(PROMPT, 20)
    assert min(positions(pipeline.last.seen)) == STORED
    assert pipeline.loaded == 1, "the second request finds the entry in memory"
    saved = [op for frame in pipeline.last.seen for op in frame.ops if isinstance(op, SavePrefix)]
    assert prefix_key(PROMPT[:STORED]) in {op.key for op in saved}


@pytest.mark.parametrize("kind", ["damaged", "load is stuck", "search is stuck"])
def test_a_bad_disk_costs_no_answer(kind: str) -> None:
    """The prompt is computed. It waits for a search for a second at most, and for a load of unknown speed for five."""
    tokens, first, _ = run_virtually(answer(kind))
    without, usual, _ = run_virtually(answer(""))
    assert tokens == without == plain(PROMPT, 20)
    if "stuck" in kind:
        _, again, _ = run_virtually(answer(kind, PROMPT, PROMPT[::-1]))
        assert again - usual < 0.1, "the next request does not wait for it"
    assert first - usual < {"damaged": 0.1, "load is stuck": 6.5, "search is stuck": 1.5}[kind]


def test_blocks_of_other_workers_are_used() -> None:
    """The prompt starts from them, with the same tokens."""
    tokens, _, pipeline = run_virtually(answer("moves"))
    assert tokens == plain(PROMPT, 20) and pipeline.loaded == 1
    assert min(positions(pipeline.last.seen)) == STORED


def test_blocks_that_come_too_slowly_cost_no_answer() -> None:
    """A prompt of unknown cost waits for them for five seconds, and the next one computes at once."""
    tokens, first, pipeline = run_virtually(answer("move is stuck"))
    _, usual, _ = run_virtually(answer(""))
    assert tokens == plain(PROMPT, 20) and pipeline.loaded == 0
    assert first - usual < 5.5
    _, again, _ = run_virtually(answer("move is stuck", PROMPT, PROMPT[::-1]))
    assert again - usual < 0.1


def stages(*held: dict[int, set[int]], namespace: str = "model") -> list[pb.PrefixReply]:
    """Return the replies of stages of two layers each."""
    return [
        pb.PrefixReply(
            lengths=[n for n, layers in one.items() if layers >= {2 * number, 2 * number + 1}],
            layers=[2 * number, 2 * number + 1],
            namespace=namespace,
            held=[pb.HeldPrefix(length=n, layers=layers) for n, layers in one.items()],
        )
        for number, one in enumerate(held)
    ]


def test_the_longest_prefix_of_all_disks_together_is_found() -> None:
    """A stage reads the layers that it lacks from one disk that has them, and none that another arithmetic made."""
    both = {2, 3}
    found, moves = prefix_with_moves(stages({200: {0, 1}}, {200: both, 300: both}))
    assert (found, found.own, found.share, moves) == (200, 200, 0.0, [])
    found, moves = prefix_with_moves(stages({200: {0, 1}, 300: {0, 2, 3}}, {200: both, 300: {1}}))
    assert (found, found.own, found.share) == (300, 200, 1.5)
    assert moves == [Move(1, 0, Span(1, 2)), Move(0, 1, Span(2, 4))]
    swapped = stages({300: both}, {300: {0, 1}})
    assert prefix_with_moves(swapped)[0] == 300
    swapped[0].namespace = "other"
    assert prefix_with_moves(swapped) == (0, [])
    assert prefix_with_moves(stages({300: {0, 1}}, {}))[0] == 0


@dataclass
class CrowdedPipeline(DiskPipeline):
    """Stages with K/V memory for one and a half answers, which refuse a prefix beyond it."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(LIMITS, Controller(MtpMode(0))))

    async def load_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Give the stages the state after `tokens`."""
        waiting = [one for one in self.scheduler.waiting if one.restoring or one.restorable_tokens]
        held = sum(one.capacity for one in (*self.scheduler.running.values(), *waiting))
        assert held <= self.capacity.kv_tokens
        await super().load_prefix(seq_id, tokens)


def test_waiting_prefixes_take_the_room_of_the_running_ones() -> None:
    """A prompt without room gets its prefix once another answer has ended, and not beside it."""

    async def three() -> tuple[list[list[int]], int]:
        room = Capacity(sequences=4, kv_tokens=700, prefix_bytes=0, token_bytes=1)
        pipeline = CrowdedPipeline(Timing(2), FakeLastStage(1), 1, room, has_disk=True, disk="good")
        clock = asyncio.get_running_loop().time
        loop = GenerationLoop(OnePipeline(pipeline), pipeline.scheduler, clock)
        await loop.start()
        found = await asyncio.gather(*(tokens_of(loop) for _ in range(3)))
        await loop.close()
        return found, pipeline.loaded

    assert run_virtually(three()) == ([plain(PROMPT, 20)] * 3, 3)


def disks(*held: list[int]) -> list[pb.PrefixReply]:
    """Return the answers of the disks of stages."""
    return [pb.PrefixReply(lengths=lengths) for lengths in held]


def test_all_stages_must_have_a_prefix() -> None:
    """The longest prefix is one that each stage has. A longer one of some stages does not count."""
    assert longest_prefix([]) == longest_prefix(disks([200], [])) == 0
    assert longest_prefix(disks([200], [200, 300])) == 200
    assert longest_prefix(disks([200, 300], [300, 200])) == 300
