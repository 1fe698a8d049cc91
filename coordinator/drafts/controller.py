"""The controller of draft depth, window width and fill. It chooses from measured costs and acceptance."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from coordinator.drafts.averages import (
    MEASURED_SAMPLES,
    Acceptance,
    DraftResult,
    Shape,
    StepCost,
    StepCosts,
    expected_run,
    expected_tokens,
)
from coordinator.drafts.prompt_lookup import LONGEST_MATCH, MOST_DRAFTS, MatchResults, NgramMatcher, NgramMode
from proto.errors import UsageError

MAX_DEPTH = 8
"""Drafts. Maximum depth of `--mtp`. At an acceptance of .7 a draft, a ninth draft is accepted in 4 of 100 windows."""

AUTO_DEPTH = 7
"""Drafts. Maximum depth that `auto` considers. GPU kernels for 4-bit weights compute eight rows at once."""

FILLED_DEPTH = 15
"""Drafts. Maximum depth of a filled pipeline. Tapes of 16 tokens take 30 MB for Qwen3.5-27B, less than a snapshot."""


@dataclass(frozen=True)
class MtpMode:
    """The value of `--mtp`: a fixed `depth` (0 for `off`), `filled`, or neither for `auto`."""

    depth: int | None = None
    filled: bool = False

    @classmethod
    def parse(cls, text: str) -> MtpMode:
        """Parse the value of `--mtp`. Raises UsageError for another word, or a depth above MAX_DEPTH."""
        word = text.strip().lower()
        if word == "filled":
            return cls(filled=True)
        if word in ("auto", "off"):
            return cls(None if word == "auto" else 0)
        if word.isascii() and word.isdigit() and int(word) <= MAX_DEPTH:
            return cls(int(word))
        raise UsageError(f"--mtp {text!r}: write auto, off, filled, or a number of drafts, 1 to {MAX_DEPTH}")

    def __str__(self) -> str:
        if self.depth is None:
            return "filled" if self.filled else "auto"
        return str(self.depth) if self.depth else "off"


FILLED_WIDTHS = (1, 2, 4, 8)
"""Tokens. Widths of windows in a filled pipeline. Widths between them differ too little to measure them."""

MATCHED_WIDTHS = (2, 4, 8, 16)
"""Tokens. Widths of windows whose drafts come from the text."""

LENGTH_CLASSES = (8, 16, LONGEST_MATCH)
"""Tokens. Bounds of the classes of matches: a long match is a copy more often than a short one."""

MATCHED_ROWS = 64
"""Rows of a step if each of its sequences has a match. Many sequences have two rows each."""


class Controller:
    """The choice of each step's shape, for any number of sequences that step together.

    One controller serves a whole process. All sequences share one acceptance, because acceptance depends on the text.
    Costs are separate for 1, 2, 3-4, 5-8, … sequences a step. With `ngram` windows may take their drafts from the text,
    in every mode, where measured costs and the acceptance of matches say that it pays.
    """

    def __init__(self, mode: MtpMode, max_depth: int = AUTO_DEPTH, ngram: NgramMode = NgramMode.off) -> None:
        self.mode = mode
        self.ngram = ngram
        self.max_depth = max_depth
        self.acceptance = Acceptance()
        self._match_acceptance = [Acceptance() for _ in range(len(LENGTH_CLASSES) + 1)]
        """Acceptance of matches by class of length. Every match counts, so it needs no probe."""
        self._choices: dict[tuple[int, int], Choice] = {}
        """By the class of the number of sequences, and the fill."""

    def choose_shape(self, sequences: int = 1, fill: int = 1) -> Shape:
        """Return the next shape for `sequences`, each with up to `fill` windows."""
        if self.mode.depth is not None:
            return Shape(self.mode.depth + 1)
        if self.mode.filled and fill == 1:
            return Shape(1)
        return self._choice(sequences, fill).next_shape()

    def shape_in_use(self, sequences: int, fill: int) -> Shape:
        """Return the shape that steps of `sequences` have now. It may be that of a trial."""
        if self.mode.depth is not None:
            return Shape(self.mode.depth + 1)
        return self._choice(sequences, fill).in_use

    def own_shape(self, drafts: int | None) -> Shape | None:
        """Return the shape for a request with its own number of `drafts`, None without. With `off` no head is there."""
        return None if drafts is None else Shape(1 + (min(drafts, MAX_DEPTH) if self.mode.depth != 0 else 0))

    def new_matcher(self) -> NgramMatcher | None:
        """Return a matcher for a new text, or None if the text is not searched."""
        return None if self.ngram is NgramMode.off else NgramMatcher()

    def matched_shapes(self, matchers: Sequence[NgramMatcher | None], fill: int = 1) -> list[Shape | None]:
        """Return for each sequence of a step the shape of a window with the drafts of its match.

        It is None without a match, and where these drafts do not pay.
        """
        matches = [None if matcher is None else matcher.match for matcher in matchers]
        if not any(matches):
            return [None] * len(matches)
        chances = [
            None if match is None else self._acceptance_of(match.length).by_position(MOST_DRAFTS) for match in matches
        ]
        shapes = shapes_of_matches(len(matches), fill)
        return self._choice(len(matches), fill).matched_shapes(chances, shapes)

    def record_match(self, found: MatchResults) -> None:
        """Record the results of the drafts of a match."""
        self._acceptance_of(found.length).record_drafts(found.results)

    def _acceptance_of(self, length: int) -> Acceptance:
        return self._match_acceptance[bisect_right(LENGTH_CLASSES, length)]

    def record_drafts(self, results: Iterable[DraftResult]) -> None:
        """Record the results of a window's drafts. Do not call it for invalidated windows, nor for those of a match."""
        self.acceptance.record_drafts(results)

    def record_step_cost(self, sequences: int, fill: int, rows: int, drafts: int, shape: Shape, cost: StepCost) -> None:
        """Record the cost of a step that verified `rows` tokens of `sequences`, and drafted `drafts` for each.

        `shape` is that of its windows, or of one of them. Do not call it for steps with prompt tokens.
        """
        searched = self.mode.depth is None and (fill > 1 or not self.mode.filled)
        if searched or self.ngram is NgramMode.auto:
            width = rows / sequences
            costs = self._choice(sequences, fill).costs
            costs.record_step(width, drafts, cost, shape, costs.sequences - sequences)

    def forget_costs(self) -> None:
        """Forget all costs, because other machines or other cuts serve from now on. Keep the acceptance."""
        self._choices.clear()

    def _choice(self, sequences: int, fill: int) -> Choice:
        key = ((sequences - 1).bit_length(), fill)
        if key not in self._choices:
            shapes = shapes_to_compare(fill, None if self.mode.filled else self.max_depth)
            if self.mode.depth is not None:
                shapes = [Shape(self.mode.depth + 1)]
            self._choices[key] = Choice(self.acceptance, shapes, 1 << key[0])
            for beside in (key[0] - 1, fill), (key[0] + 1, fill):
                if (other := self._choices.get(beside)) is not None:
                    other.beside.append(self._choices[key].costs)
                    self._choices[key].beside.append(other.costs)
        return self._choices[key]


def shapes_to_compare(fill: int, max_depth: int | None) -> list[Shape]:
    """Return plain decoding, blocks up to `max_depth` (None: none), and filled pipelines of up to `fill` windows."""
    blocks = [] if max_depth is None else [Shape(depth + 1) for depth in range(max_depth + 1)]
    return blocks + _filled_shapes(fill, matched=False) or [Shape(1)]


@lru_cache(maxsize=64)
def shapes_of_matches(sequences: int, fill: int) -> tuple[Shape, ...]:
    """Return the shapes of windows with the drafts of a match: blocks, and filled pipelines of up to `fill` windows."""
    widest = max(MATCHED_WIDTHS[0], min(MOST_DRAFTS + 1, MATCHED_ROWS // sequences))
    blocks = [Shape(width, matched=True) for width in MATCHED_WIDTHS if width <= widest]
    return (*blocks, *_filled_shapes(fill, matched=True))


def _filled_shapes(fill: int, *, matched: bool) -> list[Shape]:
    """Return the shapes of pipelines of `fill` windows, of half as many, and so on. All are within FILLED_DEPTH."""
    fills = [fill >> halved for halved in range(4) if fill >> halved > 1]
    shapes = [Shape(width, f, matched=matched) for f in fills for width in FILLED_WIDTHS]
    return [shape for shape in shapes if shape.ahead <= FILLED_DEPTH]


GAIN = 1.02
"""Minimum ratio of speeds for a change of shape, because estimates are not more precise than this."""

LONGEST_TRIAL = 12
"""Steps. Maximum length of a trial, for example if requests are too short to measure a shape."""

FIRST_TRIAL = 32
"""Steps. Maximum length of the first trial, which is that of plain decoding. It ends once enough steps ran ahead. They
do not while prompts arrive, and then take up to twice as long."""

EVALUATION_STEPS = 4
"""Steps between two comparisons of all shapes. One of 30 shapes takes about 0.2 ms."""

BESIDE = 1.25
"""Ratio. How much less a shape may cost, relative to plain decoding, than with half or twice as many sequences."""

PROBE_INTERVAL = 128
"""Steps out of use after which a shape may be probed."""

PROBE_SHARE = 0.005
"""Share of the time that the probes of a shape may lose. So a shape that costs much is probed rarely."""

PROBED_WINDOWS = 2.0
"""Windows. Weight of earlier results at the positions that a probe tries, so that the probe outvotes them."""


class Choice:
    """The choice between `shapes` for steps of at most `sequences` and of more than half of them.

    The shape with the highest expected speed is in use. Another one that should be faster has a trial of some steps,
    and comes into use if the measured cost confirms it. Now and then a probe is the trial of plain decoding, or of one
    draft more than in use. It shows costs and acceptance that have changed meanwhile.
    """

    def __init__(self, acceptance: Acceptance, shapes: Sequence[Shape], sequences: int) -> None:
        self.acceptance = acceptance
        self.shapes = tuple(shapes)
        self.costs = StepCosts(sequences)
        self.beside: list[StepCosts] = []
        """The costs for half and twice as many sequences."""
        self.current = self.shapes[0]
        """The shape in use."""
        self._deepest = max(shape.depth for shape in self.shapes)
        self._returned = 0
        self._step = 0
        self._trial: Shape | None = self.current
        self._trial_began = 0

    @property
    def in_use(self) -> Shape:
        """The shape of a step: that of the trial, if there is one."""
        return self._trial or self.current

    def next_shape(self) -> Shape:
        """Return the shape of the next window."""
        shape = self.in_use
        if shape.fill > 1:  # a pass through all stages counts as one step
            self._returned += 1
            if self._returned % shape.fill:
                return shape
        self._step += 1
        steps = self._step - self._trial_began
        if self._trial is None:
            waits = self._step % EVALUATION_STEPS > 0
        elif not (self._trial_began or shape.ahead or self.costs.ran_ahead):
            waits = steps < FIRST_TRIAL
        elif self.costs.is_measured(shape):
            waits = steps < MEASURED_SAMPLES
        else:
            waits = steps < LONGEST_TRIAL
        if not waits:
            self._compare()
        return self.in_use

    def _compare(self) -> None:
        """End the trial, and begin one of the fastest shape, or of a probe that is due."""
        chances = self.acceptance.by_position(self._deepest)
        # Widths grow in steps, because the costs of rows are measured.
        widest = 2 * self.costs.widest
        speeds = {s: self._speed(s, chances) for s in self.shapes if s.width <= widest}
        usual = self._speed(self.current, chances)
        trial, self._trial = self._trial, None
        if trial is not None and self.costs.is_measured(trial) and (self._speed(trial, chances) > usual):
            self.current, usual = trial, self._speed(trial, chances)
        best = max(speeds, key=lambda shape: speeds[shape])
        if speeds[best] > GAIN * usual:
            self._trial, self._trial_began = best, self._step
        elif (probed := self._due_probe(chances, usual)) is not None:
            self._trial, self._trial_began = probed, self._step
            self.acceptance.limit_weight(self.current.depth, PROBED_WINDOWS)

    def _due_probe(self, chances: Sequence[float], usual: float) -> Shape | None:
        """Return plain decoding or the next wider shape, if it was out of use for long and its trial loses little.

        A trial loses the time in which the shape in use yields as many tokens.
        """
        now, step = self.current, self._seconds(self.current)
        wider = (s for s in self.shapes if s.fill == now.fill and s.width > now.width)
        for shape in (self.shapes[0], next(wider, now)):
            seconds, tokens = self._seconds(shape), self._speed(shape, chances) * self._seconds(shape)
            if shape.width < now.width:
                seconds = min(seconds, step)  # fewer rows are never slower, so the measurement is wrong
            lost = MEASURED_SAMPLES * (seconds - tokens / usual) / step
            if shape != now and self.costs.steps_since(shape) > max(PROBE_INTERVAL, lost / PROBE_SHARE):
                return shape
        return None

    def matched_shapes(self, chances: Sequence[Sequence[float] | None], shapes: Sequence[Shape]) -> list[Shape | None]:
        """Return for each sequence of a step the best of `shapes` for its match, or None if it does not pay.

        `chances` are the acceptances of each match. A match pays if the whole step then has more tokens per second. For
        several sequences there are no shapes during a trial, whose steps would then differ.
        """
        sequences, now = len(chances), self.current
        found: list[Shape | None] = [None] * sequences
        on_trial = sequences > 1 and self._trial not in (None, now)
        if on_trial or not self.costs.is_measured(now):
            return found
        head = self.acceptance.by_position(self._deepest)
        usual = expected_tokens(head[: now.depth]) if now.fill == 1 else 1.0
        tokens, rows = sequences * usual, sequences * now.width
        speed = sequences * self._speed(now, head)
        for i, own in enumerate(chances):
            if own is None:
                continue
            goal, more, wider = speed * (1 + (GAIN - 1) / sequences), 0.0, 0
            for shape in shapes:
                right = own[: shape.ahead]
                width = (rows + shape.width - now.width) / sequences
                # No drafts follow a rejected window, so the step after it yields one token.
                gain = expected_tokens(right) - usual - (1 - math.prod(right)) * (usual - 1)
                faster = (tokens + gain) / self.costs.seconds(width, now.depth)
                if shape.fill > 1:
                    faster = self._speed(shape, right)
                if faster > goal:
                    goal, more, wider = faster, gain, shape.width - now.width
                    found[i], speed = shape, faster
            tokens, rows = tokens + more, rows + wider
        return found

    def _speed(self, shape: Shape, chances: Sequence[float]) -> float:
        """Return the expected tokens per second of a sequence.

        A run of a filled pipeline takes a pass, and an interval for each further window.
        """
        seconds, chances = self._seconds(shape), chances[: shape.ahead]
        if shape.fill == 1:
            return expected_tokens(chances) / seconds
        tokens, windows = expected_run(chances, shape.width)
        return tokens / (seconds + (windows - 1) * self.costs.interval(shape))

    def _seconds(self, shape: Shape) -> float:
        """Return the seconds of a step. If only plain steps are measured, the others follow from the costs `beside`."""
        seconds = self.costs.seconds(shape.width, shape.depth)
        if shape.width == 1 or self.costs.widest > 1:
            return seconds
        known = [costs for costs in self.beside if costs.is_measured(shape) and costs.is_measured(self.shapes[0])]
        ratios = (costs.seconds(shape.width, shape.depth) / costs.seconds(1, 0) for costs in known)
        return seconds * max(1.0, min(ratios, default=1.0) / BESIDE)
