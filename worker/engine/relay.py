"""The tokens that the last of several stages relays to the first, so that plain decoding runs ahead of the coordinator.

Each frame with a segment that asks for it makes one message, in the order of the frames. So a frame that continues
never waits for tokens behind those of a later frame.
"""

from __future__ import annotations

from collections.abc import Collection

from proto.errors import ProtocolError, StaleEpochError
from proto.frame import Frame, Outcome, Segment


def relayed_tokens(out: Frame) -> Frame | None:
    """Return the message for the first stage about a frame that leaves the last one, or None if none is asked for.

    It is a frame with outcomes alone. A cancelled outcome has no token, and the segment that continues it has no row.
    """
    pairs = zip(out.segments, out.outcomes, strict=True)
    found = [
        Outcome(o.seq_id, o.window, o.accepted_length, o.token, cancelled=o.token is None)
        for segment, o in pairs
        if segment.relay
    ]
    return Frame(out.epoch, out.number, outcomes=tuple(found)) if found else None


class RelayedTokens:
    """The newest relayed token of each sequence, on the first stage."""

    def __init__(self, epoch: int, vocab: int) -> None:
        self.epoch = epoch
        self.vocab = vocab
        self._newest: dict[int, Outcome] = {}

    @property
    def newest(self) -> tuple[Outcome, ...]:
        """The newest relayed outcome of each sequence."""
        return tuple(self._newest.values())

    def copy(self) -> RelayedTokens:
        """Return a copy that shares no mutable state."""
        copied = RelayedTokens(self.epoch, self.vocab)
        copied._newest = dict(self._newest)
        return copied

    def receive_tokens(self, message: Frame, admitted: Collection[int]) -> None:
        """Keep the tokens of a message for the sequences in `admitted`; the others have ended.

        Raises StaleEpochError for another epoch, and ProtocolError for anything but tokens.
        """
        if message.epoch != self.epoch:
            raise StaleEpochError(f"tokens of epoch {message.epoch}, this stage is in {self.epoch}")
        if message.ops or message.segments or message.dtype:
            raise ProtocolError("a message of relayed tokens has more than outcomes")
        for outcome in message.outcomes:
            if (outcome.token is None) != outcome.cancelled:
                raise ProtocolError(f"a relayed outcome of {outcome.seq_id} has no token")
            if (outcome.token or 0) >= self.vocab:
                raise ProtocolError(f"token {outcome.token}: the vocabulary has {self.vocab}")
            if outcome.seq_id in admitted:
                self._newest[outcome.seq_id] = outcome

    def lacks(self, frame: Frame) -> bool:
        """Return whether a segment of `frame` continues with a token that has not arrived."""
        return frame.continues and any(
            segment.continues and self._outcome(segment) is None for segment in frame.segments
        )

    def token_of(self, segment: Segment) -> int | None:
        """Return the token of a segment that continues, or None if the window before it was cancelled.

        Raises ProtocolError if it has not arrived.
        """
        outcome = self._outcome(segment)
        if outcome is None:
            raise ProtocolError(f"sequence {segment.seq_id} continues with an unknown token")
        return outcome.token

    def forget_sequence(self, seq_id: int) -> None:
        """Drop the token of a sequence that has ended."""
        self._newest.pop(seq_id, None)

    def _outcome(self, segment: Segment) -> Outcome | None:
        outcome = self._newest.get(segment.seq_id)
        return outcome if outcome is not None and outcome.window == segment.window - 1 else None
