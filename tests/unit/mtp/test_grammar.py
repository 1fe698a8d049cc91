"""GrammarState: the allowed tokens are a function of grammar and text, in whichever order texts are asked for."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLMatcher

from coordinator.text.grammars import (
    OutputFormat,
    call_grammar,
    check_schema,
    compile_format,
)
from coordinator.text.tokenizer import Tokenizer, pack_vocabulary
from mtp.builtin import checkpoint_dir
from mtp.sampling import grammar as grammar_module
from mtp.sampling.grammar import (
    CHECKPOINT_TOKENS,
    Answer,
    GrammarState,
    Vocabulary,
    grammar_problem,
    tokenizer_of,
)
from proto.errors import ProtocolError, RequestError
from proto.params import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = "<tool_call>\n<function=f>\n<parameter=a>\nx y\n</parameter>\n</function>\n</tool_call>"
JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


@cache
def vocabulary() -> bytes:
    """Return the packed vocabulary of the built-in model."""
    return pack_vocabulary(Tokenizer.load(checkpoint_dir(), (4089,)))


def compiled(output: OutputFormat) -> bytes:
    """Return the grammar of a format."""
    return compile_format(output, tokenizer_of(vocabulary()))


def encode(text: str) -> list[int]:
    """Return the tokens of `text`."""
    return list(Tokenizer.load(checkpoint_dir()).encode(text))


def pending(tokens: list[int]) -> Answer:
    """Return an answer of which no token is verified."""
    return Answer(pending=tuple(tokens))


def cases() -> list[tuple[OutputFormat, str]]:
    """Return each kind of format with a text that it allows."""
    forced = "def add(a, b):\n    return a + b"
    ids = " ".join(f"<[{token}]>" for token in encode(forced))
    markers = ("<tool_call>", "</tool_call>")
    return [
        (OutputFormat("json_schema", SCHEMA, "x"), '{"a": "some \\"text\\" é"}'),
        (OutputFormat("lark", "start: /(ab|c)+[0-9]{3}/", "x"), "abccab123"),
        (OutputFormat("lark", call_grammar([TOOL], "xml", markers, single=False), "x"), CALL),
        (OutputFormat("lark", call_grammar([TOOL], "json", markers, single=True), "x"), JSON_CALL),
        (OutputFormat("lark", f"start: {ids} <[0-4095]>*", "x"), forced),
    ]


@pytest.mark.parametrize("number", range(5))
def test_masks_do_not_depend_on_the_order_of_the_texts(number: int) -> None:
    """After any jumps, forward, back and to texts that are not allowed, a mask is that of a new state."""
    output, text = cases()[number]
    grammar = compiled(output).decode()
    tokenizer = tokenizer_of(vocabulary())
    tokens = encode(text)
    fresh = []
    for length in range(len(tokens)):
        mask = GrammarState(grammar, tokenizer).allowed(pending(tokens[:length]))
        assert mask is not None
        assert mask[tokens[length]]
        fresh.append(mask)
    state = GrammarState(grammar, tokenizer)
    draw = random.Random(number)
    for _ in range(60):
        length = draw.randrange(len(tokens))
        if draw.random() < 0.3:
            wrong = int(np.flatnonzero(~fresh[length])[0]) if not fresh[length].all() else 5
            state.allowed(pending([*tokens[:length], wrong, 7]))
        found = state.allowed(pending(tokens[:length]))
        assert found is not None
        assert np.array_equal(found, fresh[length]), length


def test_only_an_end_token_may_follow_a_complete_text() -> None:
    """After the end of a format only end tokens are allowed, and the mask has no token beyond the vocabulary."""
    output, text = cases()[1]
    state = GrammarState(compiled(output).decode(), tokenizer_of(vocabulary()))
    logits = mx.zeros((1, 4200))
    masked = state.mask(logits, pending(encode(text)))
    assert [int(i) for i in np.flatnonzero(np.isfinite(np.array(masked)[0]))] == [4089]


def test_a_vocabulary_survives_the_wire_and_is_checked() -> None:
    """Packing and unpacking keep a vocabulary; malformed bytes and a missing vocabulary raise ProtocolError."""
    vocabulary = Vocabulary((b"a", b"\xff", b"<end>"), (2,), (2,), (0, 1), "{}")
    assert Vocabulary.unpack(vocabulary.pack()) == vocabulary
    for broken in (
        b"",
        b"junk",
        vocabulary.pack()[:-3],
        Vocabulary((b"a",), (), (7,), (), "{}").pack(),
    ):
        with pytest.raises(ProtocolError):
            Vocabulary.unpack(broken)
    with pytest.raises(ProtocolError, match="vocabulary"):
        GrammarState.make(SamplingParams(grammar=b"start: /a/"), b"")


class CountedList(list[int]):
    """A list that counts the items that its slices copied."""

    copied = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.copied += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("start", [None, 7])
def test_verified_tokens_are_read_once(start: int | None) -> None:
    """The masks along a growing text, whose drafts take another way than the text, are those of new states.

    A mask after 4,000 tokens reads as few of them as after 100, also where the format begins after a long reasoning.
    """
    grammar = str(LLMatcher.grammar_from_lark('start: ("a" "b" | "c" "d")*'))
    tokenizer, ways = tokenizer_of(vocabulary()), [encode(letter)[0] for letter in "abcd"]
    state = GrammarState(grammar, tokenizer, start)
    reasoning = [5] * 20_000 + [7] if start is not None else []
    text, draw = CountedList([1, 2, 3, *reasoning]), random.Random(1)
    for place in range(4_000):
        token = ways[2 * draw.randrange(2)] if place % 2 == 0 else text[-1] + 1
        other = ways[2] if token == ways[0] else ways[0]
        drafts = (token, token + 1) if place % 2 == 0 else (token, ways[2 * draw.randrange(2)])
        if place % 50 == 0:
            drafts = (other, other + 1)
        text.copied = 0
        mask = state.allowed(Answer(text, 3, drafts))
        assert place == 0 or text.copied <= 3 * CHECKPOINT_TOKENS, place
        if place % 200 in (50, 51):
            fresh = GrammarState(grammar, tokenizer, start)
            expected = fresh.allowed(pending([*text[3:], *drafts]))
            assert mask is not None and expected is not None
            assert np.array_equal(mask, expected), place
        text.append(token)


@pytest.mark.parametrize(("name", "words"), [("PREPARE_SECONDS", "to prepare"), ("MASK_SECONDS", "a token takes")])
def test_a_grammar_above_a_limit_of_the_last_stage_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """The trial measures the preparation and each token. Without the limit the same grammar has no problem."""
    output, _ = cases()[0]
    grammar, tokenizer = compiled(output).decode(), tokenizer_of(vocabulary())
    assert grammar_problem(grammar, tokenizer) == ""
    monkeypatch.setattr(grammar_module, name, 0.0)
    assert words in grammar_problem(grammar, tokenizer)


def test_a_text_beyond_a_limit_of_llguidance_may_only_end() -> None:
    """An answer never goes on without its grammar."""
    names = {f"p{number}": {"type": "string"} for number in range(1000)}
    content = {"type": "object", "properties": names, "additionalProperties": False}
    grammar = str(LLMatcher.grammar_from_json_schema(json.dumps(content)))
    mask = GrammarState(grammar, tokenizer_of(vocabulary())).allowed(pending(encode("{")))
    assert mask is not None
    assert list(np.flatnonzero(mask)) == [4089]


def forced_text(grammar: str) -> list[int]:
    """Return the tokens of a text that has one choice at most at each place, token by token."""
    state = GrammarState(grammar, tokenizer_of(vocabulary()))
    answer: list[int] = []
    while (mask := state.allowed(pending(answer))) is not None:
        allowed = np.flatnonzero(mask)
        if allowed.size != 1 or allowed[0] == 4089:
            break
        answer.append(int(allowed[0]))
    return answer


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        "<tool_call>\n<function=gather>\n<parameter=weather_of_city>\n",
        "a <|im_end|> inside <think> a value </think>",
        "e\u0301 is not \u00e9",
    ],
)
def test_forced_text_has_the_tokens_of_the_tokenizer(text: str) -> None:
    """A text without a choice is cut as the model was trained, and a control token's name is text."""
    tokenizer = Tokenizer.load(checkpoint_dir(), (4089,))
    end = "\n%%END%%"  # tokens at the end of a grammar have no longer ones to wait for
    found = forced_text(f"start: {json.dumps(text + end)}")
    assert b"".join(map(tokenizer.token_bytes, found)) == (text + end).encode()
    assert not tokenizer.control_ids.intersection(found)
    if "<|" not in text and "\u0301" not in text:  # the tokenizer reads these in another way
        assert found == encode(text + end)


def test_a_vocabulary_that_is_no_tokenizer_is_refused() -> None:
    """Fields that fit the wire and no tokenizer raise ProtocolError."""
    for layout in ("", "{}", "[1]", '{"added_tokens": [], "model": {"type": "BPE"}}', "[" * 9000):
        with pytest.raises(ProtocolError, match="malformed"):
            tokenizer_of(Vocabulary((b"a", b"b"), (), (0,), (0, 1), layout).pack())


HEAD, TAIL = "<tool_call>\n<function=f>\n<parameter=a>\n", "</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("x y\n</parameter>\n", True),
        ("</parameter>\n", True),
        ("a </b>\n\n</parameter>\n", True),
        ("</parameter>\n</function>\n</tool_call></tool_call>\n</parameter>\n", False),
        ("a</tool_call>b\n</parameter>\n", False),
        ("a</parameter>b\n</parameter>\n", False),
    ],
)
def test_no_string_of_a_forced_call_holds_its_end(value: str, allowed: bool) -> None:
    """The grammar ends a value where the parser ends it, also with `$schema` and for a nullable string."""
    for kind in ({"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {}):
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMA}
        schema["properties"] = {"a": kind}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        markers = ("<tool_call>", "</tool_call>")
        text = call_grammar([tool], "xml", markers, single=True)
        grammar = compiled(OutputFormat("lark", text, "x")).decode()
        matcher, tokens = (
            LLMatcher(tokenizer_of(vocabulary()), grammar),
            encode(HEAD + value + TAIL),
        )
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is allowed


RULES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["aBc", "", "a1"]),
    ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac"]),
    ({"type": "string", "pattern": r"^\d{4}/x"}, ["1234/xyz"], ["123/x"]),
    ({"type": "string", "pattern": "^a$|^b$"}, ["a", "b"], ["ab", "c"]),
    ({"type": "string", "pattern": "^(?:a|(b|c))+$"}, ["abc"], ["d"]),
    ({"type": "string", "pattern": r"^a\/b$"}, ["a/b"], ["ab"]),
    ({"enum": ["a", "b"], "type": "string", "pattern": "^a$"}, ["a"], ["b"]),
    ({"type": "string", "maxLength": 3}, ["abc", ""], ["abcd"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab"], ["a", "abcd"]),
    ({"type": "string", "format": "date"}, ["2026-11-27"], ["today"]),
    ({"enum": ["a", "b", None]}, ["a", "null"], ["c", "nul"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, ["7"], ["x", "0"]),
    ({"$ref": "#/$defs/n"}, ["7"], ["x"]),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["ab", "null"], ["abc"]),
    ({"anyOf": [{"$ref": "#/$defs/n"}, {"enum": ["all"]}]}, ["7", "all"], ["x"]),
    ({"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}]}, ["a-z"], ["a", "z"]),
]


WRITTEN = {
    "xml": (HEAD, f"\n</parameter>\n{TAIL}"),
    "pairs": ("<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value></tool_call>"),
}
"""The text of a forced call before and after the value of its argument, by form."""


@pytest.mark.parametrize("form", ["xml", "pairs"])
@pytest.mark.parametrize(("schema", "allowed", "refused"), RULES)
def test_a_forced_argument_has_the_rules_of_its_schema(
    schema: Any, allowed: list[str], refused: list[str], form: Any
) -> None:
    """References and `allOf` are resolved, and strings without quotes keep their rules."""
    root: Any = {"$ref": "#/$defs/all", "$defs": {"n": {"type": "integer"}}}
    root["$defs"]["all"] = {"properties": {"a": schema}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": root}}
    text = call_grammar([tool], form, ("<tool_call>", "</tool_call>"), single=True)
    grammar = compiled(OutputFormat("lark", text, "x")).decode()
    before, after = WRITTEN[form]
    for value in (*allowed, *refused):
        matcher = LLMatcher(tokenizer_of(vocabulary()), grammar)
        tokens = encode(before + value + after)
        fits = matcher.try_consume_tokens(tokens) == len(tokens)
        assert fits is (value in allowed), value


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"properties": {}, "patternProperties": {"^a": {}}}, "patternProperties"),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"minProperties": 1}, "minProperties"),
        ({"properties": 5}, "properties"),
    ],
)
def test_rules_that_no_grammar_holds_are_refused(parameters: Any, field: str) -> None:
    """The error names the field, where the form of calls cannot hold it."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(RequestError, match=field):
        check_schema(tool, "tools[0].function.parameters", "xml")


@pytest.mark.parametrize(("space", "allowed"), [("", True), (" ", True), ("  ", False), ("\n", False)])
def test_json_holds_at_most_one_space_between_tokens(space: str, allowed: bool) -> None:
    """Formats, JSON calls and the arguments of other calls have the same rule."""
    numbers = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
    }
    numbers |= {"required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": numbers}}
    markers = ("<tool_call>", "</tool_call>")
    texts = {
        "json": f'<tool_call>\n{{"name": "f", "arguments": {{"a": [1,{space}2]}}}}\n</tool_call>',
        "xml": f"{HEAD}[1,{space}2]\n</parameter>\n{TAIL}",
    }
    cases = [(OutputFormat("json_schema", numbers, "x"), f'{{"a":{space}[1,{space}2]}}')]
    for style in ("json", "xml"):
        lark = call_grammar([tool], style, markers, single=True)
        cases.append((OutputFormat("lark", lark, "x"), texts[style]))
    for output, text in cases:
        matcher = LLMatcher(tokenizer_of(vocabulary()), compiled(output).decode())
        assert (matcher.try_consume_tokens(encode(text)) == len(encode(text))) is allowed, text


def test_two_forced_calls_of_pairs_follow_each_other() -> None:
    """There is nothing between them, and no value holds the end of one."""
    lark = call_grammar([TOOL], "pairs", ("<tool_call>", "</tool_call>"), single=False)
    grammar = compiled(OutputFormat("lark", lark, "x")).decode()
    before, after = WRITTEN["pairs"]
    for value, allowed in (("x y", True), ("a</arg_value>b", False), ("</tool_call>", False), ("<b>", True)):
        matcher, tokens = LLMatcher(tokenizer_of(vocabulary()), grammar), encode(2 * (before + value + after))
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is allowed, value


def test_a_reference_in_a_json_call_finds_its_schema() -> None:
    """Definitions of a tool's parameters keep their place in the schema of the call."""
    schema = {"properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    lark = call_grammar([tool], "json", ("<tool_call>", "</tool_call>"), single=True)
    assert compiled(OutputFormat("lark", lark, "x"))
