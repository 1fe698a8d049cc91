"""Ollama's own Python client with the API over a real socket, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from proto.errors import CapacityError, WorkerLostError
from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator

pytestmark = pytest.mark.smoke

HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


class Served:
    """The generator behind the server, and a client of the server."""

    def __init__(self, generator: FakeGenerator, url: str) -> None:
        self.generator = generator
        self.url = url
        self.client = ollama.Client(host=url, timeout=60)

    def prompt(self) -> str:
        """Return the text of the last prompt."""
        tokens = self.generator.requests[-1].prompt
        return b"".join(map(tiny_tokenizer().token_bytes, tokens)).decode()


@pytest.fixture
def served() -> Iterator[Served]:
    """Serve a fake generator that thinks and then answers."""
    generator = FakeGenerator(tiny_tokenizer(), "hm\n</think>\n\nHello 🎉 there")
    with serving(ApiClient(generator, aliases=("qwen:9b",)).app) as url:
        case = Served(generator, url)
        with case.client:
            yield case


def test_a_chat_whole_and_streamed(served: Served) -> None:
    """The client reads content, thinking, counts and durations; a stream has a line per token and adds up to them."""
    options = {
        "temperature": 0.5,
        "num_predict": 50,
        "seed": 3,
        "repeat_penalty": 1.1,
        "num_ctx": 9,
    }
    asked: Any = {"model": "tiny", "messages": HI, "options": options, "keep_alive": 0}
    whole = served.client.chat(**asked)
    assert whole.message.content == "Hello 🎉 there"
    assert whole.message.thinking == "hm"
    assert (whole.done, whole.done_reason) == (True, "stop")
    tokens = len(tiny_tokenizer().encode(served.generator.text))
    assert whole.eval_count == tokens
    assert whole.prompt_eval_count == len(served.generator.requests[0].prompt)
    assert whole.total_duration is not None
    assert whole.total_duration >= (whole.eval_duration or 0) > 0
    params = served.generator.requests[0].params
    assert (params.temperature, params.seed, params.repetition_penalty) == (0.5, 3, 1.1)
    parts = list(served.client.chat(**asked, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert [part.done for part in parts[:-1]] == [False] * (len(parts) - 1)
    assert parts[-1].eval_count == tokens


def test_thinking_is_switched(served: Served) -> None:
    """`think` drives the template's switch."""
    for think, end in ((False, "</think>\n\n"), (True, "<think>\n"), ("low", "<think>\n")):
        served.client.chat("tiny", HI, think=think)
        assert served.prompt().endswith(end)


def test_a_tool_loop(served: Served) -> None:
    """A call reaches the client with arguments as an object, and its result reaches the next prompt."""
    served.generator.text = f"</think>{CALL}"
    parts = list(served.client.chat("tiny", HI, tools=[TOOL], stream=True))
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    whole = served.client.chat("tiny", HI, tools=[TOOL])
    served.generator.text = "</think>Sunny"
    result = {"role": "tool", "tool_name": "weather", "content": "18 degrees"}
    after = served.client.chat("tiny", [*HI, whole.message, result], tools=[TOOL])
    assert after.message.content == "Sunny"
    assert served.prompt().index(CALL) < served.prompt().index("18 degrees")


def test_a_prompt_and_raw_text(served: Served) -> None:
    """generate renders the template around the prompt, or with `raw` continues the text itself."""
    whole = served.client.generate("tiny", "Hi", system="Be kind.")
    assert whole.response == "Hello 🎉 there"
    assert "Be kind." in served.prompt()
    served.generator.text = " there"
    parts = list(served.client.generate("tiny", "Hi", raw=True, stream=True))
    assert "".join(part.response or "" for part in parts) == " there"
    assert served.prompt() == "Hi"
    limited = served.client.generate("tiny", "Hi", raw=True, options={"num_predict": 1})
    assert limited.done_reason == "length"
    assert served.client.generate("tiny").done_reason == "load"


def test_models(served: Served) -> None:
    """The model and its aliases are listed with a tag, loaded, described and answered by either name."""
    assert [model.model for model in served.client.list().models] == ["tiny:latest", "qwen:9b"]
    assert served.client.ps().models[0].context_length == 500
    shown = served.client.show("tiny:latest")
    assert set(shown.capabilities or ()) == {"completion", "tools", "thinking"}
    assert (shown.modelinfo or {})["qwen3_5_moe.context_length"] == 500
    for details in (shown.details, served.client.list().models[0].details):
        assert details is not None
        assert (details.family, details.quantization_level) == ("qwen3_5_moe", "4-bit")
    assert served.client.chat("qwen:9b", HI).message.content
    assert httpx.get(f"{served.url}/api/version").json()["version"].count(".") == 2
    assert httpx.head(served.url).status_code == 200


def test_errors_are_the_clients_own_exceptions(served: Served) -> None:
    """Refusals have Ollama's format and name the field; an error during a stream is its last line."""
    for fields, name in (
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"num_predict": 5000}}, "options.num_predict"),
        ({"messages": [{"role": "user", "content": "x", "images": [b"x"]}]}, "reads text only"),
    ):
        with pytest.raises(ollama.ResponseError, match=name) as refused:
            served.client.chat(**{"model": "tiny", "messages": HI, **fields})
        assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="not served here") as missing:
        served.client.chat("llama3", HI)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="path not found") as missing:
        served.client.embed("tiny", "Hi")
    assert missing.value.status_code == 404
    served.generator.refuse = CapacityError("full")
    with pytest.raises(ollama.ResponseError, match="full"):
        served.client.chat("tiny", HI)
    served.generator.refuse = None
    served.generator.failure, served.generator.fail_after = WorkerLostError("worker lost"), 2
    with pytest.raises(ollama.ResponseError, match="worker lost"):
        list(served.client.chat("tiny", HI, stream=True))
