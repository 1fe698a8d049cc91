"""OpenAI's own client with the Responses API over a real socket, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from proto.errors import CapacityError, WorkerLostError
from tests.support.api.api_client import CALL, ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator

pytestmark = pytest.mark.smoke

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


class Served:
    """The generator behind the server, and a client of the server."""

    def __init__(self, generator: FakeGenerator, url: str) -> None:
        self.generator = generator
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, **fields: Any) -> Any:
        """Send a request with a short input."""
        return self.client.responses.create(**{"model": "tiny", "input": "Hi", **fields})


@pytest.fixture
def served() -> Iterator[Served]:
    """Serve a fake generator that thinks and then answers."""
    generator = FakeGenerator(tiny_tokenizer(), "hm\n</think>\n\nHello 🎉 there", cached=2)
    with serving(ApiClient(generator, context_length=2000).app) as url:
        case = Served(generator, url)
        with case.client:
            yield case


def test_a_whole_response(served: Served) -> None:
    """The client reads text, reasoning and usage; the settings reach the engine."""
    reply = served.ask(instructions="Be kind.", temperature=0.5, max_output_tokens=50)
    assert reply.output_text == "Hello 🎉 there"
    assert reply.status == "completed"
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output[0].content[0].text == "hm"
    tokens = len(tiny_tokenizer().encode(served.generator.text))
    assert reply.usage.output_tokens == tokens
    assert reply.usage.input_tokens_details.cached_tokens == 2
    (request,) = served.generator.requests
    assert (request.params.temperature, request.max_tokens) == (0.5, 50)
    assert "Be kind." in served.generator.prompt_text()


def test_a_streamed_response(served: Served) -> None:
    """Events have consecutive numbers, each item is opened and closed, and the end has the whole response."""
    events = list(served.ask(stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    for kind in ("output_item", "content_part"):
        assert types.count(f"response.{kind}.added") == types.count(f"response.{kind}.done") == 2
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello 🎉 there"
    assert len(deltas) > 2
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "hm"
    whole = served.ask()
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_a_tool_loop_with_items_and_with_a_stored_response(served: Served) -> None:
    """A streamed call and its output reach the next prompt, sent back as items or by the previous response's id."""
    served.generator.text = f"I think.\n</think>\n\nLet me see.\n\n{CALL}"
    with served.client.responses.stream(model="tiny", input="Hi", tools=[TOOL]) as stream:
        first = stream.get_final_response() if list(stream) else None
    assert first is not None
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    served.generator.text = "</think>Sunny"
    sent_back: Any = [{"role": "user", "content": "Hi"}, *first.output, output]
    assert served.ask(input=sent_back, tools=[TOOL]).output_text == "Sunny"
    by_items = served.generator.prompt_text()
    after = served.ask(input=[output], tools=[TOOL], previous_response_id=first.id)
    assert after.output_text == "Sunny"
    assert served.generator.prompt_text() == by_items
    assert by_items.index("Let me see.") < by_items.index(CALL) < by_items.index("18 degrees")
    items: list[Any] = list(first.output)
    references: Any = [{"type": "item_reference", "id": item.id} for item in items]
    referring: Any = [{"role": "user", "content": "Hi"}, *references, output]
    assert served.ask(input=referring, tools=[TOOL]).output_text == "Sunny"
    assert served.generator.prompt_text() == by_items
    again = served.ask(input="And now?", previous_response_id=after.id)
    assert again.previous_response_id == after.id
    prompt = served.generator.prompt_text()
    assert prompt.index("18 degrees") < prompt.index("Sunny")


def test_stored_responses(served: Served) -> None:
    """A response is retrieved, its input is listed, it is deleted, and `store: false` keeps none."""
    reply = served.ask()
    found = served.client.responses.retrieve(reply.id)
    assert found.output_text == reply.output_text
    (item,) = served.client.responses.input_items.list(reply.id).data
    assert item.type == "message"
    served.client.responses.delete(reply.id)
    private = served.ask(store=False)
    for missing in (reply.id, private.id):
        with pytest.raises(openai.NotFoundError):
            served.client.responses.retrieve(missing)
        with pytest.raises(openai.NotFoundError) as refused:
            served.ask(previous_response_id=missing)
        assert refused.value.param == "previous_response_id"


def test_a_response_in_the_background(served: Served) -> None:
    """The client begins it, reads its events from any number on, and cancels another one."""
    with served.client.responses.create(
        model="tiny", input="Hi", background=True, stream=True
    ) as stream:
        first = [event for event, _ in zip(stream, range(4), strict=False)]
    assert first[0].type == "response.created"
    answer_id = first[0].response.id
    rest = list(served.client.responses.retrieve(answer_id, stream=True, starting_after=3))
    numbers = [event.sequence_number for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    assert served.client.responses.retrieve(answer_id).output_text == "Hello 🎉 there"
    served.generator.hang_after = 2
    begun = served.ask(background=True)
    assert begun.status in ("queued", "in_progress")
    assert served.client.responses.cancel(begun.id).status == "cancelled"


def test_effort_system_messages_and_hints(served: Served) -> None:
    """The effort drives the template's switch; developer messages may stand anywhere; hints are accepted."""
    items: Any = [
        {"role": "developer", "content": "Rule 1."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "developer", "content": "Rule 2."},
    ]
    served.ask(
        input=items,
        instructions="Rule 0.",
        reasoning={"effort": "none", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
        prompt_cache_key="k",
        text={"verbosity": "low"},
        parallel_tool_calls=True,
        truncation="disabled",
        tools=[{"type": "web_search"}],
    )
    prompt = served.generator.prompt_text()
    assert "web_search" not in prompt
    assert prompt.index("Rule 0.") < prompt.index("Rule 1.") < prompt.index("Hi")
    assert "<system>\nRule 2.\n</system>" in prompt
    assert prompt.endswith("</think>\n\n")


def test_a_limit_makes_a_response_incomplete(served: Served) -> None:
    """The status and the last event say that the limit ended the text."""
    reply = served.ask(max_output_tokens=5)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert list(served.ask(max_output_tokens=5, stream=True))[-1].type == "response.incomplete"


def test_errors(served: Served) -> None:
    """Refusals name the field; a failure during a stream is its last event."""
    for fields, param in (
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"extra_body": {"bad_words": ["a"]}}, "bad_words"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "image"}]}]}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            served.ask(**fields)
        assert (refused.value.param or "").startswith(param), refused.value
    served.generator.refuse = CapacityError("full")
    with pytest.raises(openai.RateLimitError):
        served.ask(stream=True)
    served.generator.refuse = None
    served.generator.failure, served.generator.fail_after = WorkerLostError("worker lost"), 2
    last = list(served.ask(stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error.message == "worker lost"
