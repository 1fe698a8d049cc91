"""One sequence on one stage: its window stack and the caches of its layers, which change together, and prefix entries.

The window stack has plain integers and no arrays. The same code runs in every stage and in the exhaustive exploration
of the protocol. The rules for one sequence are:

* A segment extends the sequence at its end. A prompt chunk is permanent at once; a window stays open.
* `commit(j, accepted_length)` closes window j and the windows before it. Those keep all their tokens: if one of them
  had lost a token, j would have been dropped. If `accepted_length` is below the width of j, the rest of j and all later
  windows are dropped.
* A rejection arrives twice: at once by signal, and in the header of the first frame that builds on it. Frames that
  arrive between the two may still build on dropped tokens. They are `stale`.
* The two may arrive in any order and repeatedly, and the signal may be lost. The resulting state is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mtp.head.drafter import Drafts, HeadState
from mtp.layers.layer import LayerCache
from mtp.sampling.constraint import Constraint
from mtp.sampling.grammar import Answer
from mtp.sampling.sampler import Draft, History
from proto.errors import ProtocolError
from proto.frame import Admit, Segment
from proto.images import ImageLayout, without_images
from proto.params import SamplingParams


@dataclass(frozen=True)
class OpenWindow:
    """The open window `number` of `width` tokens, which begins at `position`."""

    number: int
    position: int
    width: int


@dataclass(frozen=True)
class CommitResult:
    """The result of a commit.

    `whole` windows became permanent. If `cut` is set, the next window was cut to `cut` tokens, and the windows after it
    were removed. `trim` tokens were removed from the end of the sequence.
    """

    whole: int
    cut: int | None = None
    trim: int = 0


NOTHING = CommitResult(0)


@dataclass
class WindowStack:
    """The length and the open windows of one sequence on one stage."""

    length: int = 0
    windows: list[OpenWindow] = field(default_factory=list)
    newest: int = -1
    """Highest window number that has run here."""
    settled: int = -1
    """Highest window number that is permanent, cut or dropped."""
    awaiting: int | None = None
    """The window whose rejection arrived by signal and whose commit has not arrived in a header yet."""
    ended: bool = False
    """True after a cancellation by signal. No segment of the sequence runs until the header evicts it."""

    @property
    def committed(self) -> int:
        """Tokens that no rollback can remove."""
        return self.windows[0].position if self.windows else self.length

    @property
    def stale(self) -> bool:
        """True if arriving segments build on a rejected window or belong to a cancelled sequence."""
        return self.ended or self.awaiting is not None

    def extend(self, number: int, position: int, width: int, *, stays_open: bool) -> None:
        """Register a segment before it runs. Raises ProtocolError when it does not follow the end of the sequence."""
        if number <= self.newest or position != self.length or width < 1:
            raise ProtocolError(
                f"window {number} of {width} tokens at {position} does not follow"
                f" window {self.newest}, which ends at {self.length}"
            )
        if not stays_open and self.windows:
            raise ProtocolError(f"prompt chunk {number} follows open window {self.newest}")
        if stays_open:
            self.windows.append(OpenWindow(number, position, width))
        else:
            self.settled = number
        self.newest = number
        self.length += width
        self.check()

    def commit_window(self, number: int, accepted_length: int, *, in_header: bool) -> CommitResult:
        """Commit window `number` and return the result. A repeated commit returns `NOTHING`.

        Raises ProtocolError when the header names a window that has not run here, or an accepted length above its
        width. A signal for a window that has not arrived is ignored: the header repeats it.
        """
        if in_header and self.awaiting == number:
            self.awaiting = None
        if number <= self.settled:
            return NOTHING
        index = next((i for i, w in enumerate(self.windows) if w.number == number), None)
        if index is None:
            # An invalidated window may never have run here, for example after a cancellation.
            if in_header and accepted_length:
                raise ProtocolError(f"commit of window {number}, which is not open here")
            return NOTHING
        window = self.windows[index]
        if not 0 <= accepted_length <= window.width:
            raise ProtocolError(f"commit of {accepted_length} tokens of window {number}, which has {window.width}")
        self.settled = number
        if accepted_length == window.width:
            self.windows = self.windows[index + 1 :]
            return CommitResult(whole=index + 1)
        end = window.position + accepted_length
        trim = self.length - end
        self.length = end
        self.windows = []
        if not in_header:
            self.awaiting = number
        self.check()
        return CommitResult(whole=index, cut=accepted_length, trim=trim)

    def check(self) -> None:
        """Assert the invariants. Tests and idle loops call it."""
        position = self.committed
        for window in self.windows:
            assert window.position == position and window.width > 0, self
            position += window.width
        assert position == self.length, self
        numbers = [w.number for w in self.windows]
        assert numbers == sorted(set(numbers)) and all(n > self.settled for n in numbers), self
        assert self.newest >= self.settled, self


@dataclass
class SequenceCache:
    """The state of one sequence on this stage. `layers[i]` belongs to the i-th layer of the span."""

    admitted: Admit
    layers: list[LayerCache]
    stack: WindowStack = field(default_factory=WindowStack)
    layout: ImageLayout | None = None
    """The images of the prompt. Caches learn them before each segment, since copies of prefixes have none."""

    def extend(self, segment: Segment) -> None:
        """Register a segment before it runs. The layers append its rows to the caches themselves.

        Raises ProtocolError when the segment does not follow the end of the sequence or exceeds the admitted capacity.
        """
        if self.stack.length + segment.width > self.admitted.capacity:
            raise ProtocolError(
                f"{segment.width} tokens at {segment.position} exceed the capacity of {self.admitted.capacity}"
                f" tokens of sequence {segment.seq_id}"
            )
        self.stack.extend(segment.window, segment.position, segment.width, stays_open=segment.open)
        if self.layout is not None:
            for cache in self.layers:
                cache.layout = self.layout

    def commit_window(self, window: int, accepted_length: int, *, in_header: bool) -> CommitResult:
        """Apply a commit to the window stack and to the cache of every layer."""
        result = self.stack.commit_window(window, accepted_length, in_header=in_header)
        if result is NOTHING:
            return result
        for cache in self.layers:
            cache.apply_commit(result.whole, result.cut, result.trim)
        return result

    def arrays(self) -> Iterator[mx.array]:
        """Return every array of the present state, without the tapes of open windows."""
        return arrays_of(self.layers)

    def copied_nbytes(self, rows: int) -> int:
        """Return the bytes that a frame of `rows` rows copies if unfinished work reads them."""
        return sum(cache.copied_nbytes(rows) for cache in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the present state."""
        return sum(cache.nbytes for cache in self.layers)


def arrays_of(layers: Sequence[LayerCache]) -> Iterator[mx.array]:
    """Yield every array of the present state of the caches."""
    for cache in layers:
        yield from cache.arrays()


def copies_of(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Return independent copies of the caches. No window may be open."""
    return [cache.copy() for cache in layers]


@dataclass(frozen=True)
class UnconfirmedToken:
    """The token of a window that continues: the text may have ended before it, which only the coordinator knows.

    `hidden [1, hidden]` is its state after the final norm, `successor` the target's choice after it.
    """

    window: int
    token: int
    hidden: mx.array
    successor: int


@dataclass(frozen=True)
class ChosenToken:
    """The target's newest choice as row `row` of `tokens`, int32 `[rows]`, which may be lazy."""

    tokens: mx.array
    row: int


@dataclass(frozen=True)
class DraftedChain:
    """The drafts that the head chained, the first of them at `position`."""

    position: int
    drafts: Drafts


@dataclass
class LastStageState:
    """The state of a sequence on the last stage besides its layers.

    `tokens` are the verified ones. `expected` is the target's choice for the next position: a window with another first
    token is a misspeculation. `chosen` is the same choice on the device, before the host has read it.
    """

    admitted: Admit
    head: HeadState | None
    tokens: list[int] = field(default_factory=list)
    history: History | None = None
    expected: int | None = None
    chosen: ChosenToken | None = None
    unconfirmed: list[UnconfirmedToken] = field(default_factory=list)
    """Tokens of windows that continue and whose commit has not arrived."""
    constraint: Constraint | None = None
    chains: dict[int, DraftedChain] = field(default_factory=dict)
    """Under the ratio rule, the newest chains by the window that they follow."""
    image_token: int = 0
    """The word that stands for a row of an image, for the head and for penalties."""

    def answer_with(self, tokens: Sequence[int]) -> Answer:
        """Return the answer, which begins after the prompt: the verified tokens and then `tokens`."""
        prompt = self.admitted.prompt
        rest = max(0, prompt - len(self.tokens))  # of the prompt, in its last chunk
        return Answer(self.tokens, prompt, tuple(tokens[rest:]))

    def needs_host(self, segment: Segment, drafts: int = 0) -> bool:
        """Return whether the tokens after the rows of `segment`, or `drafts` more, depend on tokens before them."""
        first = segment.position + 1 - self.admitted.prompt
        return self.params.needs_host(first, first + segment.width + drafts)

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""
        return self.admitted.params

    @property
    def nbytes(self) -> int:
        """Bytes of the head's state."""
        return 0 if self.head is None else sum(a.nbytes for a in self.head.arrays())

    def drafts_of(self, segment: Segment) -> list[Draft]:
        """Return the drafts at the first rows of a window, for the ratio rule.

        The chain of these drafts may go on at the last row, as where the coordinator cut it before a stop token. The
        rule decides there too, because whether a draft counts must not depend on the draft.
        """
        sent = [Draft(token) for token in segment.tokens[1:]]
        source = segment.window - segment.source
        chain = self.chains.get(source) if segment.source else None
        if chain is None:
            return sent
        self.chains = {window: kept for window, kept in self.chains.items() if window >= source}
        first = segment.position + 1 - chain.position
        found = [chain.drafts[i] for i in range(first, min(first + segment.width, len(chain.drafts.tokens)))]
        is_same = [draft.token for draft in found[: len(sent)]] == list(segment.tokens[1:])
        return found if is_same else sent

    def words_of(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return `tokens` with a word for each row of an image."""
        return without_images(tokens, self.image_token) if self.admitted.images else tokens

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Append verified tokens to the sequence and to its history."""
        tokens = self.words_of(tokens)
        if self.history is not None:
            self.history.extend(tokens)
        self.tokens.extend(tokens)

    def commit_window(self, window: int, accepted_length: int) -> None:
        """Append the unconfirmed tokens before `window`, and its own if it is accepted. Drop the others."""
        end = window + 1 if accepted_length else window
        confirmed = [token for token in self.unconfirmed if token.window < end]
        for token in confirmed:
            self.append_tokens([token.token])
            if self.head is not None:
                self.head.add_pairs(token.hidden, [token.token], token.successor)
        del self.unconfirmed[: len(confirmed)]
        if self.unconfirmed and not accepted_length:
            self.unconfirmed.clear()
            self.chosen = self.expected = None


@dataclass(frozen=True)
class Border:
    """A prefix of a sequence: its key and its length in tokens."""

    key: bytes
    length: int


@dataclass(frozen=True)
class PrefixEntry:
    """The state after `border`. `last_stage` is the state of the last stage besides its layers."""

    border: Border
    layers: list[LayerCache]
    last_stage: LastStageState | None = None

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return self.border.length

    def arrays(self) -> Iterator[mx.array]:
        """Yield every array of the entry."""
        yield from arrays_of(self.layers)
        if self.last_stage is not None and self.last_stage.head is not None:
            yield from self.last_stage.head.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes of the entry."""
        return sum(array.nbytes for array in self.arrays())
