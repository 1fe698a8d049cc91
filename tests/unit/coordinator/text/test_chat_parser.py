"""ChatParser: reasoning, content and tool calls in both call formats, whatever pieces the text arrives in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.calls import CallArguments, CallEnd, CallStart, JsonCallParser, XmlCallParser
from coordinator.text.chat_parser import ChatParser, Content, Part, Reasoning, join_parts
from coordinator.text.tokenizer import Tokenizer
from tests.support.api.api_client import tiny_tokenizer
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer

END = "</tool_call>"
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
    },
    "$defs": {"edits": {"type": "array", "items": {"type": "object"}}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
STEPS = pytest.mark.parametrize("step", [1, 3, 7, 1000])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer whose template has Hermes' call format."""
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
        "{% for tool_call in m.tool_calls or [] %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}"
        "{% endfor %}"
    )
    folder = tmp_path_factory.mktemp("hermes")
    found = Tokenizer.load(write_tokenizer(folder, template=template))
    assert found.call_form == "json"
    return found


def parse(
    tokenizer: Tokenizer, text: str, step: int, *, cut: bool = False, **options: Any
) -> list[Part]:
    """Return the parts of `text`, added `step` characters at a time, with adjacent ones joined."""
    parser = ChatParser(tokenizer, **options)
    parts: list[Part] = []
    for start in range(0, len(text), step):
        parts += parser.add_text(text[start : start + step])
    return join_parts([*parts, *parser.finish(cut=cut)])


def call(name: str, arguments: Any) -> list[Part]:
    """Return the parts of a complete call."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [CallStart(name), CallArguments(text), CallEnd(complete=True)]


# ---- reasoning


@STEPS
def test_reasoning_opened_by_the_template_ends_at_its_marker(
    tokenizer: Tokenizer, step: int
) -> None:
    """The line breaks around the marker belong to neither part; those inside stay."""
    parts = parse(tokenizer, "I think\n\nso.\n</think>\n\n  Yes.\n\nBye\n", step, thinking=True)
    assert parts == [Reasoning("I think\n\nso."), Content("  Yes.\n\nBye\n")]


# ---- tool calls


@STEPS
def test_tool_calls_are_parsed_with_the_types_of_their_schema(
    tokenizer: Tokenizer, step: int
) -> None:
    """Two calls follow the content, and no blank content appears between or after them."""
    text = f"Let me see.\n\n{CALL}\n{CALL}\n"
    parts = parse(tokenizer, text, step, thinking=False, tools=[WEATHER])
    expected = call("weather", {"city": "Rome", "days": 2})
    assert parts == [Content("Let me see."), *expected, *expected]


@STEPS
@pytest.mark.parametrize(
    ("broken", "sent"),
    [
        ("<tool_call>\nno function\n</tool_call>", []),
        (
            CALL.replace("2", "two"),
            [
                CallStart("weather"),
                CallArguments('{"city": "Rome", "days": '),
                CallEnd(complete=False),
            ],
        ),
        (
            "<tool_call>\n<function=weather>\n<param",
            [CallStart("weather"), CallArguments("{"), CallEnd(complete=False)],
        ),
    ],
)
def test_a_broken_tool_call_is_text(
    tokenizer: Tokenizer, step: int, broken: str, sent: list[Part]
) -> None:
    """A call that cannot be parsed ends as incomplete and becomes content, with its markers and without loss."""
    parts = parse(tokenizer, f"So:\n{broken}", step, thinking=False, tools=[WEATHER])
    content = [part for part in parts if isinstance(part, Content)]
    assert join_parts(content) == [Content(f"So:\n{broken}")]
    assert [part for part in parts if not isinstance(part, Content)] == sent


@STEPS
def test_a_call_that_a_limit_cut_off_is_incomplete_and_no_text(
    tokenizer: Tokenizer, step: int
) -> None:
    """The parts end with an incomplete call. A cut after the last value leaves a complete call."""
    options: Any = {"thinking": False, "tools": [WEATHER], "cut": True}
    for end in range(len("<tool_call>\n<function=weather>"), CALL.index("</function>")):
        parts = parse(tokenizer, CALL[:end], step, **options)
        assert parts[0] == CallStart("weather")
        assert parts[-1] == CallEnd(complete=False)
        assert not any(isinstance(part, Content) for part in parts)
    whole = CALL[: CALL.index("</function>") + len("</function>")]
    expected = call("weather", {"city": "Rome", "days": 2})
    assert parse(tokenizer, whole, step, **options) == expected


def test_the_arguments_of_a_call_stream_while_they_arrive(tokenizer: Tokenizer) -> None:
    """A long string of the XML form is sent piece by piece, before the call is complete."""
    text = "word " * 40
    parser = ChatParser(tokenizer, thinking=False, tools=[WEATHER])
    found = f"<tool_call>\n<function=weather>\n<parameter=city>\n{text}"
    parts = [part for piece in found for part in parser.add_text(piece)]
    assert parts[0] == CallStart("weather")
    sent = "".join(part.json for part in parts if isinstance(part, CallArguments))
    assert sent == '{"city": "' + text
    assert len(parts) > len(text)


def test_values_of_the_xml_form(tokenizer: Tokenizer) -> None:
    """Each value has the type of its schema, in JSON's or Python's notation; markers in a string are text."""
    values = {
        "city": (
            "</tool_call> </function>\n\n<parameter=x>",
            "</tool_call> </function>\n\n<parameter=x>",
        ),
        "note": ("null", None),
        "days": ("3.0", 3),
        "edits": ("[{'old': 'a\"b', 'all': True}]", [{"old": 'a"b', "all": True}]),
        "share": ("1e-3", 0.001),
        "sure": ("True", True),
        "any": ('{"a": [1]}', {"a": [1]}),
        "either": ('"7"', '"7"'),
        "unknown": ("5", "5"),
    }
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, (v, _) in values.items())
    text = f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>"
    expected = {name: value for name, (_, value) in values.items()}
    for step in (1, 4, 1000):
        parts = parse(tokenizer, text, step, thinking=False, tools=[WEATHER])
        assert parts == call("weather", expected)


@STEPS
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "f", "arguments": {"a": "} </tool_call>", "b": [1, {}]}}', None),
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"id": 17, "name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
    ],
)
def test_calls_of_the_json_form(hermes: Tokenizer, step: int, body: str, expected: Any) -> None:
    """Any order, arguments in a string, and raw line breaks are accepted."""
    text = f"Now:\n\n<tool_call>\n{body}\n</tool_call>\n"
    tools = [WEATHER, {"type": "function", "function": {"name": "f"}}]
    parts = parse(hermes, text, step, thinking=False, tools=tools)
    expected = json.loads(body)["arguments"] if expected is None else expected
    assert parts == [Content("Now:"), *call("f", expected)]


@STEPS
@pytest.mark.parametrize(
    "body",
    [
        "[1]",
        '{"name": 5, "arguments": {}}',
        '{"name": "f", "arguments": {"a": \'x\'}}',
        '{"name": "f", "arguments": {"a" 1}}',
        '{"name": "f", "arguments": {"a": 1]}',
        '{"name": "f", "arguments": tru}',
        '{"name" "f"}',
        "",
    ],
)
def test_broken_calls_of_the_json_form_are_text(hermes: Tokenizer, step: int, body: str) -> None:
    """Text that is not JSON becomes content with its markers, and the text after it stays content."""
    text = f"<tool_call>\n{body}\n</tool_call> Sorry."
    parts = parse(hermes, text, step, thinking=False, tools=[WEATHER])
    assert not any(part == CallEnd(complete=True) for part in parts)
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text


@STEPS
@pytest.mark.parametrize(
    "body", ["<function=reboot>\n</function>", '{"name": "reboot", "arguments": {}}']
)
def test_a_call_of_an_undeclared_function_is_text(
    tokenizer: Tokenizer, hermes: Tokenizer, step: int, body: str
) -> None:
    """The client gets no call that it cannot answer."""
    text = f"So: <tool_call>\n{body}\n</tool_call> Done."
    found = hermes if body.startswith("{") else tokenizer
    parts = parse(found, text, step, thinking=False, tools=[WEATHER])
    assert join_parts(parts) == [Content(text)]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(
    lambda text: text.replace("</parameter>", "")
)


@given(
    arguments=st.dictionaries(st.sampled_from(["city", "unknown"]), TEXTS, max_size=2),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    style=st.sampled_from(["xml", "json"]),
)
def test_any_strings_survive_any_pieces(
    arguments: dict[str, str], cuts: list[int], style: str
) -> None:
    """The concatenated arguments are JSON, and equal those of the whole text."""
    if style == "xml":
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        text = f"\n<function=weather>\n{body}</function>\n{END} rest"
    else:
        text = "\n" + json.dumps({"name": "weather", "arguments": arguments}) + f"\n{END} rest"
    parser = XmlCallParser([WEATHER], END) if style == "xml" else JsonCallParser([WEATHER], END)
    sent, place, number = "", 0, 0
    while place < len(text) and not parser.done:
        step = cuts[number % len(cuts)]
        parts = parser.add_text(text[place : place + step])
        sent += "".join(part.json for part in parts if isinstance(part, CallArguments))
        place, number = place + step, number + 1
    assert parser.done
    assert not parser.broken
    assert json.loads(sent) == arguments
    assert parser.rest + text[place:] == " rest"
