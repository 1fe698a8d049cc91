"""The state machine every stage is a replica of: which windows of a sequence are open, and what a commit undoes.

Plain integers, no arrays: the same code runs in every stage, in the protocol's exhaustive exploration, and
in thought. The rules, for one sequence:

* A segment extends the sequence where it ends. A prompt chunk is permanent at once; a window stays open.
* `commit(j, accepted_length)` closes window j and, with all their tokens, the windows before it: had one of those
  lost a token, j would have been dropped. If `accepted_length` is below the width of j, the rest of j and all later
  windows are dropped.
* The news of a rejection comes twice: by signal, at once, and in the header of the first frame that builds
  on it. Between the two, frames already on their way still build on what is gone: they are `stale`.
* Each piece of news may come first, twice, or, for the signal, never. The end state is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proto.errors import ProtocolError


@dataclass(frozen=True)
class OpenWindow:
    """Window `number`, `width` tokens from `position` on, not yet settled."""

    number: int
    position: int
    width: int


@dataclass(frozen=True)
class Settled:
    """What a commit did: `whole` windows became permanent, then, if `cut` is set, the next one was cut down to
    `cut` tokens and `dropped` windows after it went. `trim` tokens left the sequence's end."""

    whole: int
    cut: int | None = None
    dropped: int = 0
    trim: int = 0


NOTHING = Settled(0)


@dataclass
class WindowStack:
    """Length and open windows of one sequence on one stage."""

    length: int = 0
    windows: list[OpenWindow] = field(default_factory=list)
    newest: int = -1
    """Highest window number that ever ran here."""
    settled: int = -1
    """Highest window number that is permanent, cut down or dropped for good."""
    awaiting: int | None = None
    """A window whose rejection came by signal while its commit has not come in a header yet."""
    ended: bool = False
    """Cancelled by signal: nothing of it runs any more, the header's Evict will follow."""

    @property
    def committed(self) -> int:
        """Tokens that no rollback can take."""
        return self.windows[0].position if self.windows else self.length

    @property
    def stale(self) -> bool:
        """Whether segments that arrive now build on a rejected window or on nothing."""
        return self.ended or self.awaiting is not None

    def extend(self, number: int, position: int, width: int, *, stays_open: bool) -> None:
        """Take a segment that is about to run. Raises ProtocolError when it does not fit the sequence's end."""
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

    def commit(self, number: int, accepted_length: int, *, in_header: bool) -> Settled:
        """Settle window `number`; the same news again is `NOTHING`.

        Raises ProtocolError when the header names a window that never ran here, or keeps more than there is.
        A signal for one that has not arrived is ignored: the header will say it again.
        """
        if in_header and self.awaiting == number:
            self.awaiting = None
        if number <= self.settled:
            return NOTHING
        index = next((i for i, w in enumerate(self.windows) if w.number == number), None)
        if index is None:
            # One of which nothing is kept was sent on hope. Nobody need have run it: the client may be gone.
            if in_header and accepted_length:
                raise ProtocolError(f"commit of window {number}, which is not open here")
            return NOTHING
        window = self.windows[index]
        if accepted_length > window.width:
            raise ProtocolError(
                f"commit keeps {accepted_length} of window {number}'s {window.width} tokens"
            )
        self.settled = number
        if accepted_length == window.width:
            self.windows = self.windows[index + 1 :]
            return Settled(whole=index + 1)
        return self._cut(index, accepted_length, in_header=in_header)

    def _cut(self, index: int, accepted_length: int, *, in_header: bool) -> Settled:
        window = self.windows[index]
        dropped = len(self.windows) - index - 1
        end = window.position + accepted_length
        trim = self.length - end
        self.length = end
        self.windows = []
        if not in_header:
            self.awaiting = window.number
        self.check()
        return Settled(whole=index, cut=accepted_length, dropped=dropped, trim=trim)

    def end(self) -> None:
        """The client is gone: what still arrives of this sequence is stale until it is evicted."""
        self.ended = True

    def check(self) -> None:
        """Invariants, for constructors of tests and idle loops."""
        position = self.committed
        for window in self.windows:
            assert window.position == position and window.width > 0, self
            position += window.width
        assert position == self.length, self
        numbers = [w.number for w in self.windows]
        assert numbers == sorted(set(numbers)) and all(n > self.settled for n in numbers), self
        assert self.newest >= self.settled, self
