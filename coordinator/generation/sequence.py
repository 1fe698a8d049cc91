"""One request on its way through the pipeline, as the coordinator sees it: tokens and counters, no tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from coordinator.generation.request import FinishReason, GenerationRequest, GenerationStats
from mtp.depth.shape import Shape
from proto.frame import Admit, Commit, Outcome


@dataclass(frozen=True)
class Window:
    """A window in flight. `first` is its first token's place in the chain of drafts it was taken from: 0 for a token
    that is confirmed, i for the i-th draft, which is sent on the hope that all before it are right."""

    number: int
    first: int
    tokens: tuple[int, ...]
    frame: int
    """Number of the frame it travels in."""


@dataclass
class Landing:
    """What a window's return means. `void` windows are in flight in vain; `trim` tokens leave the sequence's end."""

    tokens: tuple[int, ...]
    void: tuple[Window, ...] = ()
    trim: int = 0
    judged: list[tuple[int, bool]] = field(default_factory=list)
    """Drafts whose fate is known now: number in their chain, and whether it was right."""

    def count(self, number: int, right: bool) -> None:
        self.judged.append((number, right))

    @property
    def accepted(self) -> int:
        return sum(right for _, right in self.judged)


@dataclass
class Sequence:
    """`tokens` is the prompt and all that was emitted: with the request it is enough to rebuild everything else.

    `fed` counts the tokens sent into the pipeline as prompt chunks, `goal` how many there are to send: the prompt, or,
    when a sequence is rebuilt, all of `tokens`. The last token emitted is not fed before it stands in a window.
    """

    seq_id: int
    request: GenerationRequest
    arrived: float
    tokens: list[int] = field(default_factory=list)
    goal: int = 0
    fed: int = 0
    passed: int = 0
    """Prompt tokens that have left the last stage."""
    cached: int = 0
    window_count: int = 0
    admitted: bool = False
    commit: Commit | None = None
    """Of its last window: rides before its next segment."""
    boundaries: list[int] = field(default_factory=list)
    """Where in the prompt chunks end so that a prefix entry can be made, the next one first."""
    saved: int = 0
    """Where the newest prefix entry made of it ends."""
    drafts: tuple[int, ...] = ()
    """What the head thinks comes after `tokens`."""
    flight: deque[Window] = field(default_factory=deque)
    """The windows in flight that may still stand, oldest first."""
    shape: Shape | None = None
    """Of its next window; None before it is chosen, once for each window that comes back."""
    finished: FinishReason | None = None
    windows: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefilled: float = 0.0
    """When the first token came, in the clock the scheduler is told."""
    returned: float = 0.0
    """When its last window came back."""

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.prompt)
            self.goal = len(self.tokens)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.request.max_tokens - self.emitted

    @property
    def capacity(self) -> int:
        """The most tokens any stage will ever hold of it, open windows included."""
        return self.prompt_length + self.request.max_tokens

    @property
    def prefilling(self) -> bool:
        return self.fed < self.goal

    @property
    def decoding(self) -> bool:
        """Whether its prompt has passed, so that what follows are windows."""
        return self.admitted and self.passed >= self.goal

    @property
    def ahead(self) -> int:
        """Tokens in flight, the last one of `tokens` among them."""
        return sum(len(window.tokens) for window in self.flight)

    def may_send(self, shape: Shape) -> bool:
        """Whether a window of this shape can be sent now: the first, or one more that builds on hope."""
        if not self.flight:
            return True
        return len(self.flight) < shape.fill and self.ahead <= min(
            len(self.drafts), self.remaining - 1
        )

    def next_window(self, shape: Shape, frame: int) -> Window:
        """Put the next window in flight: confirmed token and drafts, from where those in flight end.

        One that has the pipeline to itself takes all the drafts there are.
        """
        chain = (self.tokens[-1], *self.drafts[: self.remaining - 1])
        first = self.ahead
        width = shape.width if shape.fill > 1 else len(chain)
        window = Window(self.take_window_number(), first, chain[first : first + width], frame)
        self.flight.append(window)
        return window

    def admit_op(self) -> Admit:
        return Admit(self.seq_id, self.capacity, self.prompt_length, self.request.params)

    def take_window_number(self) -> int:
        self.window_count += 1
        return self.window_count - 1

    def land(self, outcome: Outcome) -> Landing:
        """The oldest window in flight has come back: take its tokens, and settle what was built on it.

        Sets `finished` when the text ends; a stop token ends it and is not emitted.
        """
        window = self.flight.popleft()
        taken = self._take((*window.tokens[1 : outcome.accepted_length], _token(outcome)))
        self.drafts = self._before_stop(outcome.drafts)
        landing = Landing(taken)
        # Drafts behind the end of the text are no one's success or failure.
        judged = window.tokens[1:] if self.finished is None else window.tokens[1 : len(taken) + 1]
        for i in range(1, len(judged) + 1):
            landing.count(window.first + i, i < outcome.accepted_length)
        whole = outcome.accepted_length == len(window.tokens)
        hoped = self.flight[0] if whole and self.flight else None
        stands = hoped is not None and hoped.tokens[0] == outcome.token and self.finished is None
        if hoped is not None and self.finished is None:
            landing.count(hoped.first, stands)
        self.commit = Commit(self.seq_id, window.number, outcome.accepted_length)
        if hoped is not None and not stands:
            self.commit = Commit(self.seq_id, hoped.number, 0)
        if not stands:
            self._flush(landing, counted=whole)
        if not self.flight or self.shape is None or self.shape.fill > 1:
            self.shape = None  # else what is in flight comes home first
        landing.trim += len(window.tokens) - outcome.accepted_length
        self._note(landing)
        return landing

    def first_token(self, outcome: Outcome) -> tuple[int, ...]:
        """The prompt has passed: take the token that follows it."""
        self.drafts = self._before_stop(outcome.drafts)
        return self._take((_token(outcome),))

    def _before_stop(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Drafts as far as the text may go on. The target says the stop token itself; were it in a window, the last
        stage might keep what was sent ahead behind it, which the others are told to drop."""
        stops = self.request.stop_tokens
        end = next((i for i, token in enumerate(drafts) if token in stops), len(drafts))
        return drafts[:end]

    def _take(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens up to a stop or the limit."""
        taken: list[int] = []
        for token in chosen:
            if token in self.request.stop_tokens:
                self.finished = "stop"
                break
            taken.append(token)
            if len(taken) == self.remaining:
                self.finished = "length"
                break
        self.tokens.extend(taken)
        return tuple(taken)

    def _flush(self, landing: Landing, *, counted: bool) -> None:
        """What is in flight was built on a hope that failed. `counted`: the first such token has been counted."""
        landing.void = tuple(self.flight)
        landing.trim += self.ahead
        self.flight.clear()
        if self.finished is not None:
            return
        drafts = [w.first + i for w in landing.void for i in range(len(w.tokens))]
        for number in drafts[1:] if counted else drafts:
            landing.count(number, False)

    def _note(self, landing: Landing) -> None:
        for number, right in landing.judged:
            for counter in (self.drafted, self.accepted):
                counter.extend([0] * (number - len(counter)))
            self.drafted[number - 1] += 1
            self.accepted[number - 1] += right

    def rebuild(self) -> None:
        """Forget all that stages held: the next plan is fed every token again."""
        self.goal = len(self.tokens)
        self.fed = self.passed = self.window_count = 0
        self.admitted = False
        self.commit = None
        self.cached = self.saved = 0
        self.boundaries.clear()
        self.drafts = ()
        self.flight.clear()
        self.shape = None

    def stats(self, now: float) -> GenerationStats:
        first = self.prefilled or now
        return GenerationStats(
            prompt_tokens=self.prompt_length,
            completion_tokens=self.emitted,
            cached_tokens=self.cached,
            windows=self.windows,
            drafted_by_position=tuple(self.drafted),
            accepted_by_position=tuple(self.accepted),
            prefill_seconds=first - self.arrived,
            decode_seconds=now - first,
        )


def _token(outcome: Outcome) -> int:
    assert outcome.token is not None, "a sequence that is told to sample gets a token"
    return outcome.token
