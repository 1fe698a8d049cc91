"""Segments, runs of tokens of one sequence, and their outcomes: what the last stage said of them."""

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
    check_list,
    check_row,
    pack_tokens,
    unpack_tokens,
)

MAX_DRAFTS = 32
"""Most drafts after one token. Acceptance at the fifth is down to a quarter (MTP_HEAD.md)."""


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one sequence.

    `window` counts the sequence's segments from 0 and is never reused. `position` is where `tokens[0]`
    stands in the sequence. A prompt chunk is not `open`: its tokens are permanent. An open window
    waits for its Commit. `sample` asks the last stage for the token after it, `drafts` for that many
    drafts after that. `cancelled` marks a segment that builds on a rejected window; a stage passes it
    on with no rows.
    """

    seq_id: int
    window: int
    position: int
    tokens: tuple[int, ...]
    open: bool = False
    sample: bool = False
    drafts: int = 0
    cancelled: bool = False

    @property
    def width(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        """How many rows of the frame's tensor are its."""
        return 0 if self.cancelled else len(self.tokens)


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of an emitted token, and of the `top` most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What the last stage decided about one segment.

    `accepted_length` of its tokens were right (all, for a prompt chunk). `token` is the target's choice after the
    last kept one, None when nothing was sampled. `drafts` follow `token`. `logprobs` has one entry for
    each token this outcome emits: the kept drafts, then `token`; empty when not asked for.
    """

    seq_id: int
    window: int
    accepted_length: int
    token: int | None = None
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cancelled: bool = False


_OPEN, _SAMPLE, _CANCELLED = 1, 2, 4


def segment_to_wire(s: Segment) -> list[Any]:
    return [
        check_int(s.seq_id, "seq_id"),
        check_int(s.window, "window"),
        check_int(s.position, "position"),
        _OPEN * s.open + _SAMPLE * s.sample + _CANCELLED * s.cancelled,
        check_int(s.drafts, "drafts", MAX_DRAFTS),
        pack_tokens(s.tokens, "tokens"),
    ]


def segment_from_wire(wire: Any) -> Segment:
    """Inverse of `segment_to_wire`. Raises ProtocolError."""
    seq_id, window, position, flags, drafts, tokens = check_row(wire, "segment", 6)
    check_int(flags, "segment flags", _OPEN | _SAMPLE | _CANCELLED)
    return Segment(
        seq_id=check_int(seq_id, "seq_id"),
        window=check_int(window, "window"),
        position=check_int(position, "position"),
        tokens=unpack_tokens(tokens, "tokens"),
        open=bool(flags & _OPEN),
        sample=bool(flags & _SAMPLE),
        drafts=check_int(drafts, "drafts", MAX_DRAFTS),
        cancelled=bool(flags & _CANCELLED),
    )


def outcome_to_wire(o: Outcome) -> list[Any]:
    if len(o.drafts) > MAX_DRAFTS or len(o.logprobs) > MAX_DRAFTS + 1:
        raise ProtocolError(f"outcome with more than {MAX_DRAFTS} drafts")
    return [
        check_int(o.seq_id, "seq_id"),
        check_int(o.window, "window"),
        check_int(o.accepted_length, "accepted_length"),
        None if o.token is None else check_int(o.token, "token", MAX_TOKEN),
        pack_tokens(o.drafts, "drafts"),
        [_logprob_to_wire(p) for p in o.logprobs],
        o.cancelled,
    ]


def outcome_from_wire(wire: Any) -> Outcome:
    """Inverse of `outcome_to_wire`. Raises ProtocolError."""
    seq_id, window, accepted_length, token, packed, logprobs, cancelled = check_row(
        wire, "outcome", 7
    )
    drafts = unpack_tokens(packed, "drafts")
    if len(drafts) > MAX_DRAFTS:
        raise ProtocolError(f"outcome with more than {MAX_DRAFTS} drafts")
    return Outcome(
        seq_id=check_int(seq_id, "seq_id"),
        window=check_int(window, "window"),
        accepted_length=check_int(accepted_length, "accepted_length"),
        token=None if token is None else check_int(token, "token", MAX_TOKEN),
        drafts=drafts,
        logprobs=tuple(
            _logprob_from_wire(p) for p in check_list(logprobs, "logprobs", MAX_DRAFTS + 1)
        ),
        cancelled=check_bool(cancelled, "cancelled"),
    )


def _logprob_to_wire(p: TokenLogprob) -> list[Any]:
    if len(p.top) > MAX_LOGPROBS:
        raise ProtocolError(f"{len(p.top)} alternatives to a token, limit {MAX_LOGPROBS}")
    pair = [check_int(p.token, "token", MAX_TOKEN), check_float(p.logprob, "logprob")]
    top = [[check_int(t, "token", MAX_TOKEN), check_float(q, "logprob")] for t, q in p.top]
    return [*pair, top]


def _logprob_from_wire(wire: Any) -> TokenLogprob:
    token, logprob, top = check_row(wire, "logprob", 3)
    return TokenLogprob(
        check_int(token, "token", MAX_TOKEN),
        check_float(logprob, "logprob"),
        tuple(_alternative(pair) for pair in check_list(top, "alternatives", MAX_LOGPROBS)),
    )


def _alternative(wire: Any) -> tuple[int, float]:
    token, logprob = check_row(wire, "alternative", 2)
    return check_int(token, "token", MAX_TOKEN), check_float(logprob, "logprob")
