"""OpenAI's own Python client against the API over a real socket, streaming and not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from coordinator.api.context import ApiOptions
from proto.errors import CapacityError, WorkerLostError
from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator

pytestmark = pytest.mark.smoke

KEY = "secret-key"
USER: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


class Served:
    """The generator behind the server, and a client in front of it."""

    def __init__(self, generator: FakeGenerator, url: str) -> None:
        self.generator = generator
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture
def served() -> Iterator[Served]:
    generator = FakeGenerator(tiny_tokenizer(), "hm\n</think>\n\nHello 🎉 there", cached=2)
    api = ApiClient(generator, options=ApiOptions(api_keys=(KEY,), keep_alive_seconds=0.05))
    with serving(api.app) as url:
        case = Served(generator, url)
        with case.client:
            yield case


def test_a_whole_chat(served: Served) -> None:
    """The client reads message, reasoning, finish_reason, and usage with cache and draft counts."""
    answer = served.client.chat.completions.create(model="tiny", messages=USER, seed=3)
    message = answer.choices[0].message
    assert message.content == "Hello 🎉 there"
    assert message.model_extra == {"reasoning_content": "hm"}
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 6
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 3
    assert answer.id == answer._request_id
    assert served.generator.requests[0].params.seed == 3


def test_a_streamed_chat_with_usage(served: Served) -> None:
    """Deltas add up to the whole; the last chunk has the usage."""
    stream = served.client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Hello 🎉 there"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tiny_tokenizer().encode(served.generator.text))


def test_the_clients_own_stream_helper_gathers_tool_calls(served: Served) -> None:
    """The client assembles the whole call from deltas and sends it back."""
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


def _result(call_id: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": "Sunny"}


def test_logprobs_and_several_choices(served: Served) -> None:
    """The client's own types parse choices and log-probabilities."""
    answer = served.client.chat.completions.create(
        model="tiny", messages=USER, n=2, logprobs=True, top_logprobs=2, max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2, 2]


def test_text_completions_whole_and_streamed(served: Served) -> None:
    """The client uses the older endpoint, with vLLM's fields in extra_body."""
    served.generator.text = " Paris. STOP and more"
    whole = served.client.completions.create(
        model="tiny", prompt="The capital", stop=" STOP", logprobs=1, extra_body={"top_k": 5}
    )
    assert whole.choices[0].text == " Paris."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is not None
    stream = served.client.completions.create(
        model="tiny", prompt="The capital", stop=" STOP", stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == " Paris."
    assert served.generator.requests[0].params.top_k == 5


def test_models(served: Served) -> None:
    """The model is listed and retrieved, and another is not found."""
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("org/other")


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


def test_a_client_that_closes_its_stream_cancels_the_request(served: Served) -> None:
    """The engine's request is cancelled, over a real socket."""
    served.generator.hang_after = 4
    stream = served.client.completions.create(model="tiny", prompt="Hi", stream=True)
    next(iter(stream))
    stream.close()
    assert _eventually(lambda: len(served.generator.cancelled) == 1)


def test_a_client_that_gives_up_waiting_cancels_the_request(served: Served) -> None:
    """The engine's request is cancelled also without streaming, where the server sends nothing that could fail."""
    served.generator.hang_after = 1
    while not served.generator.requests:  # a busy server may not have read the cancelled request
        with pytest.raises(openai.APITimeoutError):
            served.client.with_options(timeout=0.3).completions.create(model="tiny", prompt="Hi")
    assert _eventually(
        lambda: len(served.generator.cancelled) == len(served.generator.requests) > 0
    )


def test_signs_of_life_reach_the_wire_during_a_pause(served: Served) -> None:
    """The server sends each comment at once: prefill progress in order, and keep-alives while it pauses."""
    served.generator.hang_after = 0
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "Hi", "stream": True}
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        # A slow machine may pause between the two as well.
        seen = list(itertools.islice(lines, 2))
        while seen[-2:] != [": keep-alive"] * 2 or ": prefill 2/2" not in seen:
            seen.append(next(lines))
    assert [line for line in seen if line != ": keep-alive"] == [": prefill 1/2", ": prefill 2/2"]


def _eventually(holds: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False
