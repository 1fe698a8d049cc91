"""Anthropic's own Python client with the API over a real socket, streaming and not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from coordinator.api.context import ApiOptions
from proto.errors import CapacityError, WorkerLostError
from tests.support.api.api_client import CALL, ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator

pytestmark = pytest.mark.smoke

KEY = "secret-key"
HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}


class Served:
    """The generator behind the server, and a client of the server."""

    def __init__(self, generator: FakeGenerator, url: str) -> None:
        self.generator = generator
        self.client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60)

    def ask(self, **fields: Any) -> anthropic.types.Message:
        """Send a request with one short message."""
        asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 100, **fields}
        reply: anthropic.types.Message = self.client.messages.create(**asked)
        return reply


@pytest.fixture
def served() -> Iterator[Served]:
    """Serve a fake generator, with a key and a context of 4,000 tokens."""
    generator = FakeGenerator(tiny_tokenizer(), "Hello 🎉 there", cached=2)
    options = ApiOptions(api_keys=(KEY,), keep_alive_seconds=0.05)
    api = ApiClient(generator, options=options, context_length=4000, aliases=("alias",))
    with serving(api.app) as url:
        case = Served(generator, url)
        with case.client:
            yield case


def test_a_whole_message(served: Served) -> None:
    """The client reads text, stop reason and usage; without `thinking` the template's switch is off."""
    reply = served.ask(extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9})
    (block,) = reply.content
    assert block.type == "text"
    assert block.text == "Hello 🎉 there"
    assert reply.stop_reason == "end_turn"
    (request,) = served.generator.requests
    assert reply.usage.input_tokens == len(request.prompt) - 2
    assert reply.usage.cache_read_input_tokens == 2
    assert reply.usage.output_tokens == len(tiny_tokenizer().encode("Hello 🎉 there"))
    assert (request.params.temperature, request.params.top_k) == (0.5, 7)
    assert served.generator.prompt_text().endswith("</think>\n\n")


def test_a_streamed_message_with_thinking(served: Served) -> None:
    """The client assembles thinking and text blocks, and the usage, from the events."""
    served.generator.text = "hm\n</think>\n\nHello there"
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 100, "thinking": thinking}
    with served.client.messages.stream(**asked) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_message()
    assert types[0] == "message_start"
    assert types[-1] == "message_stop"
    assert types.count("content_block_start") == types.count("content_block_stop") == 2
    thought, text = final.content
    assert thought.type == "thinking"
    assert thought.thinking == "hm"
    assert text.type == "text"
    assert text.text == "Hello there"
    assert final.usage.cache_read_input_tokens == 2
    assert final.usage.output_tokens == len(tiny_tokenizer().encode(served.generator.text))
    whole = served.ask(thinking=thinking)
    assert [b.model_dump() for b in whole.content] == [
        b.model_dump(include=set(w.model_dump()))
        for b, w in zip(final.content, whole.content, strict=True)
    ]


def test_a_tool_loop(served: Served) -> None:
    """A streamed call reaches the client; the call and its result reach the prompt of the next request."""
    served.generator.text = f"Let me see.\n\n{CALL}\n{CALL}"
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 200, "tools": [TOOL]}
    with served.client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    text, first, second = final.content
    assert text.type == "text"
    assert text.text == "Let me see."
    assert first.type == second.type == "tool_use"
    assert (first.name, first.input) == ("weather", {"city": "Rome"})
    assert first.id != second.id
    served.generator.text = "Sunny"
    results: Any = [
        {
            "type": "tool_result",
            "tool_use_id": first.id,
            "content": [{"type": "text", "text": "18"}],
        },
        {"type": "tool_result", "tool_use_id": second.id, "content": "no data", "is_error": True},
        {"type": "text", "text": "So?", **CACHED},
    ]
    history = [*HI, {"role": "assistant", "content": final.content}]
    served.ask(messages=[*history, {"role": "user", "content": results}], tools=[TOOL])
    prompt = served.generator.prompt_text()
    assert prompt.index("Let me see.") < prompt.index(CALL) < prompt.index("18")
    assert prompt.index("18") < prompt.index("Error: no data") < prompt.index("So?")


def test_one_call_at_a_time_and_none(served: Served) -> None:
    """`disable_parallel_tool_use` ends the message after one call; tool_choice none hides the tools."""
    served.generator.text = f"{CALL}\n{CALL}"
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(served.ask(tools=[TOOL], tool_choice=one).content) == 1
    (block,) = served.ask(tools=[TOOL], tool_choice={"type": "none"}).content
    assert block.type == "text"
    assert "Tell the weather." not in served.generator.prompt_text()


def test_the_request_of_a_coding_agent(served: Served) -> None:
    """Cached system blocks, system messages anywhere, 30 tools, adaptive thinking and beta fields are accepted."""
    tools: Any = [{**TOOL, "name": f"tool_{i}", **(CACHED if i == 29 else {})} for i in range(30)]
    system: Any = [{"type": "text", "text": f"Rule {i}.", **CACHED} for i in range(3)]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", **CACHED}]},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go"},
    ]
    reply = served.client.beta.messages.create(
        model="tiny",
        max_tokens=50,
        system=system,
        tools=tools,
        messages=messages,
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        betas=["context-management-2025-06-27"],
        extra_body={"output_config": {"effort": "medium"}},
    )
    assert reply.type == "message"
    prompt = served.generator.prompt_text()
    assert prompt.index("Rule 0.") < prompt.index("Rule 2.") < prompt.index("Be brief.")
    assert "tool_29" in prompt
    assert "<system>\nBe brief.\n</system>" in prompt
    assert prompt.endswith("<think>\n")


def test_stop_sequences_and_limits(served: Served) -> None:
    """The message says which sequence or limit ended it."""
    served.generator.text = "one two three four"
    stopped = served.ask(stop_sequences=["never", " three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert served.ask(max_tokens=2).stop_reason == "max_tokens"


def test_tokens_are_counted_as_they_are_used(served: Served) -> None:
    """count_tokens returns the size of the prompt that the same request has."""
    asked: Any = {"model": "tiny", "messages": HI, "tools": [TOOL], "system": "Be kind."}
    count = served.client.messages.count_tokens(**asked)
    assert served.generator.requests == []
    served.client.messages.create(**asked, max_tokens=5)
    assert count.input_tokens == len(served.generator.requests[0].prompt)


def test_models(served: Served) -> None:
    """The client lists the models and retrieves one. Other clients get OpenAI's list."""
    page = served.client.models.list()
    assert [model.id for model in page] == ["tiny", "alias"]
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "alias")
    one = served.client.models.retrieve("tiny")
    assert (one.type, one.id, one.display_name) == ("model", "tiny", "tiny")
    assert (one.created_at.timestamp(), one.max_input_tokens) == (7, 4000)
    with pytest.raises(anthropic.NotFoundError):
        served.client.models.retrieve("unknown")
    plain = httpx.get(
        str(served.client.base_url).rstrip("/") + "/v1/models", headers={"x-api-key": KEY}
    )
    assert plain.json()["object"] == "list"


def test_errors_are_the_clients_own_exceptions(served: Served) -> None:
    """Errors before and during a stream have Anthropic's format and a message that names the field."""
    for fields, name in (
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"extra_body": {"bad_words": ["a"]}}, "bad_words"),
        ({"messages": [*HI, {"role": "assistant", "content": "So"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\].content",
        ),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, r"tools\[0\]"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=name) as refused:
            served.ask(**fields)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        served.ask(model="claude-x")
    with pytest.raises(anthropic.AuthenticationError):
        served.client.with_options(api_key="wrong").messages.create(
            model="tiny", max_tokens=1, messages=HI
        )
    served.generator.refuse = CapacityError("full", retry_after=7)
    with pytest.raises(anthropic.RateLimitError):
        served.ask()
    served.generator.refuse = None
    served.generator.failure, served.generator.fail_after = WorkerLostError("worker lost"), 2
    with pytest.raises(anthropic.APIStatusError, match="worker lost"):
        list(served.client.messages.create(model="tiny", max_tokens=50, messages=HI, stream=True))


def test_agents_recognize_the_words_for_a_conversation_that_is_too_long(served: Served) -> None:
    """The messages are those of Anthropic's API, after which agents compact or lower their limit."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        served.ask(max_tokens=5000)
    words = r"input length and `max_tokens` exceed context limit: \d+ \+ 5000 > 4000"
    assert re.search(words, refused.value.message)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4000"):
        served.ask(messages=[{"role": "user", "content": "word " * 5000}])


def test_a_pause_has_pings(served: Served) -> None:
    """While nothing else is sent, the stream has ping events, as Anthropic's does."""
    served.generator.hang_after = 1
    body = {"model": "tiny", "messages": HI, "max_tokens": 50, "stream": True}
    url, headers = served.client.base_url.join("/v1/messages"), {"x-api-key": KEY}
    with httpx.stream("POST", str(url), json=body, headers=headers, timeout=60) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line == "event: ping")
