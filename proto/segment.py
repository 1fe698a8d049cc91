"""Segments (runs of tokens of one sequence) and their outcomes, which the last stage decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proto.errors import ProtocolError
from proto.params import MAX_LOGPROBS
from proto.wire import (
    MAX_TOKEN,
    check_bool,
    check_float,
    check_int,
    check_ints,
    check_list,
    check_row,
    check_tokens,
    pack_tokens,
    unpack_tokens,
)

MAX_DRAFTS = 32
"""Maximum drafts after one token. Acceptance falls to a quarter at the fifth draft (MTP_HEAD.md)."""

_SEGMENT_NAMES = ("seq_id", "window", "position")
_OUTCOME_NAMES = ("seq_id", "window", "accepted_length")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one sequence.

    `window` counts the sequence's segments from 0 and is never reused. `position` is the position of
    `tokens[0]` in the sequence. The tokens of a prompt chunk are permanent, so it is not `open`. An open
    window waits for its Commit. `sample` asks the last stage for the next token, and `drafts` for that
    number of drafts after it. A `cancelled` segment builds on a rejected window; stages forward it
    without rows. A segment that `continues` is an open window of one token: the target's choice after the
    window before it, which the last stage knows and the header does not carry. `relay` asks the last of
    several stages to send the next token to the first stage too, for a segment that continues this one.
    Raises ProtocolError for a value out of range.
    """

    seq_id: int
    window: int
    position: int
    tokens: tuple[int, ...]
    open: bool = False
    sample: bool = False
    drafts: int = 0
    cancelled: bool = False
    continues: bool = False
    relay: bool = False

    def __post_init__(self) -> None:
        if self.continues and (self.tokens or not self.open):
            raise ProtocolError("a segment that continues is an open window without tokens")
        check_ints((self.seq_id, self.window, self.position), _SEGMENT_NAMES)
        check_int(self.drafts, "drafts", MAX_DRAFTS)
        if self.tokens:
            check_tokens(self.tokens, "tokens")

    @property
    def width(self) -> int:
        """Number of tokens."""
        return len(self.tokens) + self.continues

    @property
    def rows(self) -> int:
        """Number of this segment's rows in the frame's tensor."""
        return 0 if self.cancelled else self.width


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of an emitted token, and of the `top` most likely tokens, under the target model.

    Raises ProtocolError for a token out of range, NaN, or too many alternatives.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if len(self.top) > MAX_LOGPROBS:
            raise ProtocolError(f"{len(self.top)} alternatives to a token, limit {MAX_LOGPROBS}")
        for token, logprob in ((self.token, self.logprob), *self.top):
            check_int(token, "token", MAX_TOKEN)
            check_float(logprob, "logprob")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last stage's decision about one segment.

    `accepted_length` is the number of accepted tokens; all tokens of a prompt chunk are accepted. `token` is
    the target's choice after the last accepted token, or None when nothing was sampled. `drafts` follow
    `token`. `logprobs` has one entry for each token that this outcome emits: the accepted drafts, then
    `token`. It is empty unless the request asked for it. Raises ProtocolError for a value out of range.
    """

    seq_id: int
    window: int
    accepted_length: int
    token: int | None = None
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cancelled: bool = False

    def __post_init__(self) -> None:
        check_ints((self.seq_id, self.window, self.accepted_length), _OUTCOME_NAMES)
        if self.token is not None:
            check_int(self.token, "token", MAX_TOKEN)
        if len(self.drafts) > MAX_DRAFTS or len(self.logprobs) > MAX_DRAFTS + 1:
            raise ProtocolError(f"outcome with more than {MAX_DRAFTS} drafts")
        if self.drafts:
            check_tokens(self.drafts, "drafts")


_OPEN, _SAMPLE, _CANCELLED, _CONTINUES, _RELAY = 1, 2, 4, 8, 16
_ALL_FLAGS = _OPEN | _SAMPLE | _CANCELLED | _CONTINUES | _RELAY


def segment_to_wire(s: Segment) -> tuple[Any, ...]:
    """Return `s` as the row that msgpack encodes."""
    flags = _OPEN * s.open + _SAMPLE * s.sample + _CANCELLED * s.cancelled
    flags += _CONTINUES * s.continues + _RELAY * s.relay
    packed = pack_tokens(s.tokens, "tokens")
    return s.seq_id, s.window, s.position, flags, s.drafts, packed


def segment_from_wire(wire: Any) -> Segment:
    """Invert `segment_to_wire`. Raises ProtocolError for a malformed segment."""
    seq_id, window, position, flags, drafts, packed = check_row(wire, "segment", 6)
    check_int(flags, "segment flags", _ALL_FLAGS)
    return Segment(
        seq_id,
        window,
        position,
        unpack_tokens(packed, "tokens"),
        flags & _OPEN != 0,
        flags & _SAMPLE != 0,
        drafts,
        flags & _CANCELLED != 0,
        flags & _CONTINUES != 0,
        flags & _RELAY != 0,
    )


def outcome_to_wire(o: Outcome) -> tuple[Any, ...]:
    """Return `o` as the row that msgpack encodes."""
    drafts = pack_tokens(o.drafts, "drafts")
    logprobs = tuple(map(_logprob_to_wire, o.logprobs))
    return o.seq_id, o.window, o.accepted_length, o.token, drafts, logprobs, o.cancelled


def outcome_from_wire(wire: Any) -> Outcome:
    """Invert `outcome_to_wire`. Raises ProtocolError for a malformed outcome."""
    seq_id, window, accepted, token, packed, logprobs, cancelled = check_row(wire, "outcome", 7)
    check_list(logprobs, "logprobs", MAX_DRAFTS + 1)
    return Outcome(
        seq_id,
        window,
        accepted,
        token,
        unpack_tokens(packed, "drafts"),
        tuple(map(_logprob_from_wire, logprobs)),
        check_bool(cancelled, "cancelled"),
    )


def _logprob_to_wire(p: TokenLogprob) -> list[Any]:
    return [p.token, p.logprob, [[token, logprob] for token, logprob in p.top]]


def _logprob_from_wire(wire: Any) -> TokenLogprob:
    token, logprob, top = check_row(wire, "logprob", 3)
    return TokenLogprob(
        token,
        logprob,
        tuple(_alternative(pair) for pair in check_list(top, "alternatives", MAX_LOGPROBS)),
    )


def _alternative(wire: Any) -> tuple[int, float]:
    token, logprob = check_row(wire, "alternative", 2)
    return token, logprob
