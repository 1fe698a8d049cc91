"""Join tokens: one line with everything, no secret in messages, and a proof for one session alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.announcement import JOIN_PREFIX
from proto.errors import UsageError
from proto.trust.joining import JoinToken, is_proof, new_token

CLUSTER = "0123456789abcdef"
addresses = st.from_regex(r"[a-z0-9.-]{1,40}:[0-9]{1,5}", fullmatch=True)


@given(st.binary(min_size=32, max_size=32), addresses)
def test_a_token_is_read_back(authority: bytes, address: str) -> None:
    """parse(str(token)) == token, also with spaces around it from copying and where a terminal broke the line."""
    token = new_token(CLUSTER, authority, address)
    text = str(token)
    assert JoinToken.parse(f" {text}\n") == token
    assert JoinToken.parse(f"{text[:80]}\n  {text[80:]}") == token
    assert JoinToken.parse(f"mac-2 $ mtp-worker --join {text}") == token
    assert JoinToken.parse(f"'{text}'") == token


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: JOIN_PREFIX + b.hex()))
def test_other_text_is_refused_without_repeating_it(text: str) -> None:
    """Nothing but UsageError, and the message does not repeat the text."""
    with pytest.raises(UsageError) as caught:
        JoinToken.parse(text)
    assert "mtp-coord token create" in str(caught.value)
    assert len(text) < 10 or text not in str(caught.value)


def test_a_mistyped_token_is_refused() -> None:
    """Every changed or missing character is noticed before any connection."""
    text = str(new_token(CLUSTER, bytes(range(32)), "10.0.0.1:50504"))
    for at in range(len(JOIN_PREFIX), len(text)):
        other = "A" if text[at] != "A" else "B"
        changed = text[:at] + other + text[at + 1 :]
        if at == len(text) - 1:  # its last bits may be unused
            continue
        with pytest.raises(UsageError):
            JoinToken.parse(changed)
        with pytest.raises(UsageError):
            JoinToken.parse(text[:at])


@given(st.binary(max_size=80), st.binary(max_size=80), st.text(max_size=20))
def test_a_proof_is_for_one_session(session: bytes, other: bytes, request: str) -> None:
    """A proof holds for its session and request, and for no other."""
    token = new_token(CLUSTER, bytes(32), "a:1")
    proof = token.proof(session, request)
    assert is_proof(token.verifier, proof, session, request)
    assert is_proof(token.verifier, proof, other, request) == (other == session)
    assert not is_proof(token.verifier, proof, session, request + "x")
    assert not is_proof(token.verifier, other, session, request)


def test_the_secret_is_not_shown() -> None:
    """The representation of a token, as in a traceback, has no secret."""
    token = new_token(CLUSTER, bytes(32), "a:1")
    assert "secret" not in repr(token)
    assert str(token.secret) not in repr(token)
