"""Output formats: JSON, JSON schemas, regular expressions and Lark grammars, compiled to grammars for llguidance."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from llguidance import LLMatcher

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
            raise RequestError(
                f"{output.param}: {len(grammar)} bytes exceed the limit of {MAX_GRAMMAR_BYTES}. Send a smaller format.",
                param=output.param,
            )
        with self._lock:
            tokenizer = tokenizer_of(self.vocabulary)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        if failed:
            reason = " ".join(" ".join(messages).split())
            raise RequestError(
                f"{output.param}: the format cannot be compiled: {reason:.400}", param=output.param
            )
        return grammar.encode()


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


def check_schema(schema: Any, param: str) -> None:
    """Raise RequestError with the path of the first value that is not a schema, as far as types show it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestError(f"{param}: a schema is an object, not {schema!r:.60}", param=param)
    kinds = schema.get("type", [])
    known = {"object", "array", "string", "number", "integer", "boolean", "null"}
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in known:
            raise RequestError(f"{param}.type: {kind!r:.60} is not a type", param=f"{param}.type")
    for name in ("properties", "$defs", "definitions"):
        members = schema.get(name, {})
        if not isinstance(members, dict):
            raise RequestError(f"{param}.{name}: an object is required", param=f"{param}.{name}")
        for key, member in members.items():
            check_schema(member, f"{param}.{name}.{key}")
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        members = schema.get(name, [])
        if not isinstance(members, list):
            raise RequestError(f"{param}.{name}: a list is required", param=f"{param}.{name}")
        for index, member in enumerate(members):
            check_schema(member, f"{param}.{name}[{index}]")
    for name in ("items", "additionalProperties", "not"):
        if name in schema:
            check_schema(schema[name], f"{param}.{name}")
