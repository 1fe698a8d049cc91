"""One request in the pipeline, as the coordinator sees it: tokens and counters, no tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from coordinator.drafts.averages import DraftCounts, DraftResult, Shape
from coordinator.drafts.prompt_lookup import NgramMatcher
from coordinator.schedule.in_flight import FrameInFlight, LastWindow, Window, WindowOutcome, WindowResult
from coordinator.schedule.prefix_cache import block_keys
from coordinator.schedule.request import FinishReason, GenerationRequest, GenerationStats
from proto.control import Rollback
from proto.frame import Admit, Commit, Outcome
from proto.images import ImageSpan, next_border

MOST_RESTORES = 2
"""Restores of a sequence that end with their plan before its backup is given up."""


@dataclass(eq=False)
class Sequence:
    """A request and its state. `tokens` (prompt and emitted ones) suffice to rebuild everything else."""

    seq_id: int
    request: GenerationRequest
    arrived_at: float
    tokens: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    """Tokens to send as prompt chunks: the prompt, or all of `tokens` after a rebuild."""
    scheduled_tokens: int = 0
    """Tokens of `prefill_tokens` that are sent into the pipeline."""
    computed_tokens: int = 0
    """Tokens of `prefill_tokens` that the last stage has computed."""
    cached_tokens: int = 0
    """Tokens of `prefill_tokens` that a prefix entry provided."""
    restorable_tokens: int = 0
    """Tokens of a backup that the stages of the present plan have, until it is restored."""
    from_disk: bool = False
    """True if that backup is a prefix from the disks of the stages."""
    open_restores: int = 0
    """Restores in a row after which no frame of it has returned. One of them may be what fails plans."""
    expected_prefix: int = 0
    """Tokens of the prefix entry that the stages had for it when it was queued."""
    restoring: bool = False
    """True while the stages receive its backup. It is not admitted meanwhile."""
    sought: bool = False
    """True once its prefix was looked for among backups and on disks."""
    window_count: int = 0
    interrupted: bool = False
    """True if a plan that has failed was computing it."""
    pausing: bool = False
    """True while its segments in flight return, before its place goes to another client. No segment is sent."""
    paused_tokens: int = 0
    """Tokens that the stages held when it gave up its place, 0 if it never did."""
    placed_at: float = 0.0
    """Seconds. When it left the queue for the last time."""
    keeps_place_until: float = 0.0
    """Seconds. It does not pause before."""
    admitted: bool = False
    commit: Commit | None = None
    """The commit of its last window. The header of its next segment carries it."""
    prefix_boundaries: list[int] = field(default_factory=list)
    """Positions in the prompt where a chunk ends so that a prefix entry can be saved, in ascending order."""
    saved_prefix: int = 0
    """Tokens of the newest prefix entry that it started from or saved."""
    partial_entry: int | None = None
    """Number of the partial prefix entry that it started from or saved, which its next entry replaces."""
    keys: bytes = b""
    """The `block_keys` of `tokens`, as far as they were needed."""
    drafts: tuple[int, ...] = ()
    """Drafts for the tokens after `tokens`: those of the MTP head, or of a match of the text."""
    own_shape: Shape | None = None
    """Shape of all its windows if the request has a number of drafts of its own."""
    drafted_after: int | None = None
    """The window whose outcome brought `drafts`; None for those of a match."""
    matcher: NgramMatcher | None = None
    """Finds matches in `tokens`; None if they are not searched."""
    windows_in_flight: deque[Window] = field(default_factory=deque)
    """The windows in flight that are not invalidated, oldest first."""
    shape: Shape | None = None
    """Shape of the next window. The controller chooses it once for each window that returns."""
    finished: FinishReason | None = None
    windows_returned: int = 0
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    """Drafts of the head. `matched_counts` are those from the text."""
    matched_counts: DraftCounts = field(default_factory=DraftCounts)
    scheduled_at: float = 0.0
    """Seconds. When it left the queue for the first time."""
    first_token_at: float = 0.0
    """Seconds, in the clock of the scheduler's caller. 0 before the first token."""
    last_window: LastWindow = field(default_factory=LastWindow)

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = [*self.request.prompt, *self.request.emitted]
            self.prefill_tokens = len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.request.prompt)

    @property
    def emitted(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that the request still allows."""
        return self.request.max_tokens - self.emitted

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a stage holds of the sequence, open windows included."""
        return self.prompt_length + self.request.max_tokens

    @property
    def prefilling(self) -> bool:
        """Prompt chunks are still to be sent."""
        return self.scheduled_tokens < self.prefill_tokens and not self.pausing

    @property
    def prompt_left(self) -> int:
        """Tokens that are still to be sent as prompt chunks, as far as known before it is admitted."""
        known = self.scheduled_tokens if self.admitted else self.expected_prefix
        return self.prefill_tokens - max(known, self.restorable_tokens)

    @property
    def decoding(self) -> bool:
        """The whole prompt is computed, and windows follow."""
        return self.admitted and self.computed_tokens >= self.prefill_tokens and not self.pausing

    @property
    def is_in_flight(self) -> bool:
        """A valid window or a prompt chunk is in flight."""
        return bool(self.windows_in_flight) or self.computed_tokens < self.scheduled_tokens

    @property
    def held_tokens(self) -> int:
        """Tokens that the stages hold after its last commit, while nothing of it is in flight."""
        return len(self.tokens) - 1 if self.computed_tokens >= self.prefill_tokens else self.computed_tokens

    @property
    def tokens_in_flight(self) -> int:
        """Tokens in flight, including the last one of `tokens`."""
        return sum(window.width for window in self.windows_in_flight)

    @property
    def newest_frame(self) -> FrameInFlight:
        """The frame of the newest window in flight."""
        return self.windows_in_flight[-1].frame

    def can_run_ahead(self, *, relayed: bool) -> bool:
        """Return whether the next window may continue the one in flight, over stages by a `relayed` token."""
        if not self.windows_in_flight:
            return not relayed
        window = self.windows_in_flight[0]
        if len(self.windows_in_flight) > 1 or window.width > 1 or window.drafts:
            return False
        newest = self.emitted + self.tokens_in_flight
        return not self.request.params.needs_host(newest, newest + 1) and window.relays >= relayed

    def can_send_window(self, shape: Shape) -> bool:
        """Return whether a window of `shape` can be sent now: the first one, or a further speculative one."""
        if not self.windows_in_flight:
            return True
        return len(self.windows_in_flight) < shape.fill and self.tokens_in_flight <= min(
            len(self.drafts), self.remaining - 1
        )

    @property
    def has_match(self) -> bool:
        """The text has a match whose drafts can be sent: no stop token comes first, and windows in flight agree."""
        found = None if self.matcher is None else self.matcher.match
        if self.matcher is None or found is None:
            return False
        drafts, sent = self.matcher.drafts, self._sent_drafts()
        return drafts[0] not in self.request.stop_tokens and drafts[: len(sent)] == sent

    def _sent_drafts(self) -> tuple[int, ...]:
        """Return the drafts in flight, after the confirmed token."""
        return tuple(token for window in self.windows_in_flight for token in window.tokens)[1:]

    def draft_from_match(self, shape: Shape) -> None:
        """Take the drafts of the text's match for `shape`, none while windows in flight have other tokens."""
        assert self.matcher is not None, "a shape is matched only with a matcher"
        drafts = self._drafts_before_stop(self.matcher.drafts[: shape.ahead])
        sent = self._sent_drafts()
        self.drafts = drafts if drafts[: len(sent)] == sent else ()
        self.drafted_after = None

    def source_of(self, window: Window) -> int:
        """Return `Segment.source` of a window that is sent now."""
        known = self.request.params.ratio and not window.continues and self.drafted_after is not None
        return window.number - (self.drafted_after or 0) if known else 0

    def next_window(self, shape: Shape, frame: FrameInFlight, *, relay: bool = False) -> Window:
        """Put the next window in flight: the confirmed token and drafts, after the windows already in flight.

        Without speculative windows (`shape.fill` of 1) the window takes all drafts, or continues the one in flight.
        With `relay` a later window may continue this one over several stages, if it is plain.
        """
        number, depth = self.next_window_number(), shape.depth
        newest = self.emitted + self.tokens_in_flight + 1  # the place of a token that a later window continues with
        relay = relay and not (depth or self.request.params.needs_host(newest, newest + 1))
        relay = relay and self.tokens_in_flight + 1 < self.remaining
        if self.windows_in_flight and shape.fill == 1:
            window = Window(number, 0, (), frame, depth, continues=True, relays=relay)
            self.windows_in_flight.append(window)
            return window
        chain = (self.tokens[-1], *self.drafts[: self.remaining - 1])
        first = self.tokens_in_flight
        width = shape.width if shape.fill > 1 else len(chain)
        tokens = chain[first : first + width]
        relay = relay and width == 1
        window = Window(number, first, tokens, frame, depth, relays=relay, matched=shape.matched)
        self.windows_in_flight.append(window)
        return window

    def admit_op(self, vocabulary: bytes = b"") -> Admit:
        """Return the operation that creates the sequence on the stages."""
        params, images = self.request.params, self.spans
        return Admit(self.seq_id, self.capacity, self.prompt_length, params, vocabulary, images)

    def hash_blocks(self) -> bytes:
        """Return the keys of all whole blocks of `tokens`. Each block is hashed once."""
        self.keys = block_keys(self.tokens, self.keys)
        return self.keys

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        """The images of the prompt."""
        return tuple(image.span for image in self.request.images)

    def chunk_end(self, start: int, end: int) -> int:
        """Return where a chunk from `start` ends, `end` at most. It has rows of one image, or text only."""
        border = next_border(self.spans, start)
        return end if border is None else min(end, border)

    def await_backup(self, tokens: int, *, from_disk: bool = False) -> None:
        """Start, when admitted, from a backup of `tokens` tokens that the stages have, `from_disk` or from memory."""
        self.restorable_tokens, self.restoring, self.from_disk = tokens, False, from_disk

    @property
    def is_placed(self) -> bool:
        """True of a waiting sequence whose state the stages have or receive. It takes memory as a running one does."""
        return self.restoring or self.restorable_tokens > 0

    @property
    def may_restore(self) -> bool:
        """False once plans fail again and again after a restore. Then everything is computed."""
        return self.open_restores < MOST_RESTORES

    def start_after(self, tokens: int) -> None:
        """Continue after the first `tokens` tokens, which the stages restore."""
        self.scheduled_tokens = self.computed_tokens = tokens
        self.cached_tokens = min(tokens, self.cached_tokens) if self.paused_tokens else tokens
        self.restorable_tokens = 0

    def next_window_number(self) -> int:
        """Return the number of the next segment. Numbers count from 0 and are never reused."""
        self.window_count += 1
        return self.window_count - 1

    def apply_first_token(self, outcome: Outcome) -> tuple[int, ...]:
        """Append the token that follows the prompt. Return the emitted tokens."""
        self._take_drafts(outcome)
        return self._append_tokens((_token(outcome),))

    def apply_outcome(self, outcome: Outcome) -> WindowOutcome:
        """Apply the outcome of the oldest window in flight: append its tokens, then commit and invalidate windows.

        Set `finished` if the text ends. A stop token ends the text and is not emitted.
        """
        window = self.windows_in_flight.popleft()
        chosen = (*window.tokens[1 : outcome.accepted_length], _token(outcome))
        followed = bool(self.windows_in_flight) and self.windows_in_flight[0].continues
        if followed:
            following = self.windows_in_flight[0]
            self.windows_in_flight[0] = replace(following, tokens=chosen[-1:], continues=False)
        tokens = self._append_tokens(chosen)
        self._take_drafts(outcome)
        result = self._classify(window, outcome)
        draft_results = self._draft_results(window, outcome, result, len(tokens))
        self.commit = Commit(self.seq_id, window.number, outcome.accepted_length)
        trim = window.width - outcome.accepted_length
        if result is WindowResult.MISSPECULATED:  # then of none of the speculative window after it
            following = self.windows_in_flight[0]
            self.commit, trim = Commit(self.seq_id, following.number, 0), following.width
        invalidated = tuple[Window, ...]()
        if result is not WindowResult.ACCEPTED:
            invalidated = tuple(self.windows_in_flight)
            self.windows_in_flight.clear()
        if followed or not self.windows_in_flight or self.shape is None or self.shape.fill > 1:
            self.shape = None  # else the windows in flight return before the shape changes
        counts = self.matched_counts if window.matched else self.draft_counts
        counts.record_drafts(draft_results)
        rollback = Rollback(self.seq_id, self.commit.window, trim) if trim else None
        return WindowOutcome(tokens, invalidated, rollback, draft_results, window.matched)

    def _classify(self, window: Window, outcome: Outcome) -> WindowResult:
        if outcome.accepted_length < len(window.tokens):
            return WindowResult.REJECTED
        if not self.windows_in_flight:
            return WindowResult.ACCEPTED
        matches = self.windows_in_flight[0].tokens[0] == outcome.token
        if matches and self.finished is None:
            return WindowResult.ACCEPTED
        return WindowResult.MISSPECULATED

    def _draft_results(
        self, window: Window, outcome: Outcome, result: WindowResult, emitted: int
    ) -> tuple[DraftResult, ...]:
        """Return the results of the window's drafts, and of those in flight that they decide, up to the end."""
        ended = self.finished is not None
        count = min(len(window.tokens) - 1, emitted) if ended else len(window.tokens) - 1
        results = [DraftResult(window.first + i, i < outcome.accepted_length) for i in range(1, count + 1)]
        if ended:
            return tuple(results)
        following = [w for w in self.windows_in_flight if w.matched == window.matched]
        if result is WindowResult.ACCEPTED:
            results += [DraftResult(w.first, True) for w in following[:1] if w.first]
        else:
            results += [DraftResult(w.first + i, False) for w in following for i in range(len(w.tokens))]
        return tuple(results)

    def _take_drafts(self, outcome: Outcome) -> None:
        self.drafts, self.drafted_after = self._drafts_before_stop(outcome.drafts), outcome.window

    def _drafts_before_stop(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the drafts before a stop token. The last stage could accept those after it, which no stage keeps."""
        stops = self.request.stop_tokens
        end = next((i for i, token in enumerate(drafts) if token in stops), len(drafts))
        return drafts[:end]

    def _append_tokens(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Append tokens up to a stop token or the limit. Return the appended tokens."""
        emitted: list[int] = []
        for token in chosen:
            if token in self.request.stop_tokens:
                self.finished = "stop"
                break
            emitted.append(token)
            if len(emitted) == self.remaining:
                self.finished = "length"
                break
        self.tokens.extend(emitted)
        return tuple(emitted)

    def reset_for_plan(self) -> None:
        """Forget the stages' state. Window numbers go on, because a signal for an earlier one may still arrive."""
        self.prefill_tokens = len(self.tokens)
        self.scheduled_tokens = self.computed_tokens = 0
        self.admitted = self.pausing = False
        self.paused_tokens = 0
        self.commit = None
        self.cached_tokens = self.saved_prefix = self.restorable_tokens = 0
        self.expected_prefix, self.partial_entry = 0, None
        self.prefix_boundaries.clear()
        self.drafts, self.drafted_after = (), None
        self.windows_in_flight.clear()
        self.shape = None
        self.last_window = replace(self.last_window, frame=None)

    def pause(self) -> None:
        """Forget the stages' state until it has a place again. Its tokens stay, and what was cached for its prompt."""
        held, cached = self.held_tokens, self.cached_tokens
        self.reset_for_plan()
        self.paused_tokens, self.cached_tokens = held, cached
        # Stages might evict it only after they have received its backup.
        self.interrupted, self.sought = False, True

    def stats(self, now: float) -> GenerationStats:
        """Return the cost of the request up to `now`, in the clock of the scheduler's caller."""
        first = self.first_token_at or now
        return GenerationStats(
            prompt_tokens=self.prompt_length,
            completion_tokens=self.emitted,
            cached_tokens=self.cached_tokens,
            windows=self.windows_returned,
            drafted_by_position=tuple(self.draft_counts.drafted),
            accepted_by_position=tuple(self.draft_counts.accepted),
            ngram_drafted=sum(self.matched_counts.drafted),
            ngram_accepted=sum(self.matched_counts.accepted),
            prefill_seconds=first - self.arrived_at,
            decode_seconds=now - first,
        )

    def check(self, stages: int) -> None:
        """Assert the invariants of a running sequence in a plan of `stages` stages."""
        assert 0 <= self.computed_tokens <= self.scheduled_tokens, self
        assert self.scheduled_tokens <= self.prefill_tokens <= len(self.tokens), self
        assert self.cached_tokens <= self.prefill_tokens, self
        assert self.remaining > 0 and self.finished is None, self
        assert self.prefilling or len(self.windows_in_flight) <= max(2, stages), self
        assert not self.windows_in_flight or self.decoding or self.pausing, self
        assert self.tokens_in_flight <= self.remaining, self
        numbers = [window.number for window in self.windows_in_flight]
        assert numbers == sorted(set(numbers)), self
        assert max(numbers, default=0) <= self.window_count, self
        assert all(window.width for window in self.windows_in_flight), self


def _token(outcome: Outcome) -> int:
    assert outcome.token is not None, "a segment with `sample` has a token in its outcome"
    return outcome.token
