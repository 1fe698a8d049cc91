"""One request on its way through the pipeline, as the coordinator sees it: tokens and counters, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.request import FinishReason, GenerationRequest, GenerationStats, TokenChunk
from proto.frame import Admit, Commit, Outcome


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
    next_window: int = 0
    in_flight: int = 0
    admitted: bool = False
    commit: Commit | None = None
    """Of its last window: rides before its next segment."""
    boundaries: list[int] = field(default_factory=list)
    """Where in the prompt chunks end so that a prefix entry can be made, the next one first."""
    saved: int = 0
    """Where the newest prefix entry made of it ends."""
    drafts: tuple[int, ...] = ()
    window_drafts: tuple[int, ...] = ()
    """The drafts of the window in flight."""
    finished: FinishReason | None = None
    windows: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefilled: float = 0.0
    """When the first token came, in the clock the scheduler is told."""

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
    def ready(self) -> bool:
        """Whether its next window can be sent now."""
        return self.admitted and not self.prefilling and self.in_flight == 0

    def admit_op(self) -> Admit:
        return Admit(self.seq_id, self.capacity, self.prompt_length, self.request.params)

    def take_window_number(self) -> int:
        self.next_window += 1
        return self.next_window - 1

    def emit(self, outcome: Outcome) -> TokenChunk:
        """Take an outcome's tokens: the kept drafts, then the target's choice, up to a stop or the limit.

        Sets `finished` when the text ends; a stop token ends it and is not emitted. Draft counters stop there too.
        """
        assert outcome.token is not None
        window = self.window_drafts
        chosen = (*window[: max(0, outcome.kept - 1)], outcome.token)
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
        # Drafts behind the end of the text are no one's success or failure.
        drafted = len(window) if self.finished is None else min(len(window), len(taken))
        accepted = max(0, min(outcome.kept - 1, drafted))
        self._count(drafted, accepted)
        return TokenChunk(tuple(taken), outcome.logprobs[: len(taken)], drafted, accepted)

    def _count(self, drafted: int, accepted: int) -> None:
        for counter in (self.drafted, self.accepted):
            counter.extend([0] * (drafted - len(counter)))
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    def rebuild(self) -> None:
        """Forget all that stages held: the next plan is fed every token again."""
        self.goal = len(self.tokens)
        self.fed = self.passed = self.next_window = self.in_flight = 0
        self.admitted = False
        self.commit = None
        self.cached = self.saved = 0
        self.boundaries.clear()
        self.drafts = self.window_drafts = ()

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
