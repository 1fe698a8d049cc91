"""The Python clients of OpenAI, Anthropic and Ollama with the API over a real socket, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from coordinator.web.context import ApiOptions
from proto.errors import CapacityError, WorkerLostError
from tests.support.api.api_client import CALL, ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator

pytestmark = pytest.mark.smoke

KEY = "secret-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
HI: Any = [{"role": "user", "content": "Hi"}]
SAID = "Hello 🎉 there"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: Any = {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
CLAUDES_TOOL: Any = {"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA}
RESPONSES_TOOL: Any = {"type": "function", "strict": False, **FUNCTION}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}


@dataclass
class Served:
    """The generator behind the server at `url`, and a client of each maker."""

    generator: FakeGenerator
    url: str
    gpt: openai.OpenAI
    claude: anthropic.Anthropic
    llama: ollama.Client

    def message(self, **fields: Any) -> anthropic.types.Message:
        """Send Anthropic's request with one short message."""
        asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 100, **fields}
        reply: anthropic.types.Message = self.claude.messages.create(**asked)
        return reply

    def respond(self, **fields: Any) -> Any:
        """Send a request of the Responses API with a short input."""
        return self.gpt.responses.create(**{"model": "tiny", "input": "Hi", **fields})

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the generator's text."""
        return len(tiny_tokenizer().encode(self.generator.text))


@pytest.fixture
def served() -> Iterator[Served]:
    """Serve a fake generator that thinks and then answers, with a key and a context of 4,000 tokens."""
    generator = FakeGenerator(tiny_tokenizer(), f"hm\n</think>\n\n{SAID}", cached=2)
    options = ApiOptions(api_keys=(KEY,), keep_alive_seconds=0.05)
    api = ApiClient(generator, options=options, context_length=4000, aliases=("qwen:9b",))
    common: Any = {"api_key": KEY, "max_retries": 0, "timeout": 60}
    with (
        serving(api.app) as url,
        openai.OpenAI(base_url=f"{url}/v1", **common) as first,
        anthropic.Anthropic(base_url=url, **common) as second,
        ollama.Client(host=url, timeout=60, headers=BEARER) as third,
    ):
        yield Served(generator, url, first, second, third)


def test_clients_with_short_timeouts_wait_for_a_slow_prefill(served: Served) -> None:
    """A prefill of .9 s, with progress all the time, outlives timeouts of .5 s, and watchdogs see events."""
    served.generator.prefill_steps, served.generator.prefill_pause = 60, 0.015
    with ollama.Client(host=served.url, timeout=0.5, headers=BEARER) as llama:
        parts = list(llama.chat("tiny", HI, stream=True))
    assert "".join(part.message.content or "" for part in parts) == SAID
    assert sum(not part.message.content and not part.message.thinking for part in parts) > 5
    claude, gpt = served.claude.with_options(timeout=0.5), served.gpt.with_options(timeout=0.5)
    with claude.messages.stream(model="tiny", max_tokens=50, messages=HI) as message:
        assert [event.type for event in message][-1] == "message_stop"
    for store in (False, True):
        with gpt.responses.stream(model="tiny", input="Hi", store=store) as response:
            types = [event.type for event in response]
            assert response.get_final_response().output_text == SAID
        assert types.count("response.in_progress") > 5
        assert types[-1] == "response.completed"
    chunks = list(gpt.chat.completions.create(model="tiny", messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID


# ---- OpenAI's chat completions


def test_the_clients_own_stream_helper_gathers_tool_calls(served: Served) -> None:
    """The client assembles the whole call from deltas. Sent back with null fields, it is rendered in the prompt."""
    served.generator.text = f"</think>Let me see.\n\n{CALL}"
    chat = served.gpt.chat.completions
    with chat.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    messages = [*HI, choice.message.model_dump(), result]
    served.generator.text = "</think>Sunny"
    after = chat.create(model="tiny", messages=messages, tools=[TOOL])
    assert after.choices[0].message.content == "Sunny"
    assert CALL in served.generator.prompt_text()
    assert "Tell the weather." in served.generator.prompt_text()


def test_errors_of_a_chat(served: Served) -> None:
    """Each exception has the code and field that the client shows. One during a stream is raised after the text."""
    create = served.gpt.chat.completions.create
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model="tiny", messages=HI, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found"
    served.generator.refuse = CapacityError("full", retry_after=7)
    with pytest.raises(openai.RateLimitError) as full:
        create(model="tiny", messages=HI)
    assert full.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.AuthenticationError):
        served.gpt.with_options(api_key="wrong").models.list()
    served.generator.refuse = None
    served.generator.failure, served.generator.fail_after = WorkerLostError("worker lost"), 8
    stream = create(model="tiny", messages=HI, stream=True)
    deltas = [next(stream).choices[0].delta for _ in range(3)]
    assert deltas[1].model_extra == {"reasoning_content": "h"}
    assert deltas[2].model_extra == {"reasoning_content": "m"}
    with pytest.raises(openai.APIError, match="worker lost"):
        list(stream)


# ---- OpenAI's Responses


def test_a_response_whole_and_streamed(served: Served) -> None:
    """Events are numbered, each item is opened and closed, and the end has the whole response and its usage."""
    events = list(served.respond(stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    for kind in ("output_item", "content_part"):
        assert types.count(f"response.{kind}.added") == types.count(f"response.{kind}.done") == 2
    for kind, text in (("output_text", SAID), ("reasoning_text", "hm")):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(deltas) == text
        assert len(deltas) > 1
    whole = served.respond(instructions="Be kind.", temperature=0.5, max_output_tokens=50)
    for reply in (whole, events[-1].response):
        assert (reply.output_text, reply.status) == (SAID, "completed")
        assert [item.type for item in reply.output] == ["reasoning", "message"]
        assert reply.output[0].content[0].text == "hm"
        assert reply.usage.output_tokens == served.tokens
        assert reply.usage.input_tokens_details.cached_tokens == 2
    request = served.generator.requests[-1]
    assert (request.params.temperature, request.max_tokens) == (0.5, 50)
    assert "Be kind." in served.generator.prompt_text()


def test_a_tool_loop_with_items_and_with_a_stored_response(served: Served) -> None:
    """A streamed call and its output reach the next prompt, sent back as items or by the previous response's id."""
    served.generator.text = f"I think.\n</think>\n\nLet me see.\n\n{CALL}"
    with served.gpt.responses.stream(model="tiny", input="Hi", tools=[RESPONSES_TOOL]) as stream:
        list(stream)
        first = stream.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    items: list[Any] = list(first.output)
    references: Any = [{"type": "item_reference", "id": item.id} for item in items]
    served.generator.text = "</think>Sunny"
    for fields in (
        {"input": [*HI, *items, output]},
        {"input": [*HI, *references, output]},
        {"input": [output], "previous_response_id": first.id},
    ):
        after = served.respond(tools=[RESPONSES_TOOL], **fields)
        assert after.output_text == "Sunny"
    prompts = [served.generator.prompt_text(index) for index in (1, 2, 3)]
    assert prompts == [prompts[0]] * 3
    assert prompts[0].index("Let me see.") < prompts[0].index(CALL) < prompts[0].index("18 degrees")
    again = served.respond(input="And now?", previous_response_id=after.id)
    assert again.previous_response_id == after.id
    prompt = served.generator.prompt_text()
    assert prompt.index("18 degrees") < prompt.index("Sunny")


def test_errors_and_limits_of_responses(served: Served) -> None:
    """Refusals name the field. A limit and a failure during a stream are its last event."""
    for fields, param in (
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"extra_body": {"bad_words": ["a"]}}, "bad_words"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "image"}]}]}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            served.respond(**fields)
        assert (refused.value.param or "").startswith(param), refused.value
    reply = served.respond(max_output_tokens=5)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    last = list(served.respond(max_output_tokens=5, stream=True))[-1]
    assert last.type == "response.incomplete"
    served.generator.failure, served.generator.fail_after = WorkerLostError("worker lost"), 2
    last = list(served.respond(stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error.message == "worker lost"


# ---- Anthropic's messages


def test_a_message_with_thinking_whole_and_streamed(served: Served) -> None:
    """The client assembles thinking and text blocks, and the usage, from the events."""
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 100, "thinking": thinking}
    with served.claude.messages.stream(**asked) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_message()
    assert (types[0], types[-1]) == ("message_start", "message_stop")
    assert types.count("content_block_start") == types.count("content_block_stop") == 2
    whole = served.message(thinking=thinking, extra_body={"temperature": 0.5, "top_k": 7})
    request = served.generator.requests[-1]
    for reply in (final, whole):
        thought, text = (block.to_dict() for block in reply.content)
        assert (thought["type"], thought["thinking"]) == ("thinking", "hm")
        assert (text["type"], text["text"]) == ("text", SAID)
        assert reply.stop_reason == "end_turn"
        assert reply.usage.input_tokens == len(request.prompt) - 2
        assert reply.usage.cache_read_input_tokens == 2
        assert reply.usage.output_tokens == served.tokens
    assert (request.params.temperature, request.params.top_k) == (0.5, 7)


def test_a_tool_loop_of_messages(served: Served) -> None:
    """A streamed call reaches the client; the call and its result reach the prompt of the next request."""
    served.generator.text = f"Let me see.\n\n{CALL}\n{CALL}"
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 200, "tools": [CLAUDES_TOOL]}
    with served.claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    text, first, second = final.content
    assert text.type == "text" and text.text == "Let me see."
    assert first.type == second.type == "tool_use"
    assert (first.name, first.input) == ("weather", {"city": "Rome"})
    assert first.id != second.id
    served.generator.text = "Sunny"
    content = [{"type": "text", "text": "18"}]
    results: Any = [
        {"type": "tool_result", "tool_use_id": first.id, "content": content},
        {"type": "tool_result", "tool_use_id": second.id, "content": "no data", "is_error": True},
        {"type": "text", "text": "So?", **CACHED},
    ]
    history = [*HI, {"role": "assistant", "content": final.content}]
    served.message(messages=[*history, {"role": "user", "content": results}], tools=[CLAUDES_TOOL])
    prompt = served.generator.prompt_text()
    assert prompt.index("Let me see.") < prompt.index(CALL) < prompt.index("18")
    assert prompt.index("18") < prompt.index("Error: no data") < prompt.index("So?")


def test_one_call_at_a_time_and_none(served: Served) -> None:
    """`disable_parallel_tool_use` ends the message after one call; tool_choice none hides the tools."""
    served.generator.text = f"{CALL}\n{CALL}"
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(served.message(tools=[CLAUDES_TOOL], tool_choice=one).content) == 1
    (block,) = served.message(tools=[CLAUDES_TOOL], tool_choice={"type": "none"}).content
    assert block.type == "text"
    assert "Tell the weather." not in served.generator.prompt_text()
    assert served.generator.prompt_text().endswith("</think>\n\n")


def test_limits_and_pauses_of_messages(served: Served) -> None:
    """The message says which sequence or limit ended it. While nothing else is sent, the stream has ping events."""
    served.generator.text = "one two three four"
    stopped = served.message(stop_sequences=["never", " three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert served.message(max_tokens=2).stop_reason == "max_tokens"
    served.generator.hang_after = 1
    body = {"model": "tiny", "messages": HI, "max_tokens": 50, "stream": True}
    url, headers = f"{served.url}/v1/messages", {"x-api-key": KEY}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        assert next(line for line in response.iter_lines() if line == "event: ping")


def test_models_of_anthropics_client(served: Served) -> None:
    """The client lists the models and retrieves one. Other clients get OpenAI's list."""
    page = served.claude.models.list()
    assert [model.id for model in page] == ["tiny", "qwen:9b"]
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "qwen:9b")
    one = served.claude.models.retrieve("tiny")
    assert (one.type, one.id, one.display_name) == ("model", "tiny", "tiny")
    assert (one.created_at.timestamp(), one.max_input_tokens) == (7, 4000)
    with pytest.raises(anthropic.NotFoundError):
        served.claude.models.retrieve("unknown")
    plain = httpx.get(f"{served.url}/v1/models", headers={"x-api-key": KEY})
    assert plain.json()["object"] == "list"


def test_errors_of_messages(served: Served) -> None:
    """Errors have Anthropic's format and name the field. Agents recognize the words for a long conversation."""
    long = "word " * 5000
    beyond = r"input length and `max_tokens` exceed context limit: \d+ \+ 5000 > 4000"
    for fields, words in (
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"max_tokens": 5000}, beyond),
        ({"messages": [{"role": "user", "content": long}]}, r"prompt is too long: \d+ tokens > 4000"),
        ({"extra_body": {"bad_words": ["a"]}}, "bad_words"),
        ({"messages": [*HI, {"role": "assistant", "content": "So"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, r"messages\[0\].content"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, r"tools\[0\]"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=words) as refused:
            served.message(**fields)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        served.message(model="claude-x")
    create = served.claude.with_options(api_key="wrong").messages.create
    with pytest.raises(anthropic.AuthenticationError):
        create(model="tiny", max_tokens=1, messages=HI)
    served.generator.refuse = CapacityError("full", retry_after=7)
    with pytest.raises(anthropic.RateLimitError):
        served.message()
    served.generator.refuse = None
    served.generator.failure, served.generator.fail_after = WorkerLostError("worker lost"), 2
    with pytest.raises(anthropic.APIStatusError, match="worker lost"):
        list(served.message(stream=True))


# ---- Ollama's


def test_an_ollama_chat_whole_and_streamed(served: Served) -> None:
    """The client reads content, thinking, counts and durations; a stream has a line per token and adds up to them."""
    options = {"temperature": 0.5, "num_predict": 50, "seed": 3, "repeat_penalty": 1.1}
    asked: Any = {"model": "tiny", "messages": HI, "options": options, "keep_alive": 0}
    whole = served.llama.chat(**asked)
    assert (whole.message.content, whole.message.thinking) == (SAID, "hm")
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.eval_count == served.tokens
    assert whole.prompt_eval_count == len(served.generator.requests[0].prompt)
    assert whole.total_duration is not None
    assert whole.total_duration >= (whole.eval_duration or 0) > 0
    params = served.generator.requests[0].params
    assert (params.temperature, params.seed, params.repetition_penalty) == (0.5, 3, 1.1)
    parts = list(served.llama.chat(**asked, stream=True))
    assert "".join(part.message.content or "" for part in parts) == SAID
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert [part.done for part in parts[:-1]] == [False] * (len(parts) - 1)
    assert parts[-1].eval_count == served.tokens
    for think, end in ((False, "</think>\n\n"), (True, "<think>\n"), ("low", "<think>\n")):
        served.llama.chat("tiny", HI, think=think)
        assert served.generator.prompt_text().endswith(end)


def test_an_ollama_tool_loop(served: Served) -> None:
    """A call reaches the client with arguments as an object, and its result reaches the next prompt."""
    served.generator.text = f"</think>{CALL}"
    parts = list(served.llama.chat("tiny", HI, tools=[TOOL], stream=True))
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    whole = served.llama.chat("tiny", HI, tools=[TOOL])
    served.generator.text = "</think>Sunny"
    result = {"role": "tool", "tool_name": "weather", "content": "18 degrees"}
    after = served.llama.chat("tiny", [*HI, whole.message, result], tools=[TOOL])
    assert after.message.content == "Sunny"
    prompt = served.generator.prompt_text()
    assert prompt.index(CALL) < prompt.index("18 degrees")


def test_a_prompt_and_raw_text(served: Served) -> None:
    """generate renders the template around the prompt, or with `raw` continues the text itself."""
    whole = served.llama.generate("tiny", "Hi", system="Be kind.")
    assert whole.response == SAID
    assert "Be kind." in served.generator.prompt_text()
    served.generator.text = " there"
    parts = list(served.llama.generate("tiny", "Hi", raw=True, stream=True))
    assert "".join(part.response or "" for part in parts) == " there"
    assert served.generator.prompt_text() == "Hi"
    limited = served.llama.generate("tiny", "Hi", raw=True, options={"num_predict": 1})
    assert limited.done_reason == "length"
    assert served.llama.generate("tiny").done_reason == "load"


def test_models_of_ollamas_client(served: Served) -> None:
    """The model and its aliases are listed with a tag, loaded, described and answered by either name."""
    client = served.llama
    assert [model.model for model in client.list().models] == ["tiny:latest", "qwen:9b"]
    assert client.ps().models[0].context_length == 4000
    shown = client.show("tiny:latest")
    assert set(shown.capabilities or ()) == {"completion", "tools", "thinking"}
    assert (shown.modelinfo or {})["qwen3_5_moe.context_length"] == 4000
    for details in (shown.details, client.list().models[0].details):
        assert details is not None
        assert (details.family, details.quantization_level) == ("qwen3_5_moe", "4-bit")
    assert client.chat("qwen:9b", HI).message.content
    version = httpx.get(f"{served.url}/api/version", headers=BEARER).json()["version"]
    assert version.count(".") == 2
    assert httpx.head(served.url).status_code == 200


def test_errors_of_ollamas_client(served: Served) -> None:
    """Refusals have Ollama's format and name the field; an error during a stream is its last line."""
    for fields, words, status in (
        ({"options": {"temperature": -1}}, "temperature", 400),
        ({"options": {"mirostat": 2}}, "options.mirostat", 400),
        ({"options": {"num_predict": 5000}}, "options.num_predict", 400),
        ({"messages": [{**HI[0], "images": [b"x"]}]}, "reads text only", 400),
        ({"model": "llama3"}, "not served here", 404),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as refused:
            served.llama.chat(**{"model": "tiny", "messages": HI, **fields})
        assert refused.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="path not found") as missing:
        served.llama.embed("tiny", "Hi")
    assert missing.value.status_code == 404
    served.generator.refuse = CapacityError("full")
    with pytest.raises(ollama.ResponseError, match="full"):
        served.llama.chat("tiny", HI)
    served.generator.refuse = None
    served.generator.failure, served.generator.fail_after = WorkerLostError("worker lost"), 2
    with pytest.raises(ollama.ResponseError, match="worker lost"):
        list(served.llama.chat("tiny", HI, stream=True))
