"""Output formats: JSON, JSON schemas, regular expressions and Lark grammars, compiled to grammars for llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from llguidance import LLMatcher

from coordinator.text.schema_path import check_schema, path_of_cause
from coordinator.text.tokenizer import Tokenizer
from mtp.sampling.grammar import Vocabulary, tokenizer_of
from proto.errors import RequestError
from proto.params import MAX_GRAMMAR_BYTES

FormatKind = Literal["json_schema", "regex", "lark"]

WHITESPACE = r"[ \t\n\r]{0,20}"
"""The whitespace between JSON tokens. Without a limit a model may repeat it until the answer's limit."""


@dataclass(frozen=True)
class OutputFormat:
    """The format of an answer's content. `content` is a schema, a regular expression or a Lark grammar.

    `param` is the client's field that holds the content, for errors.
    """

    kind: FormatKind
    content: Any
    param: str


ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of any JSON object."""


class GrammarCompiler:
    """The compiler of output formats for one tokenizer. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    @cached_property
    def vocabulary(self) -> bytes:
        """Return the packed vocabulary, which the last stage needs to apply a grammar."""
        tokenizer = self._tokenizer
        return Vocabulary(
            tuple(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)),
            tuple(sorted(tokenizer.control_ids)),
            tuple(sorted(tokenizer.eos_ids)),
        ).pack()

    def compile(self, output: OutputFormat) -> bytes:
        """Return the grammar of a format. Blocks, up to seconds for large schemas.

        Raises RequestError, naming the client's field, for a format that is invalid, unsupported or too large.
        """
        if not self._tokenizer.eos_ids:
            raise RequestError(
                f"{output.param}: this checkpoint names no end token, which formats require.",
                param=output.param,
            )
        grammar = _grammar_text(output)
        if len(grammar) > MAX_GRAMMAR_BYTES:
            param = _path_of_cause(output, lambda part: len(json.dumps(part)) > MAX_GRAMMAR_BYTES)
            raise RequestError(
                f"{param}: {len(grammar)} bytes exceed the limit of {MAX_GRAMMAR_BYTES}. Send a smaller format.",
                param=param,
            )
        if (reason := self._failure(grammar)) is not None:
            param = _path_of_cause(output, self._fails)
            raise RequestError(
                f"{param}: the format cannot be compiled: {reason:.400}", param=param
            )
        return grammar.encode()

    def _fails(self, schema: Any) -> bool:
        return self._failure(_grammar_text(OutputFormat("json_schema", schema, ""))) is not None

    def _failure(self, grammar: str) -> str | None:
        """Return why a grammar cannot be compiled, or None if it can."""
        with self._lock:
            tokenizer = tokenizer_of(self.vocabulary)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        return " ".join(" ".join(messages).split()) if failed else None


def _path_of_cause(output: OutputFormat, fails: Callable[[Any], bool]) -> str:
    """Return the client's field that is the cause of an error, with the path in a schema."""
    if output.kind != "json_schema":
        return output.param
    return path_of_cause(output.content, output.param, fails)


def _grammar_text(output: OutputFormat) -> str:
    match output.kind:
        case "json_schema":
            check_schema(output.content, output.param)
            options: Any = {"whitespace_pattern": WHITESPACE}
            schema = json.dumps(output.content)
            return str(LLMatcher.grammar_from_json_schema(schema, defaults=options))
        case "regex":
            return str(LLMatcher.grammar_from_regex(str(output.content)))
        case "lark":
            return str(LLMatcher.grammar_from_lark(str(output.content)))
