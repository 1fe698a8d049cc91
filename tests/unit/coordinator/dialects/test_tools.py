"""The tools of each dialect: namespaces, refusals, forced calls, and calls in streams, whole and cut off."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.api.api_client import REQUESTS, ApiClient, api_saying, tiny_tokenizer
from tests.support.api.scripted_tools import scripted_answer

PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
SPACE: Any = {"type": "namespace", "name": "agents", "description": "", "tools": [WEATHER]}
USER: Any = [{"role": "user", "content": "Hi"}]


def answering(function: str) -> ApiClient:
    """Return an API whose model calls `function`."""
    values = "<parameter=city>\nRome\n</parameter>\n"
    call = f"</think>\n\n<tool_call>\n<function={function}>\n{values}</function>\n</tool_call>"
    return api_saying(call)


async def test_functions_of_a_namespace_are_called_by_their_client_names() -> None:
    """The model sees the full name. The item has namespace and name, whole, streamed and in the history."""
    api = answering("agents.weather")
    body: Any = {"input": "Hi", "tools": [SPACE, {**WEATHER, "name": "other"}]}
    whole = (await api.post("/v1/responses", body)).json()
    (call,) = [item for item in whole["output"] if item["type"] == "function_call"]
    assert (call["namespace"], call["name"]) == ("agents", "weather")
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    assert '"agents.weather"' in api.generator.prompt_text()
    streamed = await api.post("/v1/responses", {**body, "stream": True})
    lines = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[:6] == "data: "]
    items = [line["item"] for line in lines if line["type"] == "response.output_item.done"]
    assert (items[-1]["namespace"], items[-1]["name"]) == ("agents", "weather")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18"}
    again = await api.post("/v1/responses", {**body, "input": [*USER, call, result], "store": False})
    assert again.status_code == 200, again.text
    assert "<function=agents.weather>" in api.generator.prompt_text()
    named = {"type": "function", "namespace": "agents", "name": "weather"}
    forced = await api.post("/v1/responses", {**body, "tool_choice": named})
    assert forced.status_code == 200, forced.text
    assert b"agents.weather" in (api.generator.requests[-1].params.grammar or b"")


@pytest.mark.parametrize(
    ("path", "tool", "name"),
    [
        ("/v1/responses", {"type": "local_shell"}, "local_shell"),
        ("/v1/responses", {"type": "tool_search", "execution": "client"}, "tool_search"),
        ("/v1/messages", {"type": "web_search_20250305", "name": "web_search"}, "web_search"),
    ],
)
async def test_tools_that_agents_offer_by_default_are_left_out(path: str, tool: Any, name: str) -> None:
    """The request is served with its functions, and the model does not see the others."""
    own = {"name": "weather", "input_schema": PARAMETERS} if path == "/v1/messages" else WEATHER
    api = answering("weather")
    response = await api.post(path, {**REQUESTS[path], "tools": [tool, own]})
    assert response.status_code == 200, response.text
    assert '"weather"' in api.generator.prompt_text()
    assert name not in api.generator.prompt_text()


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/responses",
            {"tools": [WEATHER, {"type": "mcp", "server_url": "x"}]},
            "tools[1]: input tag 'mcp' found using 'type' does not match any of the expected tags: 'function'",
        ),
        ("/v1/responses", {"tools": [{"name": "x"}]}, "tools[0]: unable to extract tag"),
        ("/v1/responses", {"tool_choice": {"type": "hosted"}}, "tool_choice"),
        ("/v1/responses", {"tools": "x"}, "tools: must be a valid array"),
        (
            "/v1/messages",
            {"tools": [{"type": "computer_20250124", "name": "computer"}]},
            "tools[0].type: 'computer_20250124' is not supported. Send the tool with its own",
        ),
        ("/v1/chat/completions", {"tools": [{"type": "mcp", "mcp": {"name": "x"}}]}, "tools[0]: input tag 'mcp' found"),
    ],
)
async def test_other_tools_are_refused_by_name(path: str, fields: Any, message: str) -> None:
    """The error names the place and the type, and what to send instead."""
    response = await answering("weather").post(path, {**REQUESTS[path], **fields})
    assert response.status_code == 400
    error = response.json()["error"]["message"]
    assert error.startswith(message)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_a_forced_call_wins_over_a_format(path: str) -> None:
    """Libraries for structured output send both, and read the call."""
    api = api_saying("", answer=scripted_answer)
    body: Any
    if path == "/v1/responses":
        named = {"type": "json_schema", "name": "x", "schema": PARAMETERS}
        body = {"input": "Hi", "tools": [WEATHER], "text": {"format": named}}
    else:
        function = {"name": "weather", "parameters": PARAMETERS}
        body = {"messages": USER, "tools": [{"type": "function", "function": function}]}
        body["response_format"] = {"type": "json_object"}
    response = await api.post(path, {**body, "tool_choice": "required"})
    assert response.status_code == 200, response.text
    assert '"city' in response.text
    assert b"<function=weather>" in (api.generator.requests[-1].params.grammar or b"")


ARGUMENTS = {"city": 'Rome, "the" 🎉 city\nof </tool_call> hills'}
CALL = (
    "</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\n"
    f"{ARGUMENTS['city']}\n</parameter>\n</function>\n</tool_call>"
)
FUNCTION: Any = {"name": "weather", "parameters": PARAMETERS}


@dataclass(frozen=True)
class Dialect:
    """One dialect: a request, the pieces of arguments in its stream, and the call and the end of a whole answer.

    `ends` are the ends of a whole answer with a complete call, and of one that the limit cut off.
    """

    path: str
    body: Any
    limit: str
    pieces: Callable[[list[Any]], list[str]]
    calls: Callable[[Any], list[Any]]
    end: Callable[[Any], Any]
    ends: tuple[Any, Any]


def _chat_pieces(events: list[Any]) -> list[str]:
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert all(call["index"] == 0 for call in calls)
    return [call["function"]["arguments"] for call in calls]


def _deltas(kind: str, *path: str) -> Callable[[list[Any]], list[str]]:
    """Return a function that reads the value at `path` from the events of the type `kind`."""

    def read(events: list[Any]) -> list[str]:
        """Return the values in the order of the stream."""
        found = []
        for event in events:
            if event.get("type") == kind:
                for key in path:
                    event = event.get(key, {})
                found += [event] if isinstance(event, str) else []
        return found

    return read


def _ollama_pieces(events: list[Any]) -> list[str]:
    calls = [c for event in events for c in event.get("message", {}).get("tool_calls", ())]
    return [json.dumps(call["function"]["arguments"]) for call in calls]


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
        "max_tokens",
        _chat_pieces,
        lambda whole: [
            json.loads(call["function"]["arguments"]) for call in whole["choices"][0]["message"].get("tool_calls", ())
        ],
        lambda whole: whole["choices"][0]["finish_reason"],
        ("tool_calls", "length"),
    ),
    "responses": Dialect(
        "/v1/responses",
        {"input": USER, "tools": [{"type": "function", **FUNCTION}]},
        "max_output_tokens",
        _deltas("response.function_call_arguments.delta", "delta"),
        lambda whole: [
            json.loads(item["arguments"])
            for item in whole["output"]
            if item["type"] == "function_call" and item["status"] == "completed"
        ],
        lambda whole: (whole["status"], whole["output"][-1]["status"]),
        (("completed", "completed"), ("incomplete", "incomplete")),
    ),
    "anthropic": Dialect(
        "/v1/messages",
        {"messages": USER, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": PARAMETERS}]},
        "max_tokens",
        _deltas("content_block_delta", "delta", "partial_json"),
        lambda whole: [b["input"] for b in whole["content"] if b["type"] == "tool_use"],
        lambda whole: whole["stop_reason"],
        ("tool_use", "max_tokens"),
    ),
    "ollama": Dialect(
        "/api/chat",
        {"model": "tiny", "messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
        "num_predict",
        _ollama_pieces,
        lambda whole: [c["function"]["arguments"] for c in whole["message"].get("tool_calls", ())],
        lambda whole: whole["done_reason"],
        ("stop", "length"),
    ),
}


async def answers(dialect: Dialect, limit: int | None = None) -> tuple[list[Any], Any]:
    """Return the events of a streamed answer, and the same answer whole."""
    api = api_saying(CALL, window=3)
    body = dict(dialect.body)
    if dialect.path == "/api/chat":
        body["options"] = {} if limit is None else {"num_predict": limit}
    elif limit is not None:
        body[dialect.limit] = limit
    streamed = await api.post(dialect.path, {**body, "stream": True})
    assert streamed.status_code == 200, streamed.text
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return events, (await api.post(dialect.path, {**body, "stream": False})).json()


@pytest.mark.parametrize("name", DIALECTS)
async def test_the_pieces_of_a_stream_form_the_call_of_a_whole_answer(name: str) -> None:
    """Arguments stream in every dialect whose arguments are text. Ollama's are an object in one line."""
    dialect = DIALECTS[name]
    events, whole = await answers(dialect)
    pieces = dialect.pieces(events)
    assert json.loads("".join(pieces)) == ARGUMENTS
    assert len(pieces) == 1 if name == "ollama" else len(pieces) > 20
    assert dialect.calls(whole) == [ARGUMENTS]
    assert dialect.end(whole) == dialect.ends[0]


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_call_that_the_limit_cuts_off_is_never_presented_as_whole(name: str) -> None:
    """The dialect's end says so, and there is no object of arguments that is complete."""
    dialect = DIALECTS[name]
    limit = len(tiny_tokenizer().encode(CALL[: CALL.index("Rome") + 6]))
    events, whole = await answers(dialect, limit)
    assert dialect.end(whole) == dialect.ends[1]
    sent = "".join(dialect.pieces(events))
    assert sent.startswith('{"city": "R') if name != "ollama" else sent == ""
    assert not sent.endswith("}")
    types = {event.get("type") for event in events}
    assert "response.function_call_arguments.done" not in types
    text = json.dumps(whole)
    assert "<tool_call>" not in text
    if name == "chat":
        (call,) = whole["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == sent
    else:
        assert dialect.calls(whole) == []
