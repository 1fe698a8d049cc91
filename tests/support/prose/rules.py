"""The rules that a text is checked against. They know nothing of Python or Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_SENTENCE_WORDS = 28
"""Words. CONTRIBUTING asks for 25; the margin is for code and figures, which count as words here."""

_OPENING = re.compile(r"(All that|As|How|Of|That|Those|What|When|Where|Whether|Which|Who)\b")
"""First words of a fragment. A docstring opens with an imperative verb or a noun phrase instead."""

WORDS: dict[str, str] = {
    "alike": "both, or the same",
    "allowance": "deadline estimate",
    "amid": "during",
    "and no more": "only",
    "at hand": "available",
    "be told": "name the actor and what it receives",
    "beside each other": "together",
    "by hand": "manually",
    "checkup": "head trial",
    "company": "batched with other requests",
    "convoys?": "pipelined chunked prefill",
    "for ever": "without a limit",
    "graft(s|ed)?": "add head",
    "held to": "checked against",
    "hears?|heard": "receives, received",
    "hop(es?|ed)(?= (that|of|on|for|is|was))|(vain|a|the) hope": "unverified prefix",
    "in vain": "without effect",
    "lately": "recently",
    "let go|lets go": "release",
    "lest": "so that … not",
    "mend(s|ed|ing)?": "repair, fix",
    "no one|nobody|whoever": "name the actor",
    "of so many": "of `n` …",
    "on its way out": "is stopping",
    "pulses?": "worker status",
    "remed(y|ies)": "repair hint",
    "so many": "name the parameter",
    "such a": "repeat the noun",
    "taken for": "treated as",
    "thereby": "so",
    "to be had": "available",
    "told to|is told|are told|was told|were told": "name the actor and what it receives",
    "wants? (it|them) gone": "removes",
    "whatever it": "any value",
    "believed?": "trusted, or verified",
}
"""Idioms and retired terms, as regular expressions without word boundaries, and what to write instead."""

_WORDS = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): use for pattern, use in WORDS.items()}
_ANY_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
_CODE = re.compile(r"`[^`]*`")
_SENTENCE_END = re.compile(r"(?<=[.;:!?])[*_)\"]*\s+")


def find_words(text: str) -> Iterator[str]:
    """Yield one complaint for each word of WORDS in `text`, inline code aside."""
    plain = _CODE.sub("`…`", text)
    if not _ANY_WORD.search(plain):
        return
    for pattern, use in _WORDS.items():
        if found := pattern.search(plain):
            yield f"{found[0]!r}: write {use}"


def find_fragment(docstring: str) -> Iterator[str]:
    """Yield a complaint when `docstring` opens with a fragment."""
    if found := _OPENING.match(docstring.strip()):
        yield f"opens with {found[0]!r}: open with an imperative verb or a noun phrase"


def find_long_sentences(text: str) -> Iterator[str]:
    """Yield a complaint for each sentence of `text` that exceeds MAX_SENTENCE_WORDS.

    A colon and a semicolon end a sentence too. Paragraphs are separated by empty lines or begin with a list marker.
    """
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[*-] )", text):
        for sentence in _SENTENCE_END.split(paragraph.strip()):
            if (count := len(sentence.split())) > MAX_SENTENCE_WORDS:
                yield f"a sentence of {count} words: {' '.join(sentence.split())[:60]!r}"
