"""Tokenizer: exact bytes, chat prompts, end tokens and errors; ChatParser over its markers."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.chat_parser import ChatParser, Content, Part, Reasoning, ToolCall, join_parts
from coordinator.text.model_info import generation_defaults
from coordinator.text.tokenizer import Tokenizer
from proto.errors import CheckpointError, RequestError
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


# ---- tokens and bytes


@given(text=st.text(max_size=40))
def test_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Byte-level: the tokens' bytes, joined, are the text's UTF-8, spaces at the front included."""
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_control_tokens_have_bytes_but_no_text_and_markers_have_both(tokenizer: Tokenizer) -> None:
    """Control tokens add no text to an answer; the markers that parsers need do."""
    (end,) = tokenizer.encode("<|im_end|>")
    (think,) = tokenizer.encode("<think>")
    assert tokenizer.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.text_bytes(end) == b""
    assert tokenizer.control_id("<|im_end|>") == end
    assert tokenizer.text_bytes(think) == b"<think>"
    assert tokenizer.control_id("<think>") is None
    assert tokenizer.text_bytes(tokenizer.vocab_size + 5) == b""


def test_markers_have_text_also_where_a_checkpoint_calls_them_special(tmp_path: Path) -> None:
    """The parsers need the markers to find reasoning and calls."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, special_markers=True))
    for marker in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        (token,) = tokenizer.encode(marker)
        assert tokenizer.text_bytes(token) == marker.encode()


def test_loading_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading from a checkpoint's folder opens no connection."""

    def refuse(*args: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert Tokenizer.load(write_tokenizer(tmp_path)).vocab_size > 256


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    """A missing, damaged or unsupported tokenizer raises CheckpointError, whose public text has no path."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    content["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="ByteLevel") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) not in caught.value.public
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="does not load") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) not in caught.value.public


# ---- defaults of the checkpoint


def test_end_tokens_of_the_checkpoint_join_the_tokenizers_own(tmp_path: Path) -> None:
    """The tokenizer's end token stays an end token beside those of the checkpoint."""
    folder = write_tokenizer(tmp_path)
    own = Tokenizer.load(folder).eos_ids
    assert own
    assert Tokenizer.load(folder, (3, 4)).eos_ids == own | {3, 4}


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    """Its values are the defaults; without the file the temperature is 1; `do_sample` false means greedy."""
    path = tmp_path / "generation_config.json"
    assert generation_defaults(tmp_path).temperature == 1.0
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}')
    params = generation_defaults(tmp_path)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    path.write_text('{"do_sample": false, "temperature": 0.6}')
    assert generation_defaults(tmp_path).greedy
    path.write_text('{"top_p": 3}')
    with pytest.raises(CheckpointError, match="top_p"):
        generation_defaults(tmp_path)


# ---- chat prompts


def test_the_template_opens_the_reasoning_unless_told_not_to(tokenizer: Tokenizer) -> None:
    """`thinking` is True if the answer begins inside a think block, which `enable_thinking` decides."""
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat_prompt(messages).thinking
    off = tokenizer.chat_prompt(messages, template_kwargs={"enable_thinking": False})
    assert not off.thinking


def test_what_the_next_turn_begins_with(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """`turn` covers the chat without the opening of its answer; `continued` is True if a history keeps the opening."""
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.chat_prompt(messages)
    assert prompt.tokens[: prompt.turn] == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert not prompt.continued
    plain = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    other = Tokenizer.load(write_tokenizer(tmp_path, template=plain))
    prompt = other.chat_prompt(messages)
    assert other.encode("[user] hi\n")[: prompt.turn] == prompt.tokens[: prompt.turn]
    assert prompt.continued
    none = Tokenizer.load(write_tokenizer(tmp_path, template="{{ messages[0].content }}"))
    assert none.chat_prompt(messages).turn == 0


def test_a_message_about_markers_does_not_open_reasoning(tmp_path: Path) -> None:
    """Only the text that the template adds for the answer opens reasoning, not the text of a message."""
    plain = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, template=plain))
    assert not tokenizer.chat_prompt([{"role": "user", "content": "say <think>"}]).thinking


def test_what_the_template_refuses_or_ignores_is_an_error_that_names_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """RequestError covers the template's own error, unknown and reserved variables, unused tools, and no template."""
    user = {"role": "user", "content": "hi"}
    with pytest.raises(RequestError, match="a system message comes first"):
        tokenizer.chat_prompt([user, {"role": "system", "content": "late"}])
    for name in ("enable_thoughts", "messages"):
        with pytest.raises(RequestError, match=rf"chat_template_kwargs\.{name}"):
            tokenizer.chat_prompt([user], template_kwargs={name: True})
    bare = Tokenizer.load(write_tokenizer(tmp_path, template="{{ messages[0].content }}"))
    with pytest.raises(RequestError, match="tools"):
        bare.chat_prompt([user], [WEATHER])
    none = Tokenizer.load(write_tokenizer(tmp_path, template=None))
    with pytest.raises(RequestError, match="has no chat template"):
        none.chat_prompt([user])


# ---- reasoning and tool calls in answers


def parse(tokenizer: Tokenizer, text: str, step: int, **options: Any) -> list[Part]:
    """Parts of `text` fed `step` characters at a time, neighbours of one kind joined."""
    parser = ChatParser(tokenizer, **options)
    parts: list[Part] = []
    for start in range(0, len(text), step):
        parts += parser.add(text[start : start + step])
    return join_parts([*parts, *parser.finish()])


STEPS = pytest.mark.parametrize("step", [1, 3, 7, 1000])


@STEPS
def test_reasoning_opened_by_the_template_ends_at_its_marker(
    tokenizer: Tokenizer, step: int
) -> None:
    """The line breaks around the marker belong to neither part; those inside stay."""
    parts = parse(tokenizer, "I think\n\nso.\n</think>\n\n  Yes.\n\nBye\n", step, thinking=True)
    assert parts == [Reasoning("I think\n\nso."), Content("  Yes.\n\nBye\n")]


@STEPS
def test_reasoning_the_model_opens_itself(tokenizer: Tokenizer, step: int) -> None:
    """A think block that the answer opens is reasoning too."""
    parts = parse(tokenizer, "<think>\nhm\n</think>\n\nYes", step, thinking=False)
    assert parts == [Reasoning("hm"), Content("Yes")]


@STEPS
def test_an_answer_that_ends_while_reasoning(tokenizer: Tokenizer, step: int) -> None:
    """The whole text is reasoning, including the start of an unfinished marker."""
    assert parse(tokenizer, "hm </thi", step, thinking=True) == [Reasoning("hm </thi")]


@STEPS
def test_tool_calls_are_parsed_with_the_types_of_their_schema(
    tokenizer: Tokenizer, step: int
) -> None:
    """Two calls have different ids, and no blank content appears between or after them."""
    text = f"Let me see.\n\n{CALL}\n{CALL}\n"
    said, first, second = parse(tokenizer, text, step, thinking=False, tools=[WEATHER])
    assert said == Content("Let me see.")
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.name == "weather"
    assert json.loads(first.arguments) == {"city": "Rome", "days": 2}
    assert first.id != second.id


@STEPS
@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\nno function\n</tool_call>",
        CALL.replace("2", "two"),
        "<tool_call>\n<function=weather>\n<param",
    ],
)
def test_a_broken_tool_call_is_text(tokenizer: Tokenizer, step: int, broken: str) -> None:
    """A call that cannot be parsed becomes content, with its markers and without loss."""
    parts = parse(tokenizer, f"So:\n{broken}", step, thinking=False, tools=[WEATHER])
    assert parts == [Content(f"So:\n{broken}")]


@STEPS
def test_without_tools_markup_of_calls_is_text(tokenizer: Tokenizer, step: int) -> None:
    """Without tools in the request the markup of a call streams as content."""
    assert parse(tokenizer, f"{CALL} done", step, thinking=False) == [Content(f"{CALL} done")]


def test_a_call_made_while_reasoning(tokenizer: Tokenizer) -> None:
    """A model that calls a tool without closing its think block still calls it."""
    parts = parse(tokenizer, f"I need it.\n{CALL}", 5, thinking=True, tools=[WEATHER])
    assert parts[0] == Reasoning("I need it.")
    assert isinstance(parts[1], ToolCall)
