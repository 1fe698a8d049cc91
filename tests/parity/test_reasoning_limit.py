"""Forced formats behind limited reasoning: in every dialect, and the same tokens for any drafts and stages."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, cast

import pytest

from coordinator.drafts.controller import MtpMode
from coordinator.prompts.request_settings import BUDGETS
from coordinator.schedule.admission import Limits
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import GenerationRequest
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.params import SamplingParams
from tests.parity.test_grammar import answers, formats, tokenizer
from tests.support.api.api_client import USER, ApiClient
from tests.support.api.fake_generator import FakeGenerator
from tests.support.stages.local_stages import local_stages
from tests.unit.mtp.test_grammar import compiled, vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

CHAT_FORMATS: list[dict[str, Any]] = [
    {"response_format": JSON_SCHEMA},
    {"response_format": {"type": "json_object"}, "max_tokens": 24},
    {"guided_json": SCHEMA},
    {"guided_regex": "[a-f]{3}-[0-9]{2}"},
    {"guided_choice": ["yes", "no"]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": NAMED},
]
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
RESPONSE_FORMATS: list[dict[str, Any]] = [
    {"text": TEXT_FORMAT},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "weather"}},
]
ANTHROPIC_TOOL = {"name": "weather", "input_schema": SCHEMA}
MESSAGE_FORMATS: list[dict[str, Any]] = [
    {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}},
    {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
]


@asynccontextmanager
async def served(mtp: str = "3", stages: int = 1) -> AsyncIterator[ApiClient]:
    """Serve the built-in model, which reasons for about ten tokens, over stages in this process."""
    options: dict[str, Any] = {"dtype": "float32", "limits": Limits(context=2048), "vocabulary": vocabulary()}
    async with local_stages(Checkpoint.open(checkpoint_dir()), mtp=MtpMode.parse(mtp), stages=stages, **options) as one:
        yield ApiClient(cast(FakeGenerator, Served(one)), context_length=2048)


class Served:
    """A generation loop with its tokenizer, which counts submissions."""

    def __init__(self, loop: GenerationLoop) -> None:
        self.loop, self.tokenizer, self.submitted = loop, tokenizer(), 0

    def submit(self, *asked: Any) -> Any:
        """See Generator."""
        self.submitted += 1
        return self.loop.submit(*asked)

    def queue_position(self, request: GenerationRequest) -> int | None:
        """See Generator."""
        return self.loop.queue_position(request)


def check(form: dict[str, Any], content: str, calls: list[tuple[str, Any]]) -> None:
    """Assert that an answer has the form that its request forced."""
    if "tools" in form:
        assert calls
        for name, arguments in calls:
            assert name == "weather"
            check({}, json.dumps(arguments), [])
    elif "guided_regex" in form:
        assert re.fullmatch(form["guided_regex"], content), content
    elif "guided_choice" in form:
        assert content in form["guided_choice"]
    elif form.get("response_format") == {"type": "json_object"}:
        assert content.lstrip().startswith("{"), content  # the limit may cut it
    else:
        found = json.loads(content)
        assert found["unit"] in ("celsius", "kelvin")
        assert 1 <= found["days"] <= 9


async def chat(api: ApiClient, form: dict[str, Any], streamed: bool) -> list[tuple[int, int]]:
    """Check two choices of a chat completion; return the reasoning and all tokens of both, as a count."""
    body = {"reasoning_effort": "low", "max_tokens": 120, "seed": 3, "temperature": 0.7, "n": 2, **form}
    if not streamed:
        reply = (await api.chat(**body)).json()
        for choice in reply["choices"]:
            message = choice["message"]
            calls = [each["function"] for each in message.get("tool_calls") or ()]
            check(form, message["content"] or "", [(c["name"], json.loads(c["arguments"])) for c in calls])
        return [(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 2)]
    events = await api.stream(**body, stream_options={"include_usage": True})
    for index in range(2):
        parts = [call for calls in events.deltas("tool_calls", index) for call in calls]
        text = "".join(p["function"]["arguments"] for p in parts if p["index"] == 0)
        calls = [(parts[0]["function"]["name"], json.loads(text))] if parts else []
        check(form, "".join(events.deltas("content", index)), calls)
    return [(events.data[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"], 2)]


async def response(api: ApiClient, form: dict[str, Any], streamed: bool) -> list[tuple[int, int]]:
    """Check a response of OpenAI's newer API."""
    body = {"input": "Hi", "reasoning": {"effort": "low"}, "max_output_tokens": 120, "temperature": 0.7, **form}
    reply = await api.post("/v1/responses", {**body, "stream": streamed})
    found = json.loads(reply.text.strip().rpartition("data: ")[2])["response"] if streamed else reply.json()
    calls = [(i["name"], json.loads(i["arguments"])) for i in found["output"] if i["type"] == "function_call"]
    texts = [i["content"][0]["text"] for i in found["output"] if i["type"] == "message"]
    check(form, "".join(texts), calls)
    return [(found["usage"]["output_tokens_details"]["reasoning_tokens"], 1)]


async def message(api: ApiClient, form: dict[str, Any], streamed: bool) -> list[tuple[int, int]]:
    """Check an answer of Anthropic's API."""
    thinking = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    body: Any = {"model": "tiny", "messages": [USER], "max_tokens": 120, "temperature": 0.7, **thinking, **form}
    reply = await api.post("/v1/messages", {**body, "stream": streamed})
    assert reply.status_code == 200, reply.text
    if not streamed:
        blocks = reply.json()["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        check(form, "".join(texts), [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"])
        return []
    data = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: ")]
    deltas = [each["delta"] for each in data if each["type"] == "content_block_delta"]
    starts = [each["content_block"] for each in data if each["type"] == "content_block_start"]
    names = [block["name"] for block in starts if block["type"] == "tool_use"]
    inputs = "".join(delta.get("partial_json", "") for delta in deltas)
    calls = [(names[0], json.loads(inputs))] if len(names) == 1 else [(name, json.loads("{}")) for name in names]
    if len(names) < 2:  # the parts of several calls follow each other
        check(form, "".join(delta.get("text", "") for delta in deltas), calls)
    return []


async def local(api: ApiClient, form: dict[str, Any], streamed: bool) -> list[tuple[int, int]]:
    """Check an answer of Ollama's API."""
    options = {"num_predict": 120, "temperature": 0.7, "seed": 2}
    body = {"model": "tiny", "messages": [USER], "think": "low", "options": options, **form, "stream": streamed}
    reply = await api.post("/api/chat", body)
    assert reply.status_code == 200, reply.text
    lines = [json.loads(line) for line in reply.text.splitlines()]
    check({}, "".join(line["message"]["content"] for line in lines), [])
    return []


DIALECTS = {
    "chat": (chat, CHAT_FORMATS),
    "responses": (response, RESPONSE_FORMATS),
    "messages": (message, MESSAGE_FORMATS),
    "ollama": (local, [{"format": SCHEMA}]),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("budget", [4, *(pytest.param(n, marks=pytest.mark.thorough) for n in (0, 1, 256))])
async def test_a_format_survives_the_end_of_the_reasoning(
    dialect: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the reasoning, every format of every dialect has its form, whole and streamed, in one request."""
    monkeypatch.setitem(BUDGETS, "low", budget)
    ask, forms = DIALECTS[dialect]
    cut = budget + len(tokenizer().encode(tokenizer().reasoning_end))
    async with served() as api:
        modes = [(form, bool(i % 2)) for i, form in enumerate(forms)]  # both modes of all in the longer run
        modes += [] if budget == 4 else [(form, not streamed) for form, streamed in modes]
        asked = [ask(api, form, streamed) for form, streamed in modes]
        for found in await asyncio.gather(*asked):
            for reasoning, choices in found:
                assert budget > 4 or reasoning == choices * cut, "the reasoning is not cut"
        each = 2 if dialect == "chat" else 1
        assert cast(Any, api.generator).submitted == each * len(asked)


async def test_explicit_budgets() -> None:
    """`thinking_budget` and Anthropic's `budget_tokens` limit the reasoning as levels do."""
    async with served() as api:
        body = {"thinking_budget": 4, "max_tokens": 120, "seed": 1, "temperature": 0, **CHAT_FORMATS[0]}
        reply = (await api.chat(**body)).json()
        check(CHAT_FORMATS[0], reply["choices"][0]["message"]["content"], [])
        thinking = {"type": "enabled", "budget_tokens": 4}
        fields = {"model": "tiny", "messages": [USER], "max_tokens": 120, "thinking": thinking}
        (thought, text) = (await api.post("/v1/messages", {**fields, **MESSAGE_FORMATS[0]})).json()["content"]
        check({}, text["text"], [])
        assert len(tokenizer().encode(thought["thinking"])) <= 5


@pytest.mark.parametrize("form", [CHAT_FORMATS[0], pytest.param(CHAT_FORMATS[5], marks=pytest.mark.thorough)])
async def test_the_end_of_the_answer_inside_reasoning_is_its_end(form: dict[str, Any]) -> None:
    """At a temperature at which the model often ends its answer while it reasons, every answer has its format."""
    async with served() as api:
        asked = [api.chat(temperature=1.6, seed=seed, max_tokens=200, **form) for seed in range(6)]
        ended = 0
        for reply in await asyncio.gather(*asked):
            (choice,) = reply.json()["choices"]
            calls = [each["function"] for each in choice["message"].get("tool_calls") or ()]
            if choice["finish_reason"] == "length":
                continue
            ended += 1
            check(form, choice["message"]["content"] or "", [(c["name"], json.loads(c["arguments"])) for c in calls])
        assert ended >= 4


def limits() -> list[SamplingParams]:
    """Return limits of 0, 1, 4 and 12 tokens, with a format and without one, greedy and sampled."""
    end = tokenizer().encode(tokenizer().reasoning_end)
    found = []
    for number, budget in enumerate((0, 1, 4, 12)):
        limit: dict[str, Any] = {"reasoning_budget": budget, "reasoning_end": end, "logprobs": 0, "seed": number}
        forced: dict[str, Any] = {
            "grammar": compiled(formats()[number % 2]),
            "grammar_start": end[-1],
            "reasoning_stops": (4089,),
        }
        found += [SamplingParams(**limit, temperature=0.9), SamplingParams(**limit, **forced, temperature=0.7)]
        found.append(SamplingParams(**limit, frequency_penalty=0.5))
    return found


@cache
def asked() -> list[GenerationRequest]:
    """Return a request for each limit, and one whose tokens end inside the closing."""
    prompt = tokenizer().encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    found = [GenerationRequest(prompt, 26, params, tokenizer().eos_ids) for params in limits()]
    return [*found, GenerationRequest(prompt, 5, limits()[6], tokenizer().eos_ids)]


@cache
def expected() -> list[Any]:
    """Return the answers without drafts in one stage."""
    return answers(asked(), "off")


def test_reasoning_is_closed_at_its_budget() -> None:
    """The closing tokens follow the budget, and log-probabilities cover them."""
    end = tokenizer().encode(tokenizer().reasoning_end)
    for request, answer in zip(asked(), expected(), strict=True):
        budget = request.params.reasoning_budget
        assert budget is not None
        if end[-1] not in answer.tokens[:budget]:
            assert answer.tokens[budget : budget + len(end)] == end[: request.max_tokens - budget]
        assert [entry.token for entry in answer.logprobs] == list(answer.tokens)


FAST = (("3", 2), ("off", 2))
CASES = [
    pytest.param(mtp, stages, marks=() if (mtp, stages) in FAST else pytest.mark.thorough)
    for mtp, stages in (*FAST, ("1", 1), ("filled", 4), ("auto", 2), ("off", 4))
]


@pytest.mark.parametrize(("mtp", "stages"), CASES)
def test_drafts_and_cuts_change_no_token(mtp: str, stages: int) -> None:
    """Tokens, log-probabilities and reasons are those of plain decoding in one stage."""
    for one, other in zip(answers(asked(), mtp, stages), expected(), strict=True):
        assert (one.tokens, one.reason, one.logprobs) == (other.tokens, other.reason, other.logprobs)


def test_answers_go_on_inside_the_reasoning() -> None:
    """A request that has emitted tokens before, inside or after the closing goes on as it would have."""
    for request, answer in zip(asked()[7:8], expected()[7:8], strict=True):
        places = [place for place in (1, 4, 5, 6) if place < len(answer.tokens)]
        again = [GenerationRequest(**{**vars(request), "emitted": answer.tokens[:place]}) for place in places]
        for place, rest in zip(places, answers(again, "3", 2), strict=True):
            assert rest.tokens == answer.tokens[place:], place
