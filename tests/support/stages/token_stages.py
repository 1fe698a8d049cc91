"""Stages without a model: real `StageEngine`s whose layers hold tokens, and a last stage that knows the text.

The text of a sequence is a formula (`truth`), so a wrong token in a stage is found at once.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import mlx.core as mx

from mtp.layers.communicator import ALONE, Alone, Communicator
from mtp.layers.kv_cache import PlainKV
from mtp.layers.layer import LayerCache
from mtp.layers.reference.gdn import GDNCache
from mtp.sampling.sampler import accepted_length as count_kept
from proto.frame import Admit, Commit, Outcome, Segment
from proto.frame_stamps import FrameStamps
from proto.span import Span
from worker.cache.sequence_cache import LastStageState, PrefixEntry, SequenceCache
from worker.engine.stage_engine import StageEngine
from worker.model.loader import StageModules
from worker.model.stage import Run, Stage
from worker.model.verifier import Key, Verdict, Verifier

VOCAB = 256
WRONG = 100
"""Added to a token to make another one of it."""

LOST = VOCAB - 1
"""Target after tokens that are not the text. No client may receive it."""


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

    def arrays(self) -> list[mx.array]:
        """Return no arrays."""
        return []


def tokens_of(held: SequenceCache | PrefixEntry) -> list[int]:
    """Return the tokens that both layers hold."""
    cache, state = layers_of(held.layers)
    assert tuple(cache.tokens) == state.seen, "two layers hold different tokens"
    return cache.tokens


def copies(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Return copies of layers, like `worker.engine.stage_engine.copies_of` does for arrays."""
    cache, state = layers_of(layers)
    return [TokenCache(cache.tokens), TokenState(state.seen, state.taped)]


def layers_of(layers: Sequence[LayerCache]) -> tuple[TokenCache, TokenState]:
    """Return the two layers of a stage."""
    cache, state = layers
    assert isinstance(cache, TokenCache) and isinstance(state, TokenState)
    return cache, state


class Member(Alone):
    """The place of a member of a group, which exchanges nothing: tokens are not sums."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class TokenStage(Stage):
    """A stage whose hidden states are the tokens: `[rows, 1]`."""

    def __init__(self, communicator: Communicator = ALONE, span: Span = TWO_LAYERS) -> None:
        sizes = {"vocab_size": VOCAB, "hidden_size": 1, "hop_width": 1}
        config = SimpleNamespace(**sizes, image_token=0, token_layers=())
        modules = SimpleNamespace(config=config, span=span, communicator=communicator)
        self.modules = cast(StageModules, modules)

    def new_sequence(self, admitted: Admit) -> SequenceCache:
        """Return the empty state of a sequence."""
        return SequenceCache(admitted, [TokenCache(), TokenState()])

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the tokens as hidden states `[rows, 1]`."""
        return tokens.astype(mx.float32)[:, None]

    def forward(self, x: mx.array, runs: Sequence[Run], *, lazily: bool = False) -> mx.array:
        """Append the rows to the layers and return them unchanged."""
        rows = [int(row) for row in cast(list[float], x[:, 0].tolist())]
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


@dataclass
class TruthfulVerifier(Verifier):
    """A verifier that returns the text if the tokens before are the text. The chooser decides about drafts."""

    chooser: Chooser
    expected: dict[int, int | None] = field(default_factory=dict)

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
        if not (segment.open or segment.sample):
            return Outcome(segment.seq_id, segment.window, segment.width)
        held = tokens_of(sequence)
        ends = range(segment.position + 1, segment.position + segment.width + 1)
        targets = [_target(segment.seq_id, held[:end]) for end in ends]
        count = segment.width
        if segment.open and not segment.continues:
            count = count_kept(segment.tokens, targets, self.expected[segment.seq_id])
        token = targets[count - 1] if count else None
        self.expected[segment.seq_id] = token if count else self.expected[segment.seq_id]
        drafts: tuple[int, ...] = ()
        if count:
            after = segment.position + count + 1
            drafts = guesses(segment.seq_id, after, segment.drafts, self.chooser)
        return Outcome(segment.seq_id, segment.window, count, token, drafts)


def guesses(seq_id: int, position: int, count: int, chooser: Chooser) -> tuple[int, ...]:
    """Return `count` drafts from `position` on, all right except at most one, which the chooser picks."""
    right = truth(seq_id, position + count)[position:]
    miss = chooser.pick(count + 1) - 1 if count else -1
    return tuple((t + WRONG) % VOCAB if i == miss else t for i, t in enumerate(right))


def _target(seq_id: int, tokens: Sequence[int]) -> int:
    text = truth(seq_id, len(tokens) + 1)
    return text[-1] if list(tokens) == text[:-1] else LOST


def make_stages(count: int, epoch: int, communicator: Communicator = ALONE) -> list[StageEngine]:
    """Return `count` stages of a new plan."""
    last = count - 1
    return [
        StageEngine(
            TokenStage(communicator),
            epoch=epoch,
            first=i == 0,
            verifier=TruthfulVerifier(Chooser()) if i == last else None,
        )
        for i in range(count)
    ]


def clone_stage(engine: StageEngine) -> StageEngine:
    """Return a copy of a stage."""
    clone = copy.copy(engine)
    clone.sequences = {
        seq_id: SequenceCache(s.admitted, copies(s.layers), copy.copy(s.stack))
        for seq_id, s in engine.sequences.items()
    }
    for sequence in clone.sequences.values():
        sequence.stack.windows = list(sequence.stack.windows)
    clone.prefixes = dict(engine.prefixes)
    if engine.relayed is not None:
        clone.relayed = copy.copy(engine.relayed)
        clone.relayed.newest = dict(engine.relayed.newest)
    if isinstance(engine.verifier, TruthfulVerifier):
        clone.verifier = TruthfulVerifier(Chooser(), dict(engine.verifier.expected))
    return clone


def stage_key(engine: StageEngine) -> Hashable:
    """Return a value that tells two states of a stage apart."""
    held = tuple(
        (seq_id, tuple(tokens_of(s)), *_stack_key(s)) for seq_id, s in engine.sequences.items()
    )
    verifier = engine.verifier
    expects = tuple(verifier.expected.items()) if isinstance(verifier, TruthfulVerifier) else ()
    prefixes = tuple((number, tuple(tokens_of(p))) for number, p in engine.prefixes.items())
    relayed = () if engine.relayed is None else tuple(engine.relayed.newest.values())
    return engine.epoch, engine.frames_done, held, prefixes, expects, relayed


def _stack_key(sequence: SequenceCache) -> tuple[Hashable, ...]:
    fields = vars(sequence.stack)
    return tuple(tuple(v) if isinstance(v, list) else v for v in fields.values())
