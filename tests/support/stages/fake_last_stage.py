"""A last stage without a model: it applies the window rules and computes tokens by a formula.

`Scheduler` tests drive it. It checks every frame like a real stage (`WindowStack`), so an invalid header fails the test
at once.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from proto.backup import LayerState
from proto.frame import (
    Admit,
    BackUp,
    Commit,
    DropPrefix,
    Evict,
    Frame,
    Op,
    Outcome,
    RestoreBackup,
    RestorePrefix,
    SavePrefix,
    Segment,
    TokenLogprob,
)
from worker.cache.sequence_cache import WindowStack

VOCAB = 97


def target(tokens: Sequence[int], seed: int = 0) -> int:
    """Return the token after `tokens`. The formula uses all of them and the seed."""
    return (7 * tokens[-1] + 3 * len(tokens) + 5 * sum(tokens) + seed) % VOCAB


def plain(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """Return `count` tokens decoded one at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target(tokens, seed))
    return tokens[len(prompt) :]


@dataclass
class FakeSequence:
    """The state of a sequence: tokens up to the end of its open windows.

    `upstream` is the state of a stage before it, which knows accepted lengths from headers alone.
    """

    admitted: Admit
    stack: WindowStack = field(default_factory=WindowStack)
    upstream: WindowStack = field(default_factory=WindowStack)
    tokens: list[int] = field(default_factory=list)


class FakeLastStage:
    """A last stage that takes frames in order. `come_back` returns them, oldest first, when the test wants.

    Drafts for the first `right` of every `out_of` positions are the target's own. The others differ.
    """

    def __init__(
        self, epoch: int = 0, right: int = 3, out_of: int = 5, stage_us: int = 100
    ) -> None:
        self.epoch = epoch
        self.right, self.out_of = right, out_of
        self.stage_us = stage_us
        self.next_token: Callable[[Sequence[int], int], int] = target
        """The model: the token after a text, for a seed."""
        self.sequences: dict[int, FakeSequence] = {}
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.backups: dict[int, tuple[int, LayerState]] = {}
        """The newest backup of each sequence until it is read: its tokens and its state."""
        self.received: dict[int, list[int]] = {}
        """Backups to restore, by sequence."""
        self.seen: list[Frame] = []
        self.under_way: deque[Frame] = deque()

    def receive_backup(self, seq_id: int, states: Sequence[LayerState]) -> None:
        """Keep the tokens of a backup until the sequence is admitted."""
        self.received[seq_id] = [token for state in states for token in json.loads(state.data)]

    def send(self, frame: Frame) -> None:
        """Process a frame at once, and keep it until `come_back`."""
        assert (frame.epoch, frame.number) == (self.epoch, len(self.seen))
        self.seen.append(frame)
        for op in frame.ops:
            self._apply(op)
        outcomes = tuple(self._run(segment) for segment in frame.segments)
        self.under_way.append(replace(frame, outcomes=outcomes, stage_us=(self.stage_us,)))

    @property
    def in_flight(self) -> int:
        """Number of frames not returned."""
        return len(self.under_way)

    @property
    def newest(self) -> Frame:
        """The newest frame, with its outcomes."""
        return self.under_way[-1]

    def come_back(self) -> Frame:
        """Return the oldest frame."""
        return self.under_way.popleft()

    def _apply(self, op: Op) -> None:
        match op:
            case Admit():
                assert op.seq_id not in self.sequences
                self.sequences[op.seq_id] = FakeSequence(op)
            case Commit():
                held = self.sequences[op.seq_id]
                result = held.stack.commit_window(op.window, op.accepted_length, in_header=True)
                if result.trim:  # the text ended before a window that continues
                    del held.tokens[-result.trim :]
                held.upstream.commit_window(op.window, op.accepted_length, in_header=True)
                assert len(held.tokens) == held.stack.length
                assert held.stack.stale or held.stack.length == held.upstream.length
            case Evict():
                self.backups.pop(op.seq_id, None)
                self.received.pop(op.seq_id, None)
                self.sequences.pop(op.seq_id, None)
            case BackUp():
                held = self.sequences[op.seq_id]
                assert not held.upstream.windows
                assert op.start < held.upstream.length == len(held.tokens)
                state = LayerState(0, True, json.dumps(held.tokens[op.start :]).encode())
                self.backups[op.seq_id] = len(held.tokens), state
            case RestoreBackup():
                held = self.sequences[op.seq_id]
                assert not held.tokens
                held.tokens += self.received.pop(op.seq_id)
                assert len(held.tokens) == op.length
                held.stack.length = held.upstream.length = len(held.tokens)
            case SavePrefix():
                held = self.sequences[op.seq_id]
                assert op.entry not in self.prefixes
                assert not held.upstream.windows
                assert held.upstream.length == len(held.tokens)
                self.prefixes[op.entry] = tuple(held.tokens)
            case RestorePrefix():
                held = self.sequences[op.seq_id]
                assert not held.tokens
                held.tokens += self.prefixes[op.entry]
                held.stack.length = held.upstream.length = len(held.tokens)
            case DropPrefix():
                del self.prefixes[op.entry]

    def _run(self, segment: Segment) -> Outcome:
        held = self.sequences[segment.seq_id]
        where = segment.window, segment.position, segment.width
        held.upstream.extend(*where, stays_open=segment.open)
        if held.stack.stale:
            return Outcome(segment.seq_id, segment.window, 0, cancelled=True)
        held.stack.extend(*where, stays_open=segment.open)
        tokens = segment.tokens
        if segment.continues:
            tokens = (self.next_token(held.tokens, held.admitted.params.seed),)
        held.tokens += tokens
        assert len(held.tokens) <= held.admitted.capacity
        if not segment.sample:
            return Outcome(segment.seq_id, segment.window, segment.width)
        accepted_length = self._accepted_length(held, segment)
        del held.tokens[segment.position + accepted_length :]
        if segment.open and not segment.continues:
            held.stack.commit_window(segment.window, accepted_length, in_header=False)
        if not accepted_length:
            return Outcome(segment.seq_id, segment.window, 0)
        token = self.next_token(held.tokens, held.admitted.params.seed)
        return Outcome(
            segment.seq_id,
            segment.window,
            accepted_length,
            token,
            self._drafts([*held.tokens, token], segment.drafts, held.admitted.params.seed),
            self._logprobs(held, segment, accepted_length, token),
        )

    def _accepted_length(self, held: FakeSequence, segment: Segment) -> int:
        if segment.continues or not segment.open:
            return segment.width
        accepted_length = 0
        while accepted_length < segment.width:
            before = held.tokens[: segment.position + accepted_length]
            if segment.tokens[accepted_length] != self.next_token(
                before, held.admitted.params.seed
            ):
                break
            accepted_length += 1
        return accepted_length

    def _drafts(self, tokens: list[int], count: int, seed: int) -> tuple[int, ...]:
        drafts: list[int] = []
        for _ in range(count):
            right = self.next_token([*tokens, *drafts], seed)
            miss = (len(tokens) + len(drafts)) % self.out_of >= self.right
            drafts.append((right + miss) % VOCAB)
        return tuple(drafts)

    def _logprobs(
        self, held: FakeSequence, segment: Segment, accepted_length: int, token: int
    ) -> tuple[TokenLogprob, ...]:
        if held.admitted.params.logprobs is None:
            return ()
        drafts = segment.tokens[1:accepted_length] if segment.open else ()
        return tuple(TokenLogprob(t, -float(t)) for t in (*drafts, token))


class LuckyLastStage(FakeLastStage):
    """A last stage whose drafts are each the target's own with a chance of `chance`. The text decides the draw."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def _drafts(self, tokens: list[int], count: int, seed: int) -> tuple[int, ...]:
        drafts: list[int] = []
        for _ in range(count):
            text = [*tokens, *drafts]
            lucky = random.Random(repr((text, seed))).random() < self.chance
            drafts.append((self.next_token(text, seed) + (not lucky)) % VOCAB)
        return tuple(drafts)
