"""A chain of stage engines, driven step by step: every hop passes bytes, and frames may wait between stages.

`Script` stands in for the coordinator's side of one sequence, `Stock` for mlx-lm's own model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.kv_cache import KVRows
from mtp.layers.layer import KVFormat
from proto.frame import Admit, Commit, Frame, Op, Outcome, Segment, decode, encode
from proto.params import SamplingParams
from proto.span import Span
from worker.engine.frame_engine import FrameEngine
from worker.model.loader import StageModules, load_stage
from worker.model.stage import StageForward
from worker.model.verifier import Verifier

EPOCH = 1
VOCAB = 256
"""Tokens. Vocabulary of `write_checkpoint`."""


@lru_cache(maxsize=256)
def modules(path: Path, start: int, end: int, first: bool, last: bool) -> StageModules:
    """Return the modules of a stage, which are loaded once, because no test changes them."""
    return load_stage(Checkpoint.open(path), Span(start, end), first=first, last=last, dtype=None)


class Recorder:
    """An output projection that records its results."""

    def __init__(self, unembed: Callable[[mx.array], mx.array]) -> None:
        self.unembed = unembed
        self.seen: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.unembed(x)
        self.seen.append(logits)
        return logits


def reject(engine: FrameEngine, seq_id: int, window: int, accepted_length: int) -> None:
    """Signal to a stage of epoch 1 that `accepted_length` tokens of a window remain, if it is open there."""
    widths = {one.number: one.width for one in engine.sequences[seq_id].stack.windows}
    engine.rollback(1, seq_id, window, widths.get(window, accepted_length) - accepted_length)


class Chain:
    """Stages of the checkpoint at `path`, split before each layer of `cuts`.

    `logits` holds the target's rows of the frame that left the chain last, by sequence. `draft_logits` holds all rows
    that drafts were drawn from, one array per draft position.
    """

    def __init__(self, path: Path, cuts: Sequence[int] = (), kv_format: KVFormat | None = None) -> None:
        layers = Checkpoint.open(path).config.num_layers
        kv_format = kv_format or KVFormat()
        borders = [0, *cuts, layers]
        self.engines: list[FrameEngine] = []
        for start, end in pairwise(borders):
            first, last = start == 0, end == layers
            loaded = modules(path, start, end, first, last)
            stage = StageForward(loaded, kv_format)
            verifier = Verifier(loaded, kv_format) if last else None
            self.engines.append(FrameEngine(stage, epoch=EPOCH, first=first, verifier=verifier))
        self.inboxes: list[deque[bytes]] = [deque() for _ in self.engines]
        self.posted = 0
        self.logits: dict[int, mx.array] = {}
        self._target = Recorder(self.verifier.unembed)
        self.verifier.unembed = self._target
        self._draft: Recorder | None = None
        if self.verifier.drafter is not None:
            self._draft = Recorder(self.verifier.drafter.unembed)
            self.verifier.drafter.unembed = self._draft

    @property
    def verifier(self) -> Verifier:
        """The verifier of the last stage."""
        found = self.engines[-1].verifier
        assert found is not None
        return found

    @property
    def draft_logits(self) -> list[mx.array]:
        """Rows that drafts were drawn from, one array per draft position."""
        assert self._draft is not None
        return self._draft.seen

    # ---- frames

    def post(self, *segments: Segment, ops: Iterable[Op] = ()) -> None:
        """Add a frame with the next number to the inbox of the first stage."""
        self.inboxes[0].append(encode(Frame(EPOCH, self.posted, tuple(ops), segments)))
        self.posted += 1

    def step(self, stage: int) -> Frame:
        """Let a stage process the oldest frame before it. Return the frame that it passes on."""
        out = self.engines[stage].process(decode(self.inboxes[stage].popleft()))
        if stage + 1 < len(self.engines):
            self.inboxes[stage + 1].append(encode(out))
        else:
            self._file_logits(out)
        return decode(encode(out))

    def drain(self) -> list[Frame]:
        """Let all frames run to the end of the chain, the oldest first. Return them."""
        done = []
        for stage, inbox in enumerate(self.inboxes):
            while inbox:
                out = self.step(stage)
                if stage + 1 == len(self.engines):
                    done.append(out)
        return done

    def send(self, *segments: Segment, ops: Iterable[Op] = ()) -> Frame:
        """Post a frame and let it run to the end."""
        self.post(*segments, ops=ops)
        return self.drain()[-1]

    def _file_logits(self, frame: Frame) -> None:
        self.logits = {}
        if not self._target.seen:
            return
        rows = self._target.seen.pop()
        start = 0
        for segment in frame.segments:
            if segment.cancelled or not (segment.open or segment.sample):
                continue
            width = segment.width if segment.open else 1
            self.logits[segment.seq_id] = rows[start : start + width]
            start += width
        assert start == rows.shape[0]

    # ---- state

    def state(self, seq_id: int, stages: Iterable[int] | None = None) -> list[mx.array]:
        """Return the state of a sequence layer by layer: conv and recurrent state, or the valid K/V."""
        found: list[mx.array] = []
        for stage in range(len(self.engines)) if stages is None else stages:
            for cache in self.engines[stage].sequences[seq_id].layers:
                found += valid(cache) if isinstance(cache, KVRows) else cache.copy().arrays()
        return found

    def head_state(self, seq_id: int) -> list[mx.array]:
        """Return the valid K/V of a sequence's head, after all waiting tokens are computed."""
        head, drafter = self.verifier.states[seq_id].head, self.verifier.drafter
        assert head is not None and drafter is not None
        copy = head.copy()
        if copy.waiting_tokens:
            drafter.catch_up([copy])
        return valid(copy.cache)


def valid(cache: KVRows) -> list[mx.array]:
    """Return copies of the tokens that a K/V cache holds, without its spare room."""
    if cache.keys is None:
        return []
    copies = cache.copy().arrays()
    mx.eval(copies)
    return copies


def same(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> bool:
    """Return whether two states are equal bit for bit."""
    return len(ours) == len(theirs) and all(mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))


@dataclass
class Script:
    """One sequence as its coordinator sees it: the known tokens and the pending operations.

    `known` holds the prompt and all tokens chosen since. The last one is in no committed window yet.
    """

    seq_id: int
    known: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    scheduled: int = 0
    number: int = 0
    drafts: tuple[int, ...] = ()
    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = list(self.known)
        self.ops.append(Admit(self.seq_id, 4096, len(self.known), self.params))

    def due(self) -> list[Op]:
        """Return the pending operations for the next header."""
        ops, self.ops = self.ops, []
        return ops

    def chunk(self, size: int, *, sample: bool = True, drafts: int = 0) -> Segment:
        """Return a chunk of the next `size` tokens of the prompt, or fewer at its end."""
        tokens = tuple(self.known[self.scheduled : self.scheduled + size])
        segment = Segment(self.seq_id, self.number, self.scheduled, tokens, sample=sample, drafts=drafts)
        self.scheduled += len(tokens)
        self.number += 1
        return segment

    def window(self, tokens: Sequence[int], drafts: int = 0) -> Segment:
        """Return a window after all tokens sent so far."""
        segment = Segment(
            self.seq_id,
            self.number,
            self.scheduled,
            tuple(tokens),
            open=True,
            sample=True,
            drafts=drafts,
        )
        self.scheduled += len(tokens)
        self.number += 1
        return segment

    def next_window(self, drafts: int = 0) -> Segment:
        """Return a window of the newest token and its drafts."""
        return self.window([self.known[-1], *self.drafts], drafts)

    def apply_outcome(self, segment: Segment, outcome: Outcome) -> list[int]:
        """Apply an outcome. Return the tokens that it adds to the text."""
        assert (outcome.seq_id, outcome.window) == (segment.seq_id, segment.window)
        if segment.open and not outcome.cancelled:
            self.ops.append(Commit(self.seq_id, segment.window, outcome.accepted_length))
            if outcome.accepted_length < segment.width:
                self.scheduled = segment.position + outcome.accepted_length
        if outcome.token is None:
            return []
        new = [*segment.tokens[1 : outcome.accepted_length], outcome.token] if segment.open else [outcome.token]
        self.drafts = outcome.drafts
        self.known += new
        return new

    def run(self, chain: Chain, segment: Segment) -> Outcome:
        """Send one segment alone in a frame, with the pending operations, and apply its outcome."""
        outcome = chain.send(segment, ops=self.due()).outcomes[0]
        self.apply_outcome(segment, outcome)
        return outcome


class Stock:
    """The greedy text of mlx-lm's own model after a prompt.

    Row i `[vocab]` of `logits` predicts `tokens[i + 1]`.
    """

    def __init__(self, path: Path, prompt: Sequence[int], steps: int) -> None:
        model = stock_model(path)
        cache = model.make_cache()
        logits = [model(mx.array([prompt]), cache=cache)[0]]
        self.prompt = list(prompt)
        self.tokens = list(prompt)
        for _ in range(steps):
            self.tokens.append(best(logits[-1][-1]))
            logits.append(model(mx.array([self.tokens[-1:]]), cache=cache)[0])
            mx.eval(logits[-1])
        self.logits = mx.concatenate(logits)


@lru_cache(maxsize=16)
def stock_model(path: Path) -> nn.Module:
    """Return mlx-lm's own model of a checkpoint."""
    model, _ = load_model(path)
    return model


def best(logits: mx.array) -> int:
    """Return the most probable token of `logits [vocab]`."""
    token = mx.argmax(logits).item()
    assert isinstance(token, int)
    return token


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Return `count` random tokens."""
    return [random.Random(seed * 1000 + i).randrange(VOCAB - 1) for i in range(count)]
