"""OpenAI's own Python client against the API over a real socket, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from coordinator.api.context import ApiOptions
from proto.errors import CapacityError, WorkerLostError
from tests.support.api.api_client import CALL, ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator

pytestmark = pytest.mark.smoke

KEY = "secret-key"
USER: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"properties": {"city": {"type": "string"}}},
    },
}


class Served:
    """The generator behind the server, and a client in front of it."""

    def __init__(self, generator: FakeGenerator, url: str) -> None:
        self.generator = generator
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture
def served() -> Iterator[Served]:
    generator = FakeGenerator(tiny_tokenizer(), "hm\n</think>\n\nHello 🎉 there")
    api = ApiClient(generator, options=ApiOptions(api_keys=(KEY,)))
    with serving(api.app) as url:
        case = Served(generator, url)
        with case.client:
            yield case


def test_the_clients_own_stream_helper_gathers_tool_calls(served: Served) -> None:
    """The client assembles the whole call from deltas. Sent back with null fields, it is rendered in the prompt."""
    served.generator.text = f"</think>Let me see.\n\n{CALL}"
    with served.client.chat.completions.stream(model="tiny", messages=USER, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert call.function.arguments == '{"city": "Rome"}'
    messages = [*USER, choice.message.model_dump(), _result(call.id)]
    served.generator.text = "</think>Sunny"
    after = served.client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
    assert after.choices[0].message.content == "Sunny"
    assert CALL in served.generator.prompt_text()
    assert "Tell the weather." in served.generator.prompt_text()


def _result(call_id: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": "Sunny"}


def test_errors_are_the_clients_own_exceptions(served: Served) -> None:
    """Each exception has the code and field that the client shows."""
    create = served.client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model="tiny", messages=USER, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4", messages=USER)
    assert missing.value.code == "model_not_found"
    served.generator.refuse = CapacityError("full", retry_after=7)
    with pytest.raises(openai.RateLimitError) as full:
        create(model="tiny", messages=USER)
    assert full.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.AuthenticationError):
        served.client.with_options(api_key="wrong").models.list()


def test_an_error_during_a_stream_is_raised_by_the_client(served: Served) -> None:
    """The client raises the error after the text so far, and does not treat the stream as complete."""
    served.generator.failure, served.generator.fail_after = WorkerLostError("worker lost"), 8
    stream = served.client.chat.completions.create(model="tiny", messages=USER, stream=True)
    deltas = [next(stream).choices[0].delta for _ in range(3)]
    assert deltas[1].model_extra == {"reasoning_content": "h"}
    assert deltas[2].model_extra == {"reasoning_content": "m"}
    with pytest.raises(openai.APIError, match="worker lost"):
        list(stream)
