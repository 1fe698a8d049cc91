"""The tools of each dialect: namespaces, tools that are left out, refusals in plain words, and forced calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.api.api_client import REQUESTS, ApiClient, api_saying
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
