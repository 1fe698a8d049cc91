"""Stages without a model: real `FrameEngine`s whose layers hold tokens, and a last stage that knows the text.

The text of a sequence is a function of its tokens, so a wrong token in a stage is found at once. `Truth` is a text by
sequence, whose drafts a chooser picks. `Formula` depends on all tokens before and on the seed. `FakeLastStage` is the
last stage of a pipeline that a test drives one frame at a time.
"""

from __future__ import annotations

import copy
import json
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mtp.checkpoint.families.shape import Shape
from mtp.layers.communicator import ALONE, Alone, Communicator
from mtp.layers.kv_cache import PlainKV
from mtp.layers.layer import LayerCache
from mtp.layers.reference.gdn import GDNCache
from mtp.sampling.sampler import accepted_length
from proto.backup import LayerState, by_layer
from proto.errors import NotReadyError, ProtocolError
from proto.frame import (
    Admit,
    BackUp,
    Commit,
    Frame,
    Outcome,
    RestoreBackup,
    Segment,
    TokenLogprob,
)
from proto.frame_stamps import FrameStamps
from proto.images import FIRST_IMAGE_TOKEN
from proto.span import Span
from worker.cache.sequence_cache import (
    LastStageState,
    PrefixEntry,
    SequenceCache,
    copies_of,
)
from worker.engine.frame_engine import FrameEngine
from worker.engine.stage_backups import ReceivedBackup, SequenceBackup, StageBackups
from worker.engine.stage_state import UNLIMITED, Budget
from worker.engine.state_codec import Bytes, Stored
from worker.model.loader import StageModules
from worker.model.stage import Run, StageForward
from worker.model.verifier import Key, Verdict, Verifier

VOCAB = 256
WRONG = 100
"""Added to a token to make another one of it."""

LOST = VOCAB - 1
"""Target after tokens that are not the text. No client may receive it."""

WORDS = 97
"""Tokens of a text by formula."""


def truth(seq_id: int, length: int) -> list[int]:
    """Return the first `length` tokens of the text of a sequence, prompt included."""
    return [first_token(seq_id) + position for position in range(length)]


def first_token(seq_id: int) -> int:
    """Return the first token of a text. Texts have no token in common, so a misplaced one is found."""
    return 20 * (seq_id + 1)


TWO_LAYERS = Span(0, 2)


class Chooser:
    """A source of choices that enumerates all of them: first those of `script`, then the first of each."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.script = tuple(script)
        self.made: list[int] = []
        self.ways: list[int] = []

    def pick(self, ways: int) -> int:
        """Return a number below `ways`."""
        at = len(self.made)
        self.made.append(self.script[at] if at < len(self.script) else 0)
        self.ways.append(ways)
        return self.made[-1]

    def following(self) -> Iterator[tuple[int, ...]]:
        """Yield scripts of the ways not taken at the choices made beyond the script."""
        for at in range(len(self.script), len(self.made)):
            for way in range(1, self.ways[at]):
                yield (*self.made[:at], way)


class TokenCache(PlainKV):
    """A layer cache that holds the tokens themselves."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        super().__init__()
        self.tokens = list(tokens)

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens."""
        assert 0 < n <= len(self.tokens)
        del self.tokens[-n:]
        return n

    def copy(self) -> TokenCache:
        """Return an independent copy."""
        return TokenCache(self.tokens)


class TokenState(GDNCache):
    """A recurrent state that holds the tokens it has seen. Its tapes hold the tokens of open windows."""

    def __init__(self, seen: tuple[int, ...] = (), taped: Sequence[tuple[int, ...]] = ()) -> None:
        self.seen = seen
        self.taped = list(taped)

    def run(self, tokens: tuple[int, ...], *, stays_open: bool) -> None:
        """Append tokens, and tape them if their window stays open."""
        self.seen += tokens
        if stays_open:
            self.taped.append(tokens)

    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        """Drop the first `whole` tapes. With `cut`, also undo the later ones and keep `cut` tokens of the next."""
        if cut is not None:
            undone = sum(map(len, self.taped[whole:]))
            self.seen = (*self.seen[: len(self.seen) - undone], *self.taped[whole][:cut])
            whole = len(self.taped)
        del self.taped[:whole]

    def copy(self) -> TokenState:
        """Return an independent copy."""
        return TokenState(self.seen, self.taped)

    def arrays(self) -> list[mx.array]:
        """Return no arrays."""
        return []


def tokens_of(held: SequenceCache | PrefixEntry) -> list[int]:
    """Return the tokens that both layers hold."""
    cache, state = layers_of(held.layers)
    assert tuple(cache.tokens) == state.seen, "two layers hold different tokens"
    return cache.tokens


def layers_of(layers: Sequence[LayerCache]) -> tuple[TokenCache, TokenState]:
    """Return the two layers of a stage."""
    cache, state = layers
    assert isinstance(cache, TokenCache) and isinstance(state, TokenState)
    return cache, state


class Member(Alone):
    """The place of a member of a group, which exchanges nothing: tokens are not sums."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class TokenStage(StageForward):
    """A stage whose hidden states are the tokens: `[rows, 1]`."""

    def __init__(self, communicator: Communicator = ALONE, span: Span = TWO_LAYERS, vocab: int = VOCAB) -> None:
        sizes = {"vocab_size": vocab, "hidden_size": 1, "shape": Shape(1, ())}
        config = SimpleNamespace(**sizes, image_token=0)
        modules = SimpleNamespace(config=config, span=span, communicator=communicator)
        self.modules = cast(StageModules, modules)

    def new_sequence(self, admitted: Admit) -> SequenceCache:
        """Return the empty state of a sequence."""
        return SequenceCache(admitted, [TokenCache(), TokenState()])

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the tokens as hidden states `[rows, 1]`."""
        return mx.array(np.array(tokens, np.float32)[:, None])  # without work for the device

    def forward(self, x: mx.array, runs: Sequence[Run]) -> mx.array:
        """Append the rows to the layers and return them unchanged."""
        rows = [int(row) for row in np.array(x)[:, 0]]
        for sequence, segment in runs:
            tokens = tuple(rows[: segment.width])
            del rows[: segment.width]
            assert segment.continues or tokens == segment.tokens, "a row belongs to another token"
            sequence.extend(segment)
            cache, state = layers_of(sequence.layers)
            cache.tokens += tokens
            state.run(tokens, stays_open=segment.open)
        return x


@dataclass(frozen=True)
class FoundVerdict:
    """A verdict that needs no device."""

    outcomes: dict[Key, Outcome]

    def finish(self, stamps: FrameStamps) -> dict[Key, Outcome]:
        """Return the outcomes."""
        return self.outcomes

    def clean_up(self) -> None:
        """Do nothing."""


class Text(ABC):
    """The text of every sequence, as the model of the last stage."""

    @abstractmethod
    def next_token(self, admitted: Admit, tokens: Sequence[int]) -> int:
        """Return the token after `tokens`, which begin with the prompt."""

    @abstractmethod
    def drafts(self, admitted: Admit, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Return `count` drafts after `tokens`."""


@dataclass(frozen=True)
class Truth(Text):
    """The text of a sequence by its number. The chooser decides which draft is wrong, if any."""

    chooser: Chooser

    def next_token(self, admitted: Admit, tokens: Sequence[int]) -> int:
        """Return the next token of the text, or LOST if `tokens` are not the text."""
        text = truth(admitted.seq_id, len(tokens) + 1)
        return text[-1] if list(tokens) == text[:-1] else LOST

    def drafts(self, admitted: Admit, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Return drafts that are all right except at most one, which the chooser picks."""
        right = truth(admitted.seq_id, len(tokens) + count)[len(tokens) :]
        miss = self.chooser.pick(count + 1) - 1 if count else -1
        return tuple((t + WRONG) % VOCAB if i == miss else t for i, t in enumerate(right))


def target(tokens: Sequence[int], seed: int = 0) -> int:
    """Return the token after `tokens`. The formula uses all of them and the seed."""
    return (7 * tokens[-1] + 3 * len(tokens) + 5 * sum(tokens) + seed) % WORDS


def plain(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """Return `count` tokens after `prompt` by the formula, decoded one at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target(tokens, seed))
    return tokens[len(prompt) :]


@dataclass
class Formula(Text):
    """A text by formula. Drafts for the first `right` of every `out_of` positions are the target's own.

    With a `chance` each draft is the target's own with this chance, and the text decides the draw.
    """

    right: int = 3
    out_of: int = 5
    chance: float | None = None
    target: Callable[[Sequence[int], int], int] = target

    def next_token(self, admitted: Admit, tokens: Sequence[int]) -> int:
        """Return the token of the formula."""
        return self.target(tokens, admitted.params.seed)

    def drafts(self, admitted: Admit, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Return `count` drafts."""
        text = list(tokens)
        for _ in range(count):
            text.append((self.next_token(admitted, text) + self._misses(admitted, text)) % WORDS)
        return tuple(text[len(tokens) :])

    def _misses(self, admitted: Admit, text: list[int]) -> bool:
        if self.chance is None:
            return len(text) % self.out_of >= self.right
        return random.Random(repr((text, admitted.params.seed))).random() >= self.chance


@dataclass
class TokenVerifier(Verifier):
    """A verifier whose targets are a text of the tokens that the layers hold."""

    text: Text
    expected: dict[int, int | None] = field(default_factory=dict)
    states: dict[int, LastStageState] = field(default_factory=dict)
    """Always empty: the tokens held decide about the next one."""

    def admit(self, op: Admit) -> None:
        """Add a sequence."""
        self.expected[op.seq_id] = None

    def evict(self, seq_id: int) -> None:
        """Forget a sequence."""
        self.expected.pop(seq_id, None)

    def save_prefix(self, seq_id: int) -> LastStageState:
        """Return an empty state."""
        return LastStageState(Admit(seq_id, 0, 0), None)

    def restore(self, seq_id: int, saved: LastStageState) -> None:
        """Do nothing: the tokens held decide about the next one."""

    def begin_verdict(
        self, x: mx.array, runs: Sequence[Run], states: Sequence[mx.array], stamps: FrameStamps
    ) -> Verdict:
        """Return the outcomes of all runs."""
        found = {(s.seq_id, s.window): self._outcome(sequence, s) for sequence, s in runs}
        return cast(Verdict, FoundVerdict(found))

    def commit_window(self, op: Commit) -> None:
        """Do nothing: the tokens held decide about the next one."""

    def next_tokens(self, segments: Sequence[Segment]) -> mx.array:
        """Return the newest choices of the sequences of `segments`."""
        return mx.array([self.expected[segment.seq_id] for segment in segments], mx.int32)

    def _outcome(self, sequence: SequenceCache, segment: Segment) -> Outcome:
        where = segment.seq_id, segment.window
        if not (segment.open or segment.sample):
            return Outcome(*where, segment.width)
        admitted, held = sequence.admitted, tokens_of(sequence)
        ends = range(segment.position + 1, segment.position + segment.width + 1)
        targets = [self.text.next_token(admitted, held[:end]) for end in ends]
        count = segment.width
        if segment.open and not segment.continues:
            count = accepted_length(segment.tokens, targets, self.expected[segment.seq_id])
        if not count:
            return Outcome(*where, 0)
        token = self.expected[segment.seq_id] = targets[count - 1]
        text = [*held[: segment.position + count], token]
        logprobs: tuple[TokenLogprob, ...] = ()
        if admitted.params.logprobs is not None:
            chosen = segment.tokens[1:count] if segment.open else ()
            logprobs = tuple(TokenLogprob(t, -float(t)) for t in (*chosen, token))
        drafts = self.text.drafts(admitted, text, segment.drafts)
        return Outcome(*where, count, token, drafts, logprobs)


@dataclass(frozen=True)
class TokenBackup:
    """The states of all layers of a stage after `length` tokens."""

    seq_id: int
    length: int
    states: list[LayerState]


class TokenBackups(StageBackups):
    """Backups of layers that hold tokens, with the rules of `StageBackups`."""

    def make_backup(self, op: BackUp, sequence: SequenceCache, last: LastStageState | None) -> None:
        """Back up a sequence: the new tokens for even layers, and all tokens for odd ones."""
        stack = sequence.stack
        if stack.windows or op.start > stack.length:
            raise ProtocolError(f"sequence {op.seq_id} cannot be backed up from token {op.start}")
        tokens = tokens_of(sequence)
        assert len(tokens) == stack.length
        new, whole = (json.dumps(part).encode() for part in (tokens[op.start :], tokens))
        states = [LayerState(layer, False, whole) if layer % 2 else LayerState(layer, True, new) for layer in self.span]
        self.made = cast(SequenceBackup, TokenBackup(op.seq_id, stack.length, states))

    def decode(self, shares: Sequence[Bytes], *, own: bool) -> Stored:
        """Keep the bytes."""
        return cast(Stored, tuple(shares))

    def restore_backup(self, op: RestoreBackup, sequence: SequenceCache, last: LastStageState | None) -> None:
        """Fill the empty layers of a sequence."""
        backup = self.received.pop(op.seq_id, None)
        if backup is None or sequence.stack.length or len(backup.tokens) != op.length:
            raise ProtocolError(f"sequence {op.seq_id} has no backup of {op.length} tokens here")
        for layer in self.span:
            parts = [json.loads(data) for (data,) in cast(Any, backup.layers[layer])]
            tokens = [token for part in parts for token in part]
            assert tokens == list(backup.tokens), "a backup has other tokens"
        cache, state = layers_of(sequence.layers)
        cache.tokens, state.seen = list(backup.tokens), backup.tokens
        sequence.stack.length = op.length


def token_engine(
    stage: TokenStage,
    epoch: int,
    text: Text | None,
    *,
    first: bool = True,
    budget: Budget = UNLIMITED,
) -> FrameEngine:
    """Return the engine of a stage in a new plan, with a `text` on the last stage.

    The two layers of the stage stand for all layers of its span.
    """
    verifier = None if text is None else TokenVerifier(text)
    engine = FrameEngine(stage, epoch=epoch, first=first, verifier=verifier, budget=budget)
    engine.backups = TokenBackups(stage.modules.span, stage.modules.config)
    return engine


class FakeLastStage:
    """A last stage that takes frames in order. `come_back` returns them, oldest first, when the test wants."""

    def __init__(
        self,
        epoch: int = 0,
        right: int = 3,
        out_of: int = 5,
        stage_us: int = 100,
        chance: float | None = None,
    ) -> None:
        self.stage_us = stage_us
        self.text = Formula(right, out_of, chance)
        stage = TokenStage(span=Span(0, 1), vocab=FIRST_IMAGE_TOKEN)
        self.engine = token_engine(stage, epoch, self.text)
        self.sequences, self.backups = self.engine.sequences, self.engine.backups
        self.seen: list[Frame] = []
        self.under_way: deque[Frame] = deque()

    @property
    def epoch(self) -> int:
        """The epoch of the plan."""
        return self.engine.epoch

    @property
    def prefixes(self) -> dict[int, tuple[int, ...]]:
        """The tokens of each prefix entry."""
        return {number: tuple(tokens_of(p)) for number, p in self.engine.prefixes.items()}

    def take_backup(self, seq_id: int) -> TokenBackup | None:
        """Remove the newest backup of a sequence and return it, or None."""
        with suppress(NotReadyError):
            return cast(TokenBackup, self.backups.take_backup(seq_id))
        return None

    def receive_backup(self, seq_id: int, states: Sequence[LayerState]) -> None:
        """Keep a backup until the sequence is admitted."""
        tokens = tuple(token for state in states for token in json.loads(state.data))
        self.engine.receive_backup(seq_id, ReceivedBackup(tokens, by_layer(states)))

    def send(self, frame: Frame) -> None:
        """Process a frame at once, and keep it until `come_back`."""
        self.seen.append(frame)
        outcomes = self.engine.process(frame).outcomes
        for sequence in self.sequences.values():
            assert sequence.stack.length <= sequence.admitted.capacity
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


def make_stages(count: int, epoch: int, communicator: Communicator = ALONE) -> list[FrameEngine]:
    """Return `count` stages of a new plan, whose text is `Truth`."""
    texts = [None] * (count - 1) + [Truth(Chooser())]
    return [token_engine(TokenStage(communicator), epoch, text, first=i == 0) for i, text in enumerate(texts)]


def clone_stage(engine: FrameEngine) -> FrameEngine:
    """Return a copy of a stage."""
    clone = copy.copy(engine)
    clone.sequences = {
        seq_id: SequenceCache(s.admitted, copies_of(s.layers), copy.copy(s.stack))
        for seq_id, s in engine.sequences.items()
    }
    for sequence in clone.sequences.values():
        sequence.stack.windows = list(sequence.stack.windows)
    clone.prefixes = dict(engine.prefixes)
    if engine.relayed is not None:
        clone.relayed = copy.copy(engine.relayed)
        clone.relayed.newest = dict(engine.relayed.newest)
    if isinstance(engine.verifier, TokenVerifier):
        clone.verifier = TokenVerifier(Truth(Chooser()), dict(engine.verifier.expected))
    return clone


def stage_key(engine: FrameEngine) -> Hashable:
    """Return a value that tells two states of a stage apart."""
    held = tuple((seq_id, tuple(tokens_of(s)), *_stack_key(s)) for seq_id, s in engine.sequences.items())
    verifier = engine.verifier
    expects = tuple(verifier.expected.items()) if isinstance(verifier, TokenVerifier) else ()
    prefixes = tuple((number, tuple(tokens_of(p))) for number, p in engine.prefixes.items())
    relayed = () if engine.relayed is None else tuple(engine.relayed.newest.values())
    return engine.epoch, engine.frames_done, held, prefixes, expects, relayed


def _stack_key(sequence: SequenceCache) -> tuple[Hashable, ...]:
    fields = vars(sequence.stack)
    return tuple(tuple(v) if isinstance(v, list) else v for v in fields.values())
