"""Forced formats in every dialect, on two real workers with drafts, also when a worker is killed during the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import httpx
import ollama
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.api.streams import tokens_of_stream
from tests.support.processes.processes import Cluster, running_cluster

USER: Any = [{"role": "user", "content": "Describe the file as JSON."}]
PARAMETERS: Any = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS, "strict": True},
}
OTHER: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


class File(BaseModel):
    """A format with an enumeration and a list."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["file", "folder"]
    sizes: Annotated[list[Annotated[int, Field(ge=0, le=99)]], Field(max_length=2)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Serve the built-in model from two workers, with three drafts per window."""
    folder = tmp_path_factory.mktemp("formats")
    flags = ("--mtp", "3", "--dtype", "float32", "--served-model-name", "claude-x")
    with running_cluster(folder, "builtin", 2, *flags) as found:
        yield found


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """Connect OpenAI's client."""
    url = f"{cluster.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=90) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """Send a chat without reasoning and return its choice."""
    body: Any = {"chat_template_kwargs": {"enable_thinking": False}, **fields.pop("extra", {})}
    asked: Any = {"model": "builtin", "messages": USER, "max_tokens": 80, "seed": 4, **fields}
    return client.chat.completions.create(**asked, extra_body=body).choices[0]


def test_openais_parse_returns_the_object(client: openai.OpenAI) -> None:
    """The client sends its own strict schema and parses the answer with it."""
    reply = client.chat.completions.parse(
        model="builtin",
        messages=USER,
        max_tokens=300,
        seed=1,
        response_format=File,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed, File)


def test_forced_calls_in_three_dialects(client: openai.OpenAI, cluster: Cluster) -> None:
    """`required`, one named function and Anthropic's `any` and `tool` give calls that follow the schema."""
    required = ask(client, tools=[OTHER, TOOL], tool_choice="required", parallel_tool_calls=False)
    assert required.finish_reason == "tool_calls"
    assert len(required.message.tool_calls) == 1
    named: Any = {"type": "function", "function": {"name": "weather"}}
    (call,) = ask(client, tools=[OTHER, TOOL], tool_choice=named).message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert 1 <= arguments["days"] <= 9
    tool: Any = {"name": "weather", "input_schema": PARAMETERS}
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", timeout=90) as other:
        one: Any = {"type": "any", "disable_parallel_tool_use": True}
        fixed: Any = {"type": "tool", "name": "weather"}
        for choice in (one, fixed):
            reply = other.messages.create(
                model="claude-x", messages=USER, max_tokens=80, tools=[tool], tool_choice=choice
            )
            (block,) = reply.content
            assert block.type == "tool_use"
            assert set(block.input) == {"unit", "days"}
    with ollama.Client(host=cluster.url, timeout=90) as local:
        found = local.chat("builtin", USER, format=PARAMETERS, think=False, options={"seed": 2, "num_predict": 90})
        assert set(json.loads(found.message.content or "")) == {"unit", "days"}


@pytest.mark.slow
def test_a_killed_worker_changes_no_token_of_a_format(cluster: Cluster) -> None:
    """After a worker is killed during the reasoning, its limit and the grammar hold as if nothing had happened."""
    items = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
    body: Any = {
        "messages": USER,
        "thinking_budget": 8,
        "max_tokens": 300,
        "temperature": 0.8,
        "seed": 5,
        "return_token_ids": True,
        "response_format": {"type": "json_schema", "json_schema": {"schema": items}},
    }
    url = f"{cluster.url}/v1/chat/completions"
    expected = httpx.post(url, json=body, timeout=90).json()["choices"][0]["token_ids"]
    found = tokens_of_stream(url, body, 3, cluster.workers[-1].kill)
    assert found == expected
    assert httpx.get(f"{cluster.url}/status", timeout=60).json()["recoveries"] >= 1
