"""Histories and fields as agents really send them, in every dialect: taken, with the words that the model needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.dialects.anthropic import Tool
from coordinator.prompts.conversation import freeform_input
from tests.support.api.api_client import REQUESTS, ApiClient, api_saying

USER: Any = {"role": "user", "content": "Hi"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
DIALECTS = (CHAT, MESSAGES, OLLAMA, RESPONSES)


def api() -> ApiClient:
    """Return an API whose model answers shortly."""
    return api_saying("Yes.")


def history(path: str, *turns: Any) -> dict[str, Any]:
    """Return a request with messages, or with items."""
    return {"input" if path == RESPONSES else "messages": [*turns]}


async def prompt_of(path: str, body: Any) -> str:
    """Return the prompt that a request gives."""
    client = api()
    response = await client.post(path, {**REQUESTS[path], **body})
    assert response.status_code == 200, response.text
    return client.generator.prompt_text()


SYSTEMS = [
    *((path, {"messages": [{"role": "system", "content": t} for t in ("A", "B")] + [USER]}) for path in (CHAT, OLLAMA)),
    (RESPONSES, {"instructions": "A", "input": [{"role": "developer", "content": "B"}, USER]}),
    (MESSAGES, {"system": "A", "messages": [{"role": "system", "content": "B"}, USER]}),
    (MESSAGES, {"system": [{"type": "text", "text": t} for t in "AB"], "messages": [USER]}),
]


@pytest.mark.parametrize(("path", "body"), SYSTEMS)
async def test_system_messages_at_the_beginning_are_joined(path: str, body: Any) -> None:
    prompt = await prompt_of(path, body)
    assert prompt.startswith("<|im_start|>system\nA\n\nB<|im_end|>\n<|im_start|>user\nHi")


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("path", DIALECTS)
async def test_a_later_system_message_is_marked(path: str, role: str) -> None:
    """Templates of Qwen3.5 and later refuse it, and moved to the front it would change every prefix."""
    turns = [USER, {"role": "assistant", "content": "Yes."}, {"role": role, "content": "New."}, USER]
    assert "<|im_start|>user\n<system>\nNew.\n</system><|im_end|>" in await prompt_of(path, history(path, *turns))


def called(**call: Any) -> Any:
    """Return a message with a call."""
    return {"role": "assistant", "tool_calls": [call]}


def said(*parts: Any, role: str = "user") -> Any:
    """Return a message with the parts."""
    return {"role": role, "content": [*parts]}


ARGUMENTS = '{"a": "b"}'
WRITTEN = "<parameter=a>\nb\n"
"""The call with ARGUMENTS as the template writes it."""

FOUND = {"type": "web_search_result", "title": "W", "url": "https://w.example", "encrypted_content": "SECRET"}
SEARCHED = said(
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "rome weather"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [FOUND]},
    {"type": "text", "text": "Warm."},
    role="assistant",
)
DOCUMENT = said(
    {"type": "tool_reference", "tool_name": "later"},
    {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
    {"type": "text", "text": "And now?"},
)
OLD = {"content": None, "refusal": "No.", "audio": {"id": "a"}, "function_call": {"name": "f", "arguments": ARGUMENTS}}

HISTORIES: list[tuple[str, str, list[Any]]] = [
    (CHAT, WRITTEN, [called(id="c1", type="function", function={"name": "f", "arguments": ARGUMENTS})]),
    (CHAT, WRITTEN, [called(id="c", function={"name": "f", "arguments": {"a": "b"}})]),
    (CHAT, "<parameter=input>\nx y\n", [called(id="c", type="custom", custom={"name": "p", "input": "x y"})]),
    (CHAT, "", [called(id=5, function={"name": "f"})]),
    (CHAT, "", [{"role": "tool", "tool_call_id": "c1", "content": None}]),
    (CHAT, "", [{"role": "tool", "tool_call_id": "c", "content": {"a": 1}}]),
    (CHAT, "18", [{"role": "function", "name": "f", "content": "18"}]),
    (CHAT, "T", [said({"type": "input_text", "text": "T"})]),
    (CHAT, "one", [said("one", {"type": "text", "text": None})]),
    (CHAT, "", [said({"type": "file", "file": {"file_id": "x"}})]),
    (CHAT, WRITTEN, [{"role": "assistant", **OLD}]),
    (CHAT, "A", [{"role": "assistant", "content": "A", "reasoning": {"text": "so"}}]),
    (OLLAMA, WRITTEN, [called(function={"name": "f", "arguments": ARGUMENTS})]),
    (MESSAGES, "rome weather", [SEARCHED, DOCUMENT]),
    (MESSAGES, "", [said({"type": "thinking", "thinking": None}, role="assistant")]),
    (MESSAGES, "", [said({"type": "tool_use", "name": "f"}, role="assistant")]),
    (MESSAGES, "", [said({"type": "tool_result", "content": {"a": 1}})]),
    (MESSAGES, "", [{"role": "assistant", "content": None}]),
    (MESSAGES, "", [said({"type": "mcp_tool_use", "name": "f"}, role="assistant")]),
    (RESPONSES, "T", [said({"type": "output_text", "text": "T", "logprobs": [{"token": "T"}]}, role="assistant")]),
    (RESPONSES, "rome", [{"type": "web_search_call", "id": "w", "action": {"query": "rome"}}]),
    (RESPONSES, "<parameter=input>\nx y\n", [
        {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x y"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
        {"type": "something_new", "data": "words"},
    ]),
    (RESPONSES, "", [{"type": "function_call_output", "output": {"a": 1}}]),
    (RESPONSES, "", [{"type": "function_call", "name": "f", "arguments": [1]}]),
    (RESPONSES, "", [{"type": "local_shell_call", "action": {"command": ["ls"]}}]),
    (RESPONSES, "", [{"type": "mcp_list_tools", "tools": []}]),
    (RESPONSES, "18 degrees", [{"type": "shell_call_output", "output": [{"stdout": "18 degrees", "stderr": ""}]}]),
    (RESPONSES, "[audio: not readable here]", [{"type": "audio", "data": "SECRET" * 900}]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "words", "turns"), HISTORIES)
async def test_a_history_never_locks_a_session(path: str, words: str, turns: list[Any]) -> None:
    """Missing ids, objects for texts, and parts of other servers become a line of text, or nothing. Data never do."""
    answered = path == MESSAGES and turns[-1]["role"] == "assistant"  # this dialect ends with the user
    for last in ([USER],) if answered else ([USER], []):
        prompt = await prompt_of(path, history(path, USER, *turns, *last))
        assert words in prompt
        assert "SECRET" not in prompt


BROKEN: list[tuple[str, Any]] = [
    *((path, {"role": "robot", "content": "words"}) for path in DIALECTS),
    *((path, {"role": "user", "content": 5}) for path in DIALECTS),
    *((path, "words") for path in DIALECTS),
    *((path, None) for path in DIALECTS),
    (CHAT, {"role": "user", "content": None}),
    (CHAT, {"role": "user", "content": "words", "images": ["iVBO"]}),
    (CHAT, said({"type": "image_url"}, {"type": "text", "text": "words"})),
    (CHAT, said({"type": "input_audio", "input_audio": {"data": "x"}})),
    (CHAT, called(id="c", function={"arguments": "words"})),
    (CHAT, {"role": "tool", "tool_call_id": 5, "content": "words"}),
    (MESSAGES, said({"type": "image", "source": {"type": "file", "file_id": "f"}})),
    (MESSAGES, said({"type": "image"}, {"type": "text", "text": "words"})),
    (MESSAGES, said({"type": "tool_use", "input": "words"}, role="assistant")),
    (MESSAGES, said({"type": "thinking", "thinking": {"a": "words"}}, role="assistant")),
    (MESSAGES, said({"type": "tool_result", "is_error": "words"})),
    (OLLAMA, said({"type": "text", "text": "words"})),
    (OLLAMA, {"content": "", **called(function={"arguments": {"a": "words"}})}),
    (OLLAMA, called(function={"name": "f", "arguments": [1]})),
    (RESPONSES, {"type": "function_call", "arguments": "words"}),
    (RESPONSES, {"type": "item_reference"}),
    (RESPONSES, {"type": "item_reference", "id": "words"}),
    (RESPONSES, said({"type": "input_image", "file_id": "f"})),
    (RESPONSES, {}),
]


@pytest.mark.parametrize(("path", "turn"), BROKEN)
async def test_an_earlier_message_is_never_refused(path: str, turn: Any) -> None:
    """A client cannot change it. Its words reach the prompt, and the messages around it stay."""
    before, between = {"role": "user", "content": "Before"}, {"role": "assistant", "content": "Between"}
    prompt = await prompt_of(path, history(path, before, turn, between, USER))
    assert "Before" in prompt
    assert "Between" in prompt
    assert prompt.count("Hi") == 1
    assert ("words" in prompt) == ("words" in str(turn))


@pytest.mark.parametrize(
    ("path", "result"),
    [
        (CHAT, {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}, {"text": "words"}]}),
        (CHAT, {"role": "tool", "tool_call_id": "c", "content": [{"type": "input_audio"}, {"text": "words"}]}),
        (RESPONSES, {"type": "function_call_output", "output": [{"type": "input_image"}, {"text": "words"}]}),
        (MESSAGES, said({"type": "tool_result", "content": [{"type": "image"}, "words"]})),
    ],
)
async def test_the_newest_result_of_a_tool_is_never_refused(path: str, result: Any) -> None:
    """An agent sends what its tool returned, and cannot change it."""
    assert "words" in await prompt_of(path, history(path, USER, result))


@pytest.mark.parametrize("path", DIALECTS)
async def test_the_newest_message_of_the_user_is_checked(path: str) -> None:
    """Its errors name the field, also behind a history with errors."""
    body = history(path, {"role": "robot", "content": "x"}, {"role": "user", "content": 5})
    reply = await api().post(path, {**REQUESTS[path], **body})
    assert (reply.status_code, f"{next(iter(body))}[1]." in reply.text) == (400, True), reply.text


async def test_an_empty_input_of_responses() -> None:
    """Missing, empty or null, and with the words of an earlier response."""
    client = api()
    bodies: list[Any] = [{}, {"input": ""}, {"input": []}, {"input": None}, {"instructions": "Be kind."}]
    for body in bodies:
        reply = await client.post(RESPONSES, body)
        assert reply.status_code == 200, reply.text
        again = await client.post(RESPONSES, {"previous_response_id": reply.json()["id"]})
        assert again.status_code == 200, again.text


async def test_an_item_that_is_not_stored_is_a_line() -> None:
    """The words around it stay, also in the stored conversation."""
    client = api()
    reference = {"type": "item_reference", "id": "rs_68af4030baa48193b0b43b4c2a176a1a0"}
    reply = await client.post(RESPONSES, {"input": [USER, reference, {"role": "user", "content": "And?"}]})
    assert reply.status_code == 200, reply.text
    again = await client.post(RESPONSES, {"input": "So?", "previous_response_id": reply.json()["id"]})
    assert again.status_code == 200, again.text
    prompt = client.generator.prompt_text()
    assert prompt.index("Hi") < prompt.index(f"the item '{reference['id']}' is not stored here") < prompt.index("And?")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((CHAT, fields) for fields in (
            {"thinking_budget": 0}, {"thinking_token_budget": 0}, {"reasoning": {"max_tokens": 0}},
            {"thinking": {"type": "enabled", "budget_tokens": 0}}, {"thinking_budget": 0, "reasoning_effort": "high"},
        )),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
    ],
)  # fmt: skip
async def test_a_budget_of_zero_switches_reasoning_off(path: str, fields: Any) -> None:
    """A negative one is no limit."""
    assert (await prompt_of(path, {**history(path, USER), **fields})).endswith("</think>\n\n")
    assert (await prompt_of(CHAT, {"messages": [USER], "thinking_budget": -1})).endswith("<think>\n")


@pytest.mark.parametrize("stop", ["", [""], ["", ""], []])
async def test_empty_stop_strings_have_no_effect(stop: Any) -> None:
    """In every dialect, under every name, and beside others."""
    more = [*([stop] if isinstance(stop, str) else stop), "world"]
    names = (
        dict.fromkeys(REQUESTS, "stop") | {MESSAGES: "stop_sequences"} | dict.fromkeys((OLLAMA, GENERATE), "options")
    )
    for path, name in (*names.items(), (CHAT, "stopping_strings")):
        texts = []
        for sent in (stop, more):
            fields = {name: {"stop": sent} if name == "options" else sent}
            reply = await api_saying("</think>Hello world").post(path, {**REQUESTS[path], **fields})
            assert reply.status_code == 200, reply.text
            texts.append(reply.text)
        assert ["world" in text for text in texts] == [True, False] or name == "stop_sequences"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions/", CHAT),
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/messages", MESSAGES),
        ("/v1/messages/count_tokens/", MESSAGES),
        ("/responses", RESPONSES),
        ("/completions/", "/v1/completions"),
        ("/api/chat/", OLLAMA),
    ],
)
async def test_paths_that_clients_mean(path: str, meant: str) -> None:
    """With a slash at the end, and with or without the version."""
    assert (await api().post(path, REQUESTS[meant])).status_code == 200


# ---- custom tools, and the choice of tools

PATCH = '*** Begin Patch\n+ a "b"\n*** End Patch'


def patching() -> ApiClient:
    """Return an API whose model calls a custom tool."""
    value = f"<parameter=input>\n{PATCH}\n</parameter>\n"
    call = f"</think>\n\n<tool_call>\n<function=apply_patch>\n{value}</function>\n</tool_call>"
    return api_saying(call, window=3)


def events_of(text: str) -> list[Any]:
    """Return the data of a stream."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def test_a_custom_tool_of_responses() -> None:
    """The model sees a function with one string. Its call is an item with the input, whole and streamed."""
    client = patching()
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    tool = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": form}
    whole = (await client.post(RESPONSES, {"input": "Hi", "tools": [tool]})).json()
    (item,) = [item for item in whole["output"] if item["type"] == "custom_tool_call"]
    assert (item["name"], item["input"], item["status"]) == ("apply_patch", PATCH, "completed")
    assert 'start: \\"x\\"' in client.generator.prompt_text()
    streamed = await client.post(RESPONSES, {"input": "Hi", "tools": [tool], "stream": True})
    events = events_of(streamed.text)
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    done = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done[0]["input"] == PATCH
    again = [{"role": "user", "content": "Hi"}, item]
    again.append({"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done"})
    next_turn = await client.post(RESPONSES, {"input": again, "tools": [tool]})
    assert next_turn.status_code == 200, next_turn.text


async def test_a_custom_tool_of_chat_completions() -> None:
    """The call has `custom` with the input, whole and streamed."""
    tool = {"type": "custom", "custom": {"name": "apply_patch"}}
    body = {"messages": [USER], "tools": [tool]}
    whole = (await patching().post(CHAT, body)).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "apply_patch", "input": PATCH})
    assert whole["finish_reason"] == "tool_calls"
    streamed = await patching().post(CHAT, {**body, "stream": True})
    deltas = [e["choices"][0]["delta"] for e in events_of(streamed.text)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["custom"] == {"name": "apply_patch", "input": ""}
    assert "".join(call["custom"]["input"] for call in calls) == PATCH


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"input": {"a": true}}', '{"a": true}'),
        ('{"input": null}', ""),
        ('{"input": "a\\nb', "a\nb"),
        ("{", ""),
    ],
)
def test_the_input_of_a_custom_tool(arguments: str, expected: str) -> None:
    assert freeform_input(arguments) == expected


async def test_a_stop_string_inside_a_call_leaves_no_marks() -> None:
    """The call is cut there, as by a limit."""
    body = {"messages": [USER], "tools": [function("apply_patch")], "stop": ["Begin"]}
    choice = (await patching().post(CHAT, body)).json()["choices"][0]
    assert choice["message"]["content"] in ("", None)
    assert choice["finish_reason"] == "stop"


async def test_half_a_character_in_arguments_is_replaced() -> None:
    """Models write escapes of half a pair of UTF-16, which no client reads."""
    call = '</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": "\\ud83d x"}}\n</tool_call>'
    client = api_saying(call)
    response = await client.post(CHAT, {"messages": [USER], "tools": [function("f")]})
    (made,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": "\ufffd x"}
    broken = {"id": "c", "function": {"name": "f", "arguments": '{"a": "\\ud83d x"}'}}
    turns = [USER, {"role": "assistant", "tool_calls": [broken]}, USER]
    assert "\ufffd x" in await prompt_of(CHAT, {"messages": turns})


async def test_only_the_named_tool_is_checked() -> None:
    """Another tool may have rules that no grammar holds."""
    other = {"type": "function", "function": {"name": "g", "parameters": {"minProperties": 1}}}
    body = {"tools": [function("apply_patch"), other], "tool_choice": function("apply_patch")}
    assert (await patching().chat(**body)).status_code == 200


def function(name: str) -> Any:
    """Return a function of chat completions."""
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_allowed_tools_are_the_only_ones(path: str, mode: str) -> None:
    """The model sees the named tools, and with `required` it must call one of them."""
    client = patching()
    if path == CHAT:
        inner = {"mode": mode, "tools": [function("apply_patch")]}
        body: Any = {
            "messages": [USER],
            "tools": [function("apply_patch"), function("other_one")],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": inner},
        }
    else:
        named = [{"type": "function", "name": n} for n in ("apply_patch", "other_one")]
        choice = {"type": "allowed_tools", "mode": mode, "tools": named[:1]}
        body = {"input": "Hi", "tools": named, "tool_choice": choice}
    response = await client.post(path, body)
    assert response.status_code == 200, response.text
    assert "apply_patch" in client.generator.prompt_text()
    assert "other_one" not in client.generator.prompt_text()
    assert bool(client.generator.requests[-1].params.grammar) is (mode == "required")


@pytest.mark.parametrize(
    ("kind", "word"),
    [("text_editor_20250728", "old_str"), ("bash_20250124", "restart"), ("memory_20250818", "old_path")],
)
def test_tools_that_anthropic_names_have_their_schema(kind: str, word: str) -> None:
    known = Tool.model_validate({"type": kind, "name": "it"}).known
    assert known is not None
    assert word in known["properties"]


async def test_a_suffix_needs_the_tokens_of_its_form() -> None:
    """The small tokenizer of the tests has none."""
    response = await api().post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "suffix"


# ---- prefixes

HEADER = "x-anthropic-billing-header: cc_version=2.1.104; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("shape", ["text", "blocks"])
async def test_the_changing_block_of_claude_code_is_left_out(shape: str) -> None:
    """Ten turns with another hash each have prompts that begin alike."""
    prompts = []
    for turn in range(3):
        texts = [HEADER.format(turn), "You are an agent."]
        system: Any = [{"type": "text", "text": text} for text in texts]
        if shape == "text":
            system = "\n".join(texts)
        prompts.append(await prompt_of(MESSAGES, {"system": system, "messages": [USER]}))
    assert len({*prompts}) == 1
    assert "billing" not in prompts[0]
    assert "You are an agent." in prompts[0]
