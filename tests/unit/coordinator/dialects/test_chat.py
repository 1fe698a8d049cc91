"""POST /v1/chat/completions, whole and streamed, with a fake generator: also effort, calls and broken calls."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from coordinator.prompts.request_settings import BUDGETS
from coordinator.schedule.request import GenerationEvent, GenerationRequest, PrefillProgress, TokenChunk
from tests.support.api.api_client import CALL, USER, ApiClient, Events, api_saying, tiny_tokenizer
from tests.support.api.fake_generator import FakeGenerator

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def test_a_whole_answer_has_openais_shape() -> None:
    """Text before the end of the think block is reasoning; usage counts prompt, answer, cache and drafts."""
    api = api_saying("hm\n</think>\n\nHello there", cached=3)
    response = await api.chat()
    assert response.status_code == 200
    answer = response.json()
    assert response.headers["x-request-id"] == answer["id"]
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello there", "reasoning_content": "hm"},
        "logprobs": None,
        "finish_reason": "stop",
    }
    (request,) = api.generator.requests
    tokens = tiny_tokenizer().encode(api.generator.text)
    reasoning = tiny_tokenizer().encode("hm\n</think>")
    assert answer["usage"] == {
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(tokens),
        "total_tokens": len(request.prompt) + len(tokens),
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {
            "reasoning_tokens": len(reasoning),
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 3,
        },
    }


class RecoveringGenerator(FakeGenerator):
    """A generator whose workers restore prompt and answer from a backup after each window."""

    async def events_of(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events, and the progress of a recovery after each window."""
        async for event in super().events_of(request):
            yield event
            if isinstance(event, TokenChunk):
                restored = len(request.prompt) + len(event.tokens)
                yield PrefillProgress(restored, restored, restored)


async def test_a_recovery_adds_no_cached_tokens() -> None:
    """The tokens that workers restore during an answer are no hit of the prefix cache, and exceed the prompt."""
    api = ApiClient(RecoveringGenerator(tiny_tokenizer(), "hm\n</think>\n\nHello", cached=3))
    usage = (await api.chat()).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_the_prompt_is_the_rendered_chat() -> None:
    """Text parts are joined, developer is system, template variables reach the template."""
    api = api_saying("ok")
    await api.chat(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert api.generator.prompt_text() == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    """A stream has the role, deltas, the finish_reason, the usage if requested, and [DONE]."""
    text = "hm\n</think>\n\nHello 🎉 there\n\nbye"
    whole = (await api_saying(text).chat(seed=1)).json()
    events = await api_saying(text).stream(seed=1, stream_options={"include_usage": True})
    assert events.done
    assert events.data[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    message = whole["choices"][0]["message"]
    assert "".join(events.deltas("reasoning_content")) == message["reasoning_content"] == "hm"
    assert "".join(events.deltas("content")) == message["content"] == "Hello 🎉 there\n\nbye"
    assert events.finish_reasons() == ["stop"]
    assert events.data[-2]["choices"][0]["delta"] == {}
    assert events.data[-1]["choices"] == []
    assert events.data[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in events.data[:-1])
    assert {chunk["object"] for chunk in events.data} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in events.data}) == 1
    assert all("\ufffd" not in text for text in events.deltas("content"))


async def test_several_choices_have_their_own_seeds_and_indices() -> None:
    """`n` requests with seeds seed, seed+1, …; each choice is its own text; the prompt counts once."""

    def by_seed(request: GenerationRequest) -> str:
        return f"</think>answer {request.params.seed}"

    api = api_saying("", answer=by_seed)
    whole = (await api.chat(n=3, seed=2**64 - 2)).json()
    contents = [choice["message"]["content"] for choice in whole["choices"]]
    assert contents == [f"answer {2**64 - 2}", f"answer {2**64 - 1}", "answer 0"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["prompt_tokens"] == len(api.generator.requests[0].prompt)
    events = await api.stream(n=2, seed=5)
    assert ["".join(events.deltas("content", index)) for index in (0, 1)] == ["answer 5", "answer 6"]
    assert events.finish_reasons() == ["stop", "stop"]


async def test_tool_calls_whole_and_streamed() -> None:
    """Calls have ids, names and JSON arguments; the deltas of a stream hold them piece by piece."""
    api = api_saying(f"</think>I look.\n\n{CALL}\n{CALL}")
    (choice,) = (await api.chat(tools=[TOOL])).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Rome"}] * 2
    assert all(set(call) == {"id", "type", "function"} for call in calls)
    events = await api.stream(tools=[TOOL])
    streamed = [call for calls in events.deltas("tool_calls") for call in calls]
    by_index = [[call for call in streamed if call["index"] == index] for index in (0, 1)]
    for pieces in by_index:
        assert len(pieces) > 4
        assert [set(call) for call in pieces[1:]] == [{"index", "function"}] * (len(pieces) - 1)
        arguments = "".join(call["function"]["arguments"] for call in pieces)
        assert arguments == calls[0]["function"]["arguments"]
    assert by_index[0][0]["id"] != by_index[1][0]["id"]
    assert "".join(events.deltas("content")) == "I look."
    assert events.finish_reasons() == ["tool_calls"]


async def test_an_answer_cut_after_a_call_says_that_it_was_cut() -> None:
    """The finish reason is the limit, and the complete call is in the answer."""
    text = f"</think>{CALL} and so on and on"
    limit = len(tiny_tokenizer().encode(text)) - 2
    (choice,) = (await api_saying(text).chat(tools=[TOOL], max_tokens=limit)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("window", [1, 3, 50])
async def test_a_stop_string_ends_the_text_and_the_request(window: int) -> None:
    """The text ends before the stop string, and tokens count up to the one that completed it."""
    api = api_saying("</think>one two three four five", window=window, hang_after=40)
    answer = (await api.chat(stop=["e f", "never"])).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "one two thre"
    assert choice["finish_reason"] == "stop"
    tokens, text = 0, ""
    for token in tiny_tokenizer().encode(api.generator.text):
        tokens += 1
        text += tiny_tokenizer().token_bytes(token).decode()
        if "e f" in text:
            break
    assert answer["usage"]["completion_tokens"] == tokens
    assert "accepted_prediction_tokens" in answer["usage"]["completion_tokens_details"]


async def test_a_stop_string_stops_only_its_choice() -> None:
    """The other choice continues to its end."""

    def by_seed(request: GenerationRequest) -> str:
        return "</think>ab STOP" + " cd" * 200 if request.params.seed == 0 else "</think>long enough to go on"

    api = api_saying("", answer=by_seed, window=1)
    answer = (await api.chat(n=2, seed=0, stop="STOP")).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["ab ", "long enough to go on"]
    assert api.generator.cancelled == [f"{answer['id']}-0"]


async def test_a_stop_string_that_is_a_control_token_stops_as_a_token() -> None:
    """`<|im_start|>` adds no text to an answer, so the engine stops at its token."""
    api = api_saying("hi")
    await api.chat(stop=["<|im_start|>", "x"])
    (start,) = tiny_tokenizer().encode("<|im_start|>")
    (end,) = tiny_tokenizer().encode("<|im_end|>")
    assert api.generator.requests[0].stop_tokens == {start, end}


async def test_logprobs_of_every_token() -> None:
    """Every token, of reasoning too, has an entry with its bytes and alternatives."""
    text = "hm</think>Hi 🎉"
    tokens = tiny_tokenizer().encode(text)
    answer = (await api_saying(text).chat(logprobs=True, top_logprobs=2)).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert [entry["logprob"] for entry in entries] == [-token / 1000 for token in tokens]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    alone = (await api_saying(text).chat(logprobs=True)).json()
    assert alone["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_a_stream_tells_the_origin_of_each_token_on_request() -> None:
    """With `token_origins` the letters of all chunks cover the text's tokens: drafts first in each window."""
    text = "hm\n</think>\n\nHello there, friend of mine"
    api = api_saying(text, window=3, accepted=2)
    events = await api.stream(stream_options={"token_origins": True})
    entries = [entry for chunk in events.data for entry in chunk["choices"]]
    letters = "".join(entry.get("token_origins", "") for entry in entries)
    tokens = len(tiny_tokenizer().encode(text))
    assert letters == ("dds" * tokens)[: len(letters)]
    assert tokens - len(letters) <= 1
    assert all(entry["token_origins"] for entry in entries if entry["delta"].get("content", "").strip())
    plain = await api.stream()
    assert not any("token_origins" in entry for chunk in plain.data for entry in chunk["choices"])


@pytest.mark.parametrize("n", [1, 2])
async def test_token_ids_are_returned_as_vllm_does(n: int) -> None:
    """The ids of a stream add up to those of the answer, with the tokens of a stop string. The prompt's come once."""
    api = api_saying("hm\n</think>\n\nHello STOP there")
    asked: Any = {"return_token_ids": True, "stop": "STOP", "n": n, "seed": 1}
    whole = (await api.chat(**asked)).json()
    prompt = list(api.generator.requests[0].prompt)
    generated = list(tiny_tokenizer().encode("hm\n</think>\n\nHello STOP"))
    assert whole["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [generated] * n
    events = await api.stream(**asked)
    assert events.data[0]["prompt_token_ids"] == prompt
    assert [chunk["prompt_token_ids"] for chunk in events.data[n:] if "prompt_token_ids" in chunk] == []
    entries = [entry for chunk in events.data for entry in chunk["choices"]]
    for index in range(n):
        ids = [entry["token_ids"] for entry in entries if entry["index"] == index]
        assert list(chain(*ids)) == generated
    plain = (await api.chat()).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


class SilentGenerator(FakeGenerator):
    """A generator that reports no progress of the prompt."""

    async def events_of(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the tokens and the end."""
        async for event in super().events_of(request):
            if not isinstance(event, PrefillProgress):
                yield event


async def test_the_first_chunk_has_the_prompts_tokens_without_progress() -> None:
    """The role and the tokens of the prompt come first, also if the first event has tokens."""
    events = await ApiClient(SilentGenerator(tiny_tokenizer())).stream(return_token_ids=True)
    assert events.data[0]["choices"][0]["delta"]["role"] == "assistant"
    assert ["prompt_token_ids" in chunk for chunk in events.data].index(True) == 0


async def test_the_last_message_is_continued() -> None:
    """The prompt ends with the text of the assistant's message."""
    history = [USER, {"role": "assistant", "content": "The answer is"}]
    asked: Any = {"messages": history, "continue_final_message": True, "add_generation_prompt": False}
    api = api_saying(" 42.")
    answer = (await api.chat(**asked)).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": " 42."}
    (request, *_) = api.generator.requests
    assert api.generator.prompt_text(0).endswith("The answer is")
    before = b"".join(map(tiny_tokenizer().token_bytes, request.prompt[: request.turn])).decode()
    assert before.endswith("<|im_end|>\n"), "the prefix cache may keep the turns before"
    alone = await api.chat(**{**asked, "messages": history[1:]})
    assert alone.status_code == 200, alone.text


ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("page", ["README.md", "docs/macs.md"])
async def test_the_first_chat_has_its_answer_in_the_content(page: str) -> None:
    """A new user sees the answer at once, and not reasoning in another field."""
    (body,) = re.findall(r"--data '(\{\"messages\".*)'", (ROOT / page).read_text())
    api = ApiClient(FakeGenerator(tiny_tokenizer(), "Hello"))
    reply = await api.post("/v1/chat/completions", body.encode())
    if json.loads(body).get("stream"):
        events = Events.read(reply.status_code, reply.text)
        assert "".join(events.deltas("content")) == "Hello"
        assert not events.deltas("reasoning_content")
    else:
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == "Hello"
        assert not message.get("reasoning_content")


CUSTOM_CALL = "<tool_call>\n<function=note>\n<parameter=input>\nBuy milk\n</parameter>\n</function>\n</tool_call>"
ANSWERS = {
    "text": "Thought\n</think>\n\nHello there",
    "custom call": f"Thought\n</think>\n\nNow:\n{CUSTOM_CALL}",
    "two calls": f"Thought\n</think>\n\n{CUSTOM_CALL}\n{CALL}\n",
    "cut call": f"Thought\n</think>\n\n{CUSTOM_CALL[:70]}",
    "call in reasoning": f"Thought\n{CUSTOM_CALL}\n</think>\n\nDone",
}


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
async def test_a_stream_has_every_log_probability(text: str, window: int) -> None:
    """The chunks have the tokens, log-probabilities and origins of the whole answer, also of what they do not show."""
    api = api_saying(text, window=window, end="length" if text == ANSWERS["cut call"] else "stop")
    custom = {"type": "custom", "custom": {"name": "note"}}
    body: Any = {"tools": [custom, TOOL], "logprobs": True, "top_logprobs": 1, "n": 2, "return_token_ids": True}
    whole = (await api.chat(**body)).json()
    events = await api.stream(**body, stream_options={"token_origins": True})
    for index, choice in enumerate(whole["choices"]):
        entries = [entry for chunk in events.data for entry in chunk["choices"] if entry["index"] == index]
        found = [one for entry in entries for one in (entry["logprobs"] or {"content": ()})["content"]]
        assert found == choice["logprobs"]["content"]
        assert [token for entry in entries for token in entry["token_ids"]] == choice["token_ids"]
        assert len(found) == len(choice["token_ids"])
        assert len("".join(entry.get("token_origins", "") for entry in entries)) == len(found)


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
