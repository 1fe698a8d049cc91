"""AnswerReader: reasoning, content and tool calls in both call forms, whatever pieces the text arrives in."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, cycle, takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.answer_reader import (
    AnswerReader,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Marks,
    Part,
    Reasoning,
    join_parts,
)

MARKS = Marks("<think>", "</think>", "<tool_call>", "</tool_call>")
SCHEMA: Any = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "edits": {"$ref": "#/$defs/edits"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "any": {},
        "either": {"type": ["integer", "string"]},
        "count": {"allOf": [{"type": "integer"}, {"minimum": 1}]},
    },
    "$defs": {"edits": {"type": "array", "items": {"type": "object"}}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FILE: Any = {
    "$ref": "#/$defs/arguments",
    "$defs": {
        "arguments": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
    },
}
WRITE = {"type": "function", "function": {"name": "write_file", "parameters": FILE}}
TOOLS = [WEATHER, WRITE]
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
STEPS = pytest.mark.parametrize("step", [1, 3, 7, 1000])


def parse(text: str, step: int = 1000, *, cut: bool = False, marks: Marks = MARKS, **options: Any) -> list[Part]:
    """Return the parts of `text`, added `step` characters at a time, with adjacent ones joined."""
    return parse_pieces(text, range(step, len(text), step), marks=marks, cut=cut, **options)


def parse_pieces(text: str, cuts: Iterable[int], *, marks: Marks, cut: bool, **options: Any) -> list[Part]:
    """Return the parts of `text`, cut at the places `cuts`, with adjacent ones joined."""
    reader, parts, start = AnswerReader(marks, **{"tools": TOOLS, **options}), list[Part](), 0
    for end in (*cuts, len(text)):
        parts += reader.add_text(text[start:end])
        start = end
    return join_parts([*parts, *reader.finish(cut=cut)])


def call(name: str, arguments: Any) -> list[Part]:
    """Return the parts of a complete call."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [CallStart(name), CallArguments(text), CallEnd(complete=True)]


PAIRS = Marks("<think>", "</think>", "<tool_call>", "</tool_call>", pairs=True)
PAIR_CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
GIVEN = {"city": "Rome", "days": 2}
HALF_CALL = "<tool_call>weather<arg_key>city</arg_key><arg_va"


@STEPS
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PAIR_CALL, call("weather", GIVEN)),
        (PAIR_CALL.replace("</tool_call>", ""), call("weather", GIVEN)),
        ("<tool_call>weather</tool_call>", call("weather", {})),
        ("<tool_call>unknown</tool_call>", [Content("<tool_call>unknown</tool_call>")]),
        ("Write <tool_call> and </tool_call>.", [Content("Write <tool_call> and </tool_call>.")]),
        (
            PAIR_CALL.replace("Rome", "a</tool_call>\n</arg_value> b").replace("><arg_key>days", ">\n<arg_key>days"),
            call("weather", {"city": "a</tool_call>\n</arg_value> b", "days": 2}),
        ),
        (PAIR_CALL.replace("<arg_value>2", "<arg_value>two"), call("weather", {"city": "Rome", "days": "two"})),
        (f"ok{PAIR_CALL}{PAIR_CALL}", [Content("ok"), *2 * call("weather", GIVEN)]),
        (HALF_CALL, [Content(HALF_CALL)]),
    ],
)
def test_calls_of_pairs(text: str, expected: list[Part], step: int) -> None:
    """A call of GLM is its name and pairs, in any pieces, with marks in its values and without its end."""
    assert parse(text, step, marks=PAIRS) == expected


@STEPS
@pytest.mark.parametrize(
    "end", ["<tool_call>write_file", "<tool_call>write_file<arg_key>path</arg_key><arg_value>a</arg_value>"]
)
def test_a_cut_call_of_pairs_is_none(end: str, step: int) -> None:
    """A limit after the name or between two arguments makes no call of what is there."""
    assert CallEnd(complete=True) not in parse(end, step, cut=True, marks=PAIRS)


def test_the_end_of_reasoning_ends_no_name() -> None:
    """A thought about a tool is none of its calls, and marks in prose hold nothing back."""
    parts = parse("I think <tool_call>write_file</think>Hello", marks=PAIRS, thinking=True)
    assert parts == [Reasoning("I think <tool_call>write_file"), Content("Hello")]
    prose = "Use <tool_call> in prose, " + 100 * "x "
    assert join_parts(AnswerReader(PAIRS, tools=TOOLS).add_text(prose)) == [Content(prose)]


def test_values_with_pairs_take_linear_time() -> None:
    """A file about calls of GLM, in a call of GLM."""
    line = "- `<arg_key>k</arg_key><arg_value>v</arg_value>` and </tool_call>\n"
    text = f"<tool_call>write_file<arg_key>content</arg_key><arg_value>{300 * line}</arg_value></tool_call>"
    started = time.perf_counter()
    parts = parse(text, len(text), marks=PAIRS)
    assert time.perf_counter() - started < 3.0
    assert parts[0] == CallStart("write_file")


def written(content: str, path: str = "a.txt") -> str:
    """Return a call that writes `content`."""
    return (
        f"<tool_call>\n<function=write_file>\n<parameter=path>\n{path}\n</parameter>\n"
        f"<parameter=content>\n{content}\n</parameter>\n</function>\n</tool_call>"
    )


ROME = call("weather", {"city": "Rome", "days": 2})

# ---- reasoning


@STEPS
@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (
            "I think\n\nso.\n</think>\n\n  Yes.\n\nBye\n",
            {"thinking": True},
            [Reasoning("I think\n\nso."), Content("  Yes.\n\nBye\n")],
        ),
        ("<think>\nso\n</think>\n\nYes.", {}, [Reasoning("so"), Content("Yes.")]),
        ("Use <think> and </think> as marks.", {"reasons": False}, [Content("Use <think> and </think> as marks.")]),
        ("<think> opens it.", {"reasons": False}, [Content("<think> opens it.")]),
        ("Write `</think>` last.", {"reasons": False}, [Content("Write `</think>` last.")]),
        ("</think>\n\nYes.", {"reasons": False}, [Content("Yes.")]),
        ("Thoughts\n</think>\n\nYes.", {"reasons": False}, [Content("Thoughts\n\n\nYes.")]),
        ("so\n</think>\n\nYes.</think> Really.", {"thinking": True}, [Reasoning("so"), Content("Yes. Really.")]),
        (
            "so\n</think>\n\nThe <think> mark and </think>.",
            {"thinking": True},
            [Reasoning("so"), Content("The <think> mark and </think>.")],
        ),
        (
            "I call <tool_call> now.\n</think>\n\nDone.",
            {"thinking": True},
            [Reasoning("I call <tool_call> now."), Content("Done.")],
        ),
        (
            f"I call\n{CALL[:60]}\n</think>\n\nDone.",
            {"thinking": True},
            [Reasoning(f"I call\n{CALL[:60]}"), Content("Done.")],
        ),
        (f"I call\n{CALL}\n</think>\n\nDone.", {"thinking": True}, [Reasoning("I call"), *ROME, Content("Done.")]),
        (f"{CALL}\n<think>\nnow\n</think>\n\nDone.", {}, [*ROME, Reasoning("now"), Content("Done.")]),
    ],
)
def test_marks_of_reasoning(text: str, options: Any, expected: list[Part], step: int) -> None:
    """Reasoning opens at the start or after a call, and never where it is off. Its marks are no content."""
    assert parse(text, step, **options) == expected


# ---- calls as models write them


@STEPS
@pytest.mark.parametrize(
    "content",
    [
        'return "</parameter>"',
        "before <parameter=edits>\nx\n</parameter> after",
        "<parameter=edits>x</parameter>",
        "<parameter=content>\nx\n</parameter>",
        CALL,
        f"An example:\n{written('deep')}\nIts end.",
        "</tool_call> </function>\n\n<parameter=x>",
        "<parameter=NAME> opens one",
        "",
        "</function> closes it",
        "a\n\n",
        "<think>\n</think>",
    ],
)
def test_a_string_may_hold_marks(content: str, step: int) -> None:
    """A closing mark ends a value only where structure follows, and pairs inside are counted."""
    expected = call("write_file", {"path": "a.txt", "content": content})
    assert parse(f"So:\n{written(content)}\n", step) == [Content("So:"), *expected]
    assert parse(f"{written(content)}\n{CALL}", step) == [*expected, *ROME]


@STEPS
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        CALL.replace("\n</parameter>\n</function>", "\n</function>"),
        CALL.removeprefix("<tool_call>\n"),
        CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"),
        CALL.replace("</function>\n", ""),
        CALL.replace("Rome\n</parameter>", "Rome"),
        CALL.replace("=weather", ' name="weather"').replace("=city", ' name="city"'),
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
        '<tool_call>{"function": {"name": "weather", "parameters": {"city": "Rome", "days": 2}}}',
        "<tool_call>\n\n" + CALL.removeprefix("<tool_call>\n"),
        f"<tool_call>\n{CALL}",
        f"{CALL}\n</tool_call>",
        CALL.replace("</function>", "</parameter>"),
        CALL.replace("<parameter=days>", "<parameter=>\n<parameter=days>"),
    ],
)
def test_a_call_is_read_as_models_write_it(text: str, step: int) -> None:
    """With marks left out, in the other form, or with names as attributes. Nothing else is sent before."""
    assert parse(f"Now.\n\n{text}", step) == [Content("Now."), *ROME]
    assert parse(f"Now.\n{text}\n</think>\n\nBye.", step, thinking=True)[1:4] == ROME


@STEPS
@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> for calls.",
        "<tool_call>\nno function\n</tool_call>",
        "<tool_call>\n<function=reboot>\n</function>\n</tool_call>",
        "<function=reboot>\n</function>",
        "Call <function=weather>\n<parameter=city>\nRome\n</parameter>\n</function> like this.",
        f"```xml\n{CALL}\n```\nThat is a call.",
        "<function=weather> is a function.",
        '<tool_call>\n{"name": "reboot", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=weather>\n<param",
        "<tool_call>\n[1]\n</tool_call> Sorry.",
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call> Sorry.',
        '<tool_call>\n{"name": "weather", "arguments": {"a" 1}}\n</tool_call> Sorry.',
        '<tool_call>\n{"name": "weather", "arguments": tru}\n</tool_call>',
        "<tool_call>\n\n</tool_call> Sorry.",
    ],
)
def test_other_text_with_marks_stays_text(text: str, step: int) -> None:
    """Prose, blocks of code, functions that no one declared, and what is no call. The client gets no call of it."""
    assert parse(text, step) == [Content(text)]


@STEPS
@pytest.mark.parametrize(
    "first",
    [
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}}\n</tool_call>\n',
    ],
)
def test_a_call_without_its_end_leaves_the_next_one(first: str, step: int) -> None:
    assert parse(first + CALL, step) == [*call("weather", {"city": "Rome"}), *ROME]


@STEPS
@pytest.mark.parametrize("code", ["```ls -la```", "```bash\nls"])
def test_a_call_after_code_is_one(code: str, step: int) -> None:
    """Only one that the block of code ends behind is an example."""
    assert parse(f"{code}\n\n{CALL}", step) == [Content(code), *ROME]


@STEPS
def test_line_breaks_of_windows_and_a_second_value(step: int) -> None:
    assert parse(CALL.replace("\n", "\r\n"), step) == ROME
    again = "<parameter=city>\nOslo\n</parameter>\n</function>"
    assert parse(CALL.replace("</function>", again), step) == ROME


def test_a_call_without_arguments() -> None:
    assert parse("<tool_call>\n<function=weather>\n</tool_call>") == call("weather", {})


@STEPS
@pytest.mark.parametrize("end", ["", '"na', '"name": "weather",', '"name": "weather", "arguments": {"a": 1'])
def test_a_cut_call_of_the_json_form_is_no_text(end: str, step: int) -> None:
    assert parse(f"<tool_call>\n{{{end}", step, cut=True) == []


@STEPS
def test_a_call_that_ends_with_the_answer_becomes_text(step: int) -> None:
    """After the parts of it that were sent, and without loss."""
    broken = CALL[: CALL.index("me\n")]
    parts = parse(f"So:\n{broken}", step)
    content = [part for part in parts if isinstance(part, Content)]
    assert join_parts(content) == [Content(f"So:\n{broken}")]
    assert parts[1:-1][0] == CallStart("weather")
    assert parts[-2] == CallEnd(complete=False)


@STEPS
def test_a_call_that_a_limit_cut_off_is_incomplete_and_no_text(step: int) -> None:
    """The parts end with an incomplete call. A cut after the last value leaves a complete call."""
    for end in range(len("<tool_call>\n<function=weather>"), CALL.index("</function>")):
        parts = parse(CALL[:end], step, cut=True)
        assert parts[0] == CallStart("weather")
        assert parts[-1] == CallEnd(complete=False)
        assert not any(isinstance(part, Content) for part in parts)
    whole = CALL[: CALL.index("</function>") + len("</function>")]
    assert parse(whole, step, cut=True) == ROME


def test_the_arguments_of_a_call_stream_while_they_arrive() -> None:
    """A long string of the XML form is sent piece by piece, before the call is complete."""
    text = "word " * 40
    reader = AnswerReader(MARKS, tools=TOOLS)
    found = f"<tool_call>\n<function=weather>\n<parameter=city>\n{text}"
    parts = [part for piece in found for part in reader.add_text(piece)]
    assert parts[0] == CallStart("weather")
    sent = "".join(part.json for part in parts if isinstance(part, CallArguments))
    assert sent == '{"city": "' + text
    assert len(parts) > len(text)


@STEPS
def test_values_of_the_xml_form(step: int) -> None:
    """Each value has the type of its schema, in JSON's or Python's notation. One that fits none is a string."""
    values = {
        "note": ("null", None),
        "days": ("3.0", 3),
        "edits": ("[{'old': 'a\"b', 'all': True}]", [{"old": 'a"b', "all": True}]),
        "share": ("1e-3", 0.001),
        "sure": ("True", True),
        "any": ('{"a": [1]}', {"a": [1]}),
        "either": ('"7"', '"7"'),
        "count": ("7", 7),
        "unknown": ("5", "5"),
    }
    for days in ("3.0", "three"):
        values["days"] = (days, 3 if days == "3.0" else days)
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, (v, _) in values.items())
        text = f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>"
        expected = {name: value for name, (_, value) in values.items()}
        assert parse(text, step) == call("weather", expected)


@STEPS
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "weather", "arguments": {"a": "} </tool_call>", "b": [1, {}]}}', None),
        ('{"arguments": {"a": 1}, "name": "weather"}', {"a": 1}),
        ('{"id": 17, "name": "weather", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "weather"}', "{}"),
        ('{"name": "weather", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
    ],
)
def test_calls_of_the_json_form(step: int, body: str, expected: Any) -> None:
    """Any order, arguments in a string, and raw line breaks are accepted."""
    text = f"Now:\n\n<tool_call>\n{body}\n</tool_call>\n"
    expected = json.loads(body)["arguments"] if expected is None else expected
    assert parse(text, step) == [Content("Now:"), *call("weather", expected)]


# ---- any text


JSON_CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
SPACED_CALL = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "</function>", "</parameter>", "<function=weather>"),
    *("<function=reboot>", "<function=weather", "<function", "<parameter=city>", "<parameter=x>", "<parameter"),
    *(
        "<function=write_file>",
        "<parameter=path>",
        "<parameter=days>",
        "(1, 2)",
        '{"name": "weather", "arguments": {}}',
    ),
    *('<function name="weather">', "<parameter=content>", "`<parameter=path>` ", "\n", "\n\n", " ", "\t", "\r\n", "\r"),
    *("```", "~~~", "```bash\nls\n", "2", "null", "<", "a ", "é", "{", '{"name": "weather"', '"', "}", "[", "]"),
    *(
        "weather",
        "(1, 2)",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "city",
        JSON_CALL,
        CALL,
        f"\n{CALL}\n",
    ),
    *(f"<tool_call>\n{JSON_CALL}\n</tool_call>", f"<tool_call>{JSON_CALL}{JSON_CALL}</tool_call>", SPACED_CALL),
    *(written("x"), CALL.removesuffix("</tool_call>"), CALL.removeprefix("<tool_call>\n"), CALL[:40], CALL[:70]),
    CALL.replace("</parameter>\n", "", 1),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.integers(0, 99).map("w{}".format), max_size=14).map("".join)
OPTIONS = st.sampled_from([{}, {"thinking": True}, {"reasons": False}])
EVERY_MARKS = st.sampled_from([MARKS, replace(MARKS, pairs=True), replace(MARKS, call_end="")])
CUTS = st.lists(st.integers(1, 30), min_size=1, max_size=9)


@pytest.mark.parametrize("examples", [500, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_any_pieces_give_the_parts_of_the_whole(examples: int) -> None:
    """The reading of calls of all forms, also broken ones, depends on the text alone. A limit changes only its end."""

    @settings(max_examples=examples, deadline=None)
    @given(text=TEXTS, cuts=CUTS, options=OPTIONS, marks=EVERY_MARKS, cut=st.booleans())
    def explore(text: str, cuts: list[int], options: Any, marks: Marks, cut: bool) -> None:
        places = list(takewhile(len(text).__gt__, accumulate(cycle(cuts))))
        whole = parse(text, marks=marks, cut=cut, **options)
        assert parse(text, 1, marks=marks, cut=cut, **options) == whole
        assert parse_pieces(text, places, marks=marks, cut=cut, **options) == whole

    explore()


BEHIND = "</think></parameter></function>"
REAL = '<tool_call>{"name": "weather"}'


@pytest.mark.parametrize(
    ("broken", "real"),
    [
        ("<function=weather\n<parameter=c\n<function=", REAL),
        ("<function=weather\n<parameter=c>", f"{REAL}<parameter="),
        ("<function=weather>\n<parameter=city>\nRome\n", ""),
        ("<function=weather>\n<parameter=city>\n" * 3, REAL),
    ],
)
@STEPS
def test_content_completes_no_call_of_the_reasoning(broken: str, real: str, step: int) -> None:
    """A call that is open at the end of the reasoning stays text, and a real one behind it is read, in any pieces."""
    text = broken + real + BEHIND
    parts = parse(text, step, thinking=True)
    assert parts[0] == Reasoning(broken.rstrip("\n"))
    assert parts[1:4] == (call("weather", {}) if real else parts[1:4])
    assert Content(BEHIND.removeprefix("</think>")) in parts
    assert [part for part in parts if isinstance(part, CallStart)] == [CallStart("weather")] * bool(real)


@given(text=TEXTS, options=OPTIONS)
def test_no_word_is_lost_or_doubled(text: str, options: Any) -> None:
    """Each word that is no mark stands once in the reasoning, the content or the arguments of whole calls."""
    numbered, parts = "", []
    for number, word in enumerate(text.replace("w", "W").split("W")):
        numbered += word if not number else f"W{number:03}W{word}"
    parts = parse(numbered.replace("Weather", "weather"), **options)
    if CallEnd(complete=False) in parts:
        return  # its arguments are sent, and then its text
    shown = "".join(getattr(part, "text", getattr(part, "json", "")) for part in parts)
    for number in range(1, numbered.count("W") // 2 + 1):
        word = f"W{number:03}W"
        if word in numbered:
            assert shown.count(word) <= 1, word


def test_long_answers_take_linear_time() -> None:
    """Also one value with many tags in it, token by token."""
    content = "<parameter=x>\nline\n</parameter>\n</function>\n" * 3000
    began = time.perf_counter()
    parts = parse(written(content), 4)
    assert isinstance(parts[0], CallStart | Content)
    for begin in ("", "```\n"):  # calls that never end
        parse(begin + "<function=weather>\n<parameter=city>\n" * 3000, thinking=not begin)
    assert time.perf_counter() - began < 20
