"""Grammar libraries behind one interface, for the bench that compares them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from llguidance import LLMatcher

from coordinator.text.output_format import WHITESPACE
from mtp.sampling.grammar import Vocabulary, tokenizer_of


class Matcher(Protocol):
    """The state of one library for one text."""

    def mask(self) -> None:
        """Compute the allowed tokens."""
        ...

    def advance(self, token: int) -> bool:
        """Append a token. Return False if it is not allowed."""
        ...

    def may_end(self) -> bool:
        """Return whether the text is complete."""
        ...


class Library(Protocol):
    """One library with a vocabulary."""

    def matcher(self, schema: Any) -> Matcher:
        """Compile a JSON schema. Raises the library's own exceptions for one that it does not support."""
        ...


class Llguidance:
    """llguidance, as the last stage uses it."""

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self._end = end
        self._tokenizer = tokenizer_of(Vocabulary(tuple(tokens), (end,), (end,)).pack())

    def matcher(self, schema: Any) -> Matcher:
        """See Library."""
        options: Any = {"whitespace_pattern": WHITESPACE}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        found = LLMatcher(self._tokenizer, grammar, log_level=0)
        if found.is_error():
            raise ValueError(found.get_error())
        return _LlguidanceMatcher(found)


class _LlguidanceMatcher:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> None:
        self._matcher.compute_bitmask()

    def advance(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


class Xgrammar:
    """xgrammar. Its masks are torch tensors."""

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self._library: Any = import_module("xgrammar")
        info = self._library.TokenizerInfo(
            list(tokens), vocab_size=len(tokens), stop_token_ids=[end]
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bitmask = self._library.allocate_token_bitmask(1, len(tokens))
        self._end = end

    def matcher(self, schema: Any) -> Matcher:
        """See Library."""
        compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        return _XgrammarMatcher(self._library.GrammarMatcher(compiled), self._bitmask, self._end)


class _XgrammarMatcher:
    def __init__(self, matcher: Any, bitmask: Any, end: int) -> None:
        self._matcher, self._bitmask, self._end = matcher, bitmask, end

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._bitmask)

    def advance(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def may_end(self) -> bool:
        return bool(self._matcher.accept_token(self._end))


class OutlinesCore:
    """outlines-core. A schema becomes a regular expression, and an index of the tokens of each of its states."""

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self._library: Any = import_module("outlines_core")
        self._schemas: Any = import_module("outlines_core.json_schema")
        self._vocabulary = self._library.Vocabulary(
            end, {token: [i] for i, token in enumerate(tokens) if i != end and token}
        )
        self._end = end

    def matcher(self, schema: Any) -> Matcher:
        """See Library."""
        regex = self._schemas.build_regex_from_schema(json.dumps(schema))
        index = self._library.Index(regex, self._vocabulary)
        return _OutlinesMatcher(self._library.Guide(index), self._end)


class _OutlinesMatcher:
    def __init__(self, guide: Any, end: int) -> None:
        self._guide, self._end = guide, end

    def mask(self) -> None:
        self._guide.get_tokens()

    def advance(self, token: int) -> bool:
        if token not in self._guide.get_tokens():
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def may_end(self) -> bool:
        return self._end in self._guide.get_tokens()


LIBRARIES: dict[str, Callable[[Sequence[bytes], int], Library]] = {
    "llguidance": Llguidance,
    "xgrammar": Xgrammar,
    "outlines-core": OutlinesCore,
}
"""The libraries by name. All but the first raise ImportError where they are not installed."""
