"""TextStream: whole characters, stop strings over token borders, every token in one piece."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.text.tokenizer import Piece, TextStream


def byte_stream(stop: tuple[str, ...] = ()) -> TextStream:
    """Return a stream whose tokens are bytes."""
    return TextStream(lambda token: bytes([token]), stop)


def feed(stream: TextStream, tokens: list[int]) -> list[Piece]:
    pieces = []
    for token in tokens:
        pieces.append(stream.add_token(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def reference(text: str, stops: list[str]) -> str:
    """Return `text` up to the stop string that ends first, the longer one if two end together."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - len(max(hits, key=len))]
    return text


@given(st.lists(st.integers(0, 255), max_size=30))
@example([ord("a"), 0xED, 0xA0])
def test_any_bytes_read_as_decode_reads_them(tokens: list[int]) -> None:
    """Invalid UTF-8 decodes as `bytes.decode` does, except that a character cut off at the end is omitted.

    Half of a surrogate is cut off in this sense too. `bytes.decode` reads its two bytes as two invalid ones.
    """
    expected = bytes(tokens).decode("utf-8", "replace")
    got = text_of(feed(byte_stream(), tokens))
    assert expected.startswith(got)
    surrogate = len(tokens) > 1 and tokens[-2] == 0xED and 0xA0 <= tokens[-1] <= 0xBF
    assert expected[len(got) :] in ("", "\ufffd\ufffd" if surrogate else "\ufffd")


def test_a_character_cut_off_by_the_end_is_omitted_but_its_tokens_are_reported() -> None:
    """A length limit inside a character shows no replacement sign; logprobs still cover its tokens."""
    stream = byte_stream()
    stream.add_token(ord("a"))
    stream.add_token(0xF0)
    assert stream.finish() == Piece("", (0xF0,))


@given(
    st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), max_size=6),
    st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), min_size=1, max_size=4),
)
@example(["xabc"], ["abc", "b"])
@example(["a", "bcd"], ["abcd", "bc", "c"])
def test_stop_strings_do_not_depend_on_token_borders(words: list[str], stops: list[str]) -> None:
    """For any token borders, a text ends before the stop string that is complete first."""
    text = "".join(words)
    whole = TextStream(lambda token: words[token].encode(), tuple(stops))
    by_word = feed(whole, list(range(len(words))))
    by_byte = feed(byte_stream(tuple(stops)), list(text.encode()))
    assert text_of(by_word) == text_of(by_byte) == reference(text, stops)


@given(
    st.text(alphabet="ab\n", max_size=20),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_only_what_could_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    """After each token, the text held back is a prefix of a stop string."""
    stream = byte_stream(tuple(stops))
    seen = shown = ""
    for token in text.encode():
        shown += stream.add_token(token).text
        seen += chr(token)
        if stream.stopped:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "é", "", "🎉"]), max_size=10),
    st.lists(st.sampled_from(["ab", "ba", "éa", "b"]), max_size=2),
)
def test_every_token_of_the_text_is_reported_once(words: list[str], stops: list[str]) -> None:
    """Each token appears once, in order; no token after the cut appears."""
    stream = TextStream(lambda token: words[token].encode(), tuple(stops))
    pieces = feed(stream, list(range(len(words))))
    reported = [token for piece in pieces for token in piece.tokens]
    assert reported == list(range(len(reported)))
    if stream.stopped:
        assert all(len("".join(words[:token])) < len(text_of(pieces)) for token in reported)
    else:
        assert len(reported) == len(words)
