"""Calls, reasoning and channels of other families, written as their models write them, and read token by token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from coordinator.text.answer_reader import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reasoning,
    join_parts,
)
from coordinator.text.forced_forms import JsonForm, channel_format, json_form_grammar
from coordinator.text.grammars import OutputFormat, call_grammar
from coordinator.text.harmony import reader_of
from coordinator.text.tokenizer import TextStream, Tokenizer, pack_vocabulary
from mtp.sampling.grammar import tokenizer_of
from proto.errors import RequestError
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
BAR = "\uff5c"
CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)

CALLED: Any = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
PARIS, TWO_DAYS = '{"city": "Paris"}', '{"city": "Paris", "days": 2}'
FORMS: list[Any] = [
    # the mark in the template, control tokens, the text, its arguments
    (
        "<|tool_calls_section_begin|>",
        KIMI,
        "{0}{2}functions.get_weather:0{3}" + PARIS + "{4}{2}functions.get_weather:1{3}" + TWO_DAYS + "{4}{1}",
        [PARIS, TWO_DAYS],
    ),
    ("[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]"), "{0}get_weather{1}" + TWO_DAYS, [TWO_DAYS]),
    ("[TOOL_CALLS]", ("[TOOL_CALLS]",), '{0}[{{"name": "get_weather", "arguments": ' + PARIS + "}}]", [PARIS]),
    (
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        "{0}get_weather{1}a1b2c3d4e{2}" + PARIS + "{0}get_weather{1}b1b2c3d4e{2}" + TWO_DAYS,
        [PARIS, TWO_DAYS],
    ),
    (
        "<minimax:tool_call>",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        '{0}\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n{1}',
        [TWO_DAYS],
    ),
    (
        "<start_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        "{0}call:get_weather{{city:{2}Paris{2},days:2}}{1}",
        [TWO_DAYS],
    ),
    (
        "<longcat_tool_call>",
        (),
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Paris</longcat_arg_value>\n</longcat_tool_call>",
        [PARIS],
    ),
    (
        "<|tool_call_start|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        '{0}[get_weather(city="Paris", days=2)]{1}',
        [TWO_DAYS],
    ),
    (
        '<function name=" <param name="',
        (),
        '<function name="get_weather"><param name="city">Paris</param></function>',
        [PARIS],
    ),
    ("<TOOLCALL>", (), '<TOOLCALL>[{{"name": "get_weather", "arguments": ' + PARIS + "}}]</TOOLCALL>", [PARIS]),
    (
        f"{BAR}DSML{BAR}",
        (f"{BAR}DSML{BAR}",),
        '<{0}function_calls>\n<{0}invoke name="get_weather">\n'
        '<{0}parameter name="city" string="true">Paris</{0}parameter>\n'
        '<{0}parameter name="days" string="false">2</{0}parameter>\n</{0}invoke>\n</{0}function_calls>',
        [TWO_DAYS],
    ),
    (
        'Respond in the format {"name": function name',
        (),
        '{{"name": "get_weather", "parameters": ' + TWO_DAYS + "}}",
        [TWO_DAYS],
    ),
]


def tokenizer_for(folder: Path, mark: str, control: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer whose template names `mark` and reads tools."""
    template = (
        "{# " + mark + " #}{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools }}{% endif %}"
    )
    return Tokenizer.load(write_tokenizer(folder, template=template, control=control, markers=()))


def read(tokenizer: Tokenizer, text: str, *, cut: bool = False, thinking: bool = False) -> list[Part]:
    """Return the parts of an answer, fed by tokens."""
    reader = reader_of(tokenizer.marks, thinking=thinking, tools=[TOOL])
    stream, parts = TextStream(tokenizer.text_bytes), list[Part]()
    for token in tokenizer.encode(text):
        parts += reader.add_text(stream.add_token(token).text)
    return join_parts([*parts, *reader.add_text(stream.finish().text), *reader.finish(cut=cut)])


def calls(arguments: list[str]) -> list[Part]:
    return [part for each in arguments for part in (CallStart("get_weather"), CallArguments(each), CallEnd(True))]


@pytest.mark.parametrize(("mark", "control", "form", "arguments"), FORMS)
def test_calls_are_read_as_each_family_writes_them(
    tmp_path: Path, mark: str, control: tuple[str, ...], form: str, arguments: list[str]
) -> None:
    """Alone, and behind text where the form has a mark. Undeclared names and broken calls stay text."""
    for each in (PARIS, TWO_DAYS):
        form = form.replace(each, f"{{{each}}}")
    text = form.format(*control)
    tokenizer = tokenizer_for(tmp_path, mark, control)
    found = read(tokenizer, text)
    given = [part.json for part in found if isinstance(part, CallArguments)]
    assert [json.loads(each) for each in given] == [json.loads(each) for each in arguments]
    assert found == calls(given)
    if not text.startswith("{"):
        assert read(tokenizer, f"Let me look. {text}") == [Content("Let me look. "), *found]
    else:
        assert read(tokenizer, f"Such as {text}") == [Content(f"Such as {text}")]
    unknown = text.replace("get_weather", "get_whether")
    assert read(tokenizer, unknown) == [Content(unknown)]


def test_the_template_of_deepseek_in_python_shows_its_calls(tmp_path: Path) -> None:
    """DeepSeek V3.2 has no template in Jinja. mlx-lm has one in Python, which conversions name."""
    file = write_tokenizer(tmp_path, template=None, control=(f"{BAR}DSML{BAR}",)) / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps({**config, "chat_template_type": "deepseek_v32"}))
    tokenizer = Tokenizer.load(tmp_path)
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And in Paris?"},
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [CALLED]},
    ]
    found = tokenizer.chat_prompt([*messages, {"role": "tool", "tool_call_id": "1", "content": "18"}], [TOOL])
    prompt = b"".join(map(tokenizer.token_bytes, found.tokens)).decode()
    assert found.thinking and '"days"' in prompt and "<result>18</result>" in prompt
    written = prompt[prompt.rindex(f"<{BAR}DSML{BAR}function_calls>") :].partition("<\uff5cend")[0]
    assert read(tokenizer, written) == calls([PARIS])


ANALYSIS = "<|channel|>analysis<|message|>They ask for the weather.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>It is **18** degrees."
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|>"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + PARIS
EARLY = " to=functions.get_weather<|channel|>commentary json<|message|>" + PARIS
THOUGHT, ANSWER = Reasoning("They ask for the weather."), Content("It is **18** degrees.")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (ANALYSIS + NEXT + FINAL, [THOUGHT, ANSWER]),
        (FINAL, [ANSWER]),
        (ANALYSIS + NEXT + CALL, [THOUGHT, *calls([PARIS])]),
        (ANALYSIS + NEXT + CALL + "<|call|>", [THOUGHT, *calls([PARIS])]),
        (EARLY, calls([PARIS])),
        (
            ANALYSIS + NEXT + PREAMBLE + NEXT + CALL,
            [THOUGHT, Content("I look it up."), *calls([PARIS])],
        ),
        (PREAMBLE + NEXT + FINAL, [Content("I look it up.\n\nIt is **18** degrees.")]),
        (ANALYSIS + NEXT + ANALYSIS, [Reasoning(f"{THOUGHT.text}\n\n{THOUGHT.text}")]),
        (CALL.replace("get_weather", "get_whether"), [Content(PARIS)]),
        (CALL.replace("}", ""), [Content(PARIS.replace("}", ""))]),
        ("the rest of a message", [Content("the rest of a message")]),
        ("<div>", [Content("<div>")]),
        (ANALYSIS + "<|start|>assist", [THOUGHT]),
        ("", []),
    ],
)
def test_channels_are_read_as_gpt_oss_writes_them(tmp_path: Path, text: str, parts: list[Part]) -> None:
    """Analysis is reasoning, messages to declared functions are calls, and all else is content."""
    tokenizer = tokenizer_for(tmp_path, "<|message|>", CHANNELS)
    assert read(tokenizer, text) == parts
    ends = {token for token in tokenizer.eos_ids if tokenizer.token_bytes(token) in (b"<|return|>", b"<|call|>")}
    assert len(ends) == 2


def test_a_call_that_a_limit_cuts_is_no_content(tmp_path: Path) -> None:
    """A cut call of a channel is shown as far as it goes; that of a parser is left out, since it may lack values."""
    tokenizer = tokenizer_for(tmp_path, "<|message|>", CHANNELS)
    cut = [CallStart("get_weather"), CallArguments('{"city": "Pa'), CallEnd(False)]
    assert read(tokenizer, CALL.removesuffix('ris"}'), cut=True) == cut
    (other := tmp_path / "other").mkdir()
    tokenizer = tokenizer_for(other, "<minimax:tool_call>")
    call = '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>'
    assert read(tokenizer, f"So. {call}", cut=True) == [Content("So. ")]
    assert read(tokenizer, call) == calls([PARIS])


@pytest.mark.parametrize(
    ("marks", "added"),
    [
        (("[THINK]", "[/THINK]"), True),
        (("<seed:think>", "</seed:think>"), True),
        (("<longcat_think>", "</longcat_think>"), True),
        (("<think>", "</think>"), False),
    ],
)
def test_reasoning_has_the_marks_of_the_family(tmp_path: Path, marks: tuple[str, str], added: bool) -> None:
    """Marks among the added tokens, or only in the template, as Nemotron's."""
    tokenizer = tokenizer_for(tmp_path, " ".join(marks), marks if added else ())
    start, end = marks
    assert (tokenizer.marks.think, tokenizer.marks.think_end) == marks
    assert read(tokenizer, f"{start}So.{end}Yes.") == [Reasoning("So."), Content("Yes.")]
    assert read(tokenizer, f"So.{end}Yes.", thinking=True) == [Reasoning("So."), Content("Yes.")]
    assert (tokenizer.reasoning_end_id is not None) == added


FORCED = [
    ("<|tool_calls_section_begin|>", KIMI),
    ("[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
    ("[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    ("<minimax:tool_call>", ("<minimax:tool_call>", "</minimax:tool_call>")),
    ("<|message|>", CHANNELS),
    ("<TOOLCALL>", ()),
    ('Respond in the format {"name": function name', ()),
]


def written(tokenizer: Tokenizer, grammar: str, seed: int, wanted: str = "") -> str:
    """Return a text that a grammar allows: `wanted` as far as it goes, then anything."""
    packed = tokenizer_of(pack_vocabulary(tokenizer))
    matcher = LLMatcher(packed, grammar)
    assert not matcher.is_error(), matcher.get_error()
    draw, text, planned = random.Random(seed), b"", [*tokenizer.encode(wanted)]
    for _ in range(400):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits[: packed.vocab_size])]
        if tokenizer.eos_ids & {*allowed}:
            return text.decode()
        token = planned.pop(0) if planned and planned[0] in allowed else draw.choice(allowed)
        matcher.try_consume_tokens([token])
        text += tokenizer.text_bytes(token)
    raise AssertionError(text)


@pytest.mark.parametrize(("mark", "control"), FORCED)
@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_is_read_as_a_call(tmp_path: Path, mark: str, control: tuple[str, ...], seed: int) -> None:
    """Any text that the grammar of a form allows is a call of the tool, with arguments that fit."""
    tokenizer = tokenizer_for(tmp_path, mark, control)
    form, bounded = (
        tokenizer.call_form,
        {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    )
    parameters = {"type": "object", "properties": bounded, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    if isinstance(form, JsonForm):
        grammar = json_form_grammar([tool], form, tokenizer.controls, single=True)
    else:
        assert form == "invokes"
        grammar = call_grammar([tool], form, tokenizer.tool_markers, single=True)
    wanted = "<|channel|>commentary" if tokenizer.marks.channels else ""
    found = read(tokenizer, written(tokenizer, grammar, seed, wanted))
    assert [type(part) for part in found] == [CallStart, CallArguments, CallEnd]
    assert json.loads(found[1].json)["city"] in ("Paris", "Rome")  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice"])
def test_a_format_holds_in_the_final_channel(tmp_path: Path, kind: Any) -> None:
    """With an analysis before it, which has no format."""
    contents = {"json_schema": {"enum": ["yes"]}, "regex": '"y(e|é)s"', "choice": ['"yes"', '"yés"']}
    tokenizer = tokenizer_for(tmp_path, "<|message|>", CHANNELS)
    output = channel_format(OutputFormat(kind, contents[kind], "format"), tokenizer.controls)
    grammar = str(LLMatcher.grammar_from_lark(output.content))
    text = written(
        tokenizer, grammar, 1, "<|channel|>analysis<|message|>Hm, {so}.<|end|><|start|>assistant<|channel|>final"
    )
    reasoning, content = read(tokenizer, text)
    assert reasoning == Reasoning("Hm, {so}.")
    assert isinstance(content, Content) and content.text in ('"yes"', '"yés"')
    with pytest.raises(RequestError, match="answers in channels"):
        channel_format(OutputFormat("lark", 'start: "a"', "format"), tokenizer.controls)
