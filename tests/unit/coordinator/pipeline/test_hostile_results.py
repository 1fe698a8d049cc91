"""Results that contradict the frame they answer end the plan, with the last worker as the suspect."""

from __future__ import annotations

import pytest

from coordinator.pipeline.remote_pipeline import _check_outcomes
from proto.errors import ProtocolError
from proto.frame import Frame, Outcome, Segment

SAMPLED = Segment(1, 0, 0, (5,), open=True, sample=True)


def test_an_outcome_without_a_token_is_a_protocol_error() -> None:
    """A segment that asked for a token gets one, unless its window was invalidated."""
    with pytest.raises(ProtocolError, match="no token for sequence 1"):
        _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 1),)))
    _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 1, token=7),)))
    _check_outcomes(Frame(1, 0, segments=(SAMPLED,), outcomes=(Outcome(1, 0, 0),)))
