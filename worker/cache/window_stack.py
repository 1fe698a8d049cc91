"""The window stack of a sequence: its open windows, and the effect of a commit. Every stage has a replica.

The stack has plain integers and no arrays. The same code runs in every stage and in the exhaustive exploration of the
protocol. The rules for one sequence are:

* A segment extends the sequence at its end. A prompt chunk is permanent at once; a window stays open.
* `commit(j, accepted_length)` closes window j and the windows before it. Those keep all their tokens: if one of them
  had lost a token, j would have been dropped. If `accepted_length` is below the width of j, the rest of j and all later
  windows are dropped.
* A rejection arrives twice: at once by signal, and in the header of the first frame that builds on it. Frames that
  arrive between the two may still build on dropped tokens. They are `stale`.
* The two may arrive in any order and repeatedly, and the signal may be lost. The resulting state is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proto.errors import ProtocolError


@dataclass(frozen=True)
class OpenWindow:
    """The open window `number` of `width` tokens, which begins at `position`."""

    number: int
    position: int
    width: int


@dataclass(frozen=True)
class CommitResult:
    """The result of a commit.

    `whole` windows became permanent. If `cut` is set, the next window was cut to `cut` tokens, and the `dropped`
    windows after it were removed. `trim` tokens were removed from the end of the sequence.
    """

    whole: int
    cut: int | None = None
    dropped: int = 0
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

    def commit(self, number: int, accepted_length: int, *, in_header: bool) -> CommitResult:
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
        if accepted_length > window.width:
            raise ProtocolError(
                f"commit of {accepted_length} tokens exceeds the {window.width} tokens of window {number}"
            )
        self.settled = number
        if accepted_length == window.width:
            self.windows = self.windows[index + 1 :]
            return CommitResult(whole=index + 1)
        return self._cut(index, accepted_length, in_header=in_header)

    def _cut(self, index: int, accepted_length: int, *, in_header: bool) -> CommitResult:
        window = self.windows[index]
        dropped = len(self.windows) - index - 1
        end = window.position + accepted_length
        trim = self.length - end
        self.length = end
        self.windows = []
        if not in_header:
            self.awaiting = window.number
        self.check()
        return CommitResult(whole=index, cut=accepted_length, dropped=dropped, trim=trim)

    def end(self) -> None:
        """Mark the sequence as cancelled. Arriving segments are stale until it is evicted."""
        self.ended = True

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
