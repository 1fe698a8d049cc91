"""The state of `mtp-coord chat`: messages of several lines, parameters, retries."""

from __future__ import annotations

import pytest

from coordinator.cli.chat_session import ChatSession, MessageReader
from proto.errors import UsageError


def read(*lines: str) -> list[str]:
    """Return the messages that `lines` make."""
    reader = MessageReader()
    return [text for line in lines if (text := reader.add_line(line)) is not None]


def test_messages_may_have_several_lines() -> None:
    """A backslash continues a line, and three quotes enclose a block."""
    assert read("one", "two \\", "three", "four") == ["one", "two \nthree", "four"]
    assert read('"""', "def f():", "    pass\\", "", '"""', "after") == [
        "def f():\n    pass\\",
        "after",
    ]


def test_an_incomplete_message_is_announced() -> None:
    """The prompt of the terminal depends on it."""
    reader = MessageReader()
    assert not reader.continues
    reader.add_line("a \\")
    assert reader.continues
    reader.add_line("b")
    assert not reader.continues


def test_parameters_reach_the_request() -> None:
    """A parameter without a value returns to the server's default."""
    session = ChatSession()
    session.set_parameter("seed", "7")
    session.set_parameter("temperature", "0.5")
    session.set_parameter("system", "Be short.")
    session.set_parameter("think", "off")
    session.add_message("Hi")
    body = session.body()
    assert body["seed"] == session.last_seed == 7
    assert body["temperature"] == 0.5
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
    ]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert session.parameters() == "seed 7, temperature 0.5, reasoning off, system: Be short."
    session.set_parameter("temperature", "")
    session.set_parameter("seed", "")
    assert "temperature" not in session.body()
    assert session.body()["seed"] != session.body()["seed"]


@pytest.mark.parametrize(("name", "value"), [("seed", "x"), ("top_p", "high"), ("think", "maybe")])
def test_a_wrong_value_is_refused_by_name(name: str, value: str) -> None:
    """The error names the command, and nothing changes."""
    session = ChatSession()
    with pytest.raises(UsageError, match=f"/{name}"):
        session.set_parameter(name, value)
    assert session.parameters() == "the server's defaults"


def test_a_stopped_or_retried_answer_leaves_the_conversation_whole() -> None:
    """Turns of user and assistant always alternate."""
    session = ChatSession()
    session.add_message("one")
    session.add_answer("1")
    session.add_message("two")
    session.add_answer("", complete=False)
    assert [message["content"] for message in session.messages] == ["one", "1"]
    session.drop_answer()
    assert [message["content"] for message in session.messages] == ["one"]
    with pytest.raises(UsageError, match="retry"):
        session.drop_answer()
