"""Texts that a client may send to stop the server: too long, not Unicode, or fatal for the tokenizer's library."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coordinator.text.tokenizer import PIECE_CHARACTERS, ContextLengthError, Tokenizer
from mtp.builtin import checkpoint_dir
from proto.errors import RequestError


class PanicException(BaseException):
    """The exception of a Rust library that panics, which is no Exception."""


class Panicking:
    """A backend whose regular expressions panic."""

    def encode(self, *arguments: Any, **options: Any) -> Any:
        """Panic."""
        raise PanicException("called `Result::unwrap()` on an `Err` value")


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_dir())


def test_a_long_text_is_refused_before_most_of_it_is_encoded(tokenizer: Tokenizer) -> None:
    """A text of 1 MB for a context of 8,192 tokens costs the time of its first pieces."""
    text = "hello " * (2**20 // 6)
    started = time.process_time()
    tokenizer.encode(text[:PIECE_CHARACTERS])
    piece = time.process_time() - started
    tokenizer.max_tokens = 8192
    started = time.process_time()
    with pytest.raises(RequestError, match="context length of 8192 tokens"):
        tokenizer.encode(text)
    assert time.process_time() - started < 10 * piece + 0.5
    with pytest.raises(ContextLengthError) as error:
        tokenizer.chat_prompt([{"role": "user", "content": text}])
    tokenizer.max_tokens = len(text)
    assert error.value.prompt == pytest.approx(len(tokenizer.encode(text)), rel=0.01)


def test_a_long_text_that_fits_is_encoded_as_a_whole(tokenizer: Tokenizer) -> None:
    """The check by pieces does not change the tokens of a text within the limit."""
    text = "value = [1, 2, 3]\n" * (2 * PIECE_CHARACTERS // 18)
    whole = tokenizer.encode(text)
    tokenizer.max_tokens = len(whole)
    assert tokenizer.encode(text) == whole


def test_a_text_that_is_not_unicode_is_a_request_error(tokenizer: Tokenizer) -> None:
    """JSON may contain a lone surrogate, which no tokenizer can read."""
    with pytest.raises(RequestError, match="valid Unicode"):
        tokenizer.encode("\ud800")


def test_a_panic_of_the_library_is_a_request_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The panic ends the request and not the server."""
    monkeypatch.setattr(tokenizer, "backend", Panicking())
    with pytest.raises(RequestError, match="valid Unicode"):
        tokenizer.encode("anything")
