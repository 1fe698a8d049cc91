"""Reasoning effort, parallel calls, and broken calls in the history."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.prompts.request_settings import BUDGETS
from tests.support.api.api_client import CALL, USER, api_saying, tiny_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}


async def test_without_parallel_calls_the_answer_ends_after_the_first_call() -> None:
    """The second call is not generated, and the engine's request is cancelled."""
    first = len(tiny_tokenizer().encode(f"</think>{CALL}"))
    api = api_saying(f"</think>{CALL}\n{CALL}", window=1, hang_after=first + 2)
    body: Any = {"tools": [TOOL], "parallel_tool_calls": False}
    (choice,) = (await api.chat(**body)).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert len(api.generator.cancelled) == 1


async def test_a_call_with_broken_arguments_in_the_history_reaches_the_model_as_text() -> None:
    """The prompt contains the arguments as they were written, and a valid call beside them."""
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"ci'}},
        {"id": "2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]
    api = api_saying("</think>ok")
    result = {"role": "tool", "tool_call_id": "1", "content": "invalid JSON"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, result]
    response = await api.chat(messages=messages, tools=[TOOL])
    assert response.status_code == 200, response.text
    assert 'weather: {"ci' in api.generator.prompt_text()
    assert "<function=weather>\n</function>" in api.generator.prompt_text()


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), ("high", True)])
async def test_reasoning_effort_drives_the_templates_switch(effort: str, thinks: bool) -> None:
    """`none` closes the think block in the prompt; other levels leave it open."""
    api = api_saying("ok")
    assert (await api.chat(reasoning_effort=effort)).status_code == 200
    assert api.generator.prompt_text().endswith("<think>\n" if thinks else "</think>\n\n")


@pytest.mark.parametrize("window", [1, 7])
async def test_a_reasoning_budget_closes_the_reasoning(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets one request with the limit, and its answer has the closing tokens as any others."""
    monkeypatch.setitem(BUDGETS, "low", 4)
    tokens = tiny_tokenizer().encode("one two three four five six seven")
    api = api_saying("one two three four five six seven</think>The answer", window=window)
    body = {"reasoning_effort": "low", "seed": 3, "max_tokens": 100, "logprobs": True, "return_token_ids": True}
    reply = (await api.chat(**body)).json()
    (choice,) = reply["choices"]
    kept = b"".join(map(tiny_tokenizer().token_bytes, tokens[:4])).decode()
    closing = tiny_tokenizer().encode("\n</think>")
    assert choice["message"]["reasoning_content"] == kept
    assert choice["message"]["content"] == "The answer"
    (request,) = api.generator.requests
    assert (request.params.reasoning_budget, request.params.reasoning_end) == (4, closing)
    assert tuple(choice["token_ids"][: 4 + len(closing)]) == tokens[:4] + closing
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4 + len(closing)
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == f"{kept}\n</think>The answer"
    assert not api.generator.cancelled


@pytest.mark.parametrize(
    ("switch", "text", "limited"),
    [(None, "one two", True), (False, "one two", False), (False, "</think>", False)],
)
async def test_only_reasoning_has_a_budget(switch: bool | None, text: str, limited: bool) -> None:
    """Without reasoning the engine gets no limit, and the content is not cut."""
    api = api_saying(text)
    fields = {} if switch is None else {"enable_thinking": switch}
    assert (await api.chat(thinking_budget=1, **fields)).status_code == 200
    assert (api.generator.requests[0].params.reasoning_budget is not None) is limited


async def test_each_choice_with_a_budget_is_one_submission() -> None:
    """A choice keeps its place in the queue: nothing is submitted again when its reasoning is closed."""
    api = api_saying("one two three four five six seven</think>The answer")
    reply = (await api.chat(thinking_budget=2, n=3)).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["The answer"] * 3
    assert len(api.generator.requests) == 3
