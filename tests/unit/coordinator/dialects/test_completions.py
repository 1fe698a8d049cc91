"""POST /v1/completions, whole and streamed, with a fake generator."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from coordinator.schedule.request import GenerationRequest
from tests.support.api.api_client import api_saying, tiny_tokenizer


async def test_a_whole_answer_is_the_text_as_generated() -> None:
    """Leading spaces and markers stay, because the text is not parsed."""
    answer = (await api_saying(" Paris.<think>\n").complete()).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": " Paris.<think>\n", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["total_tokens"] == (answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"])


@pytest.mark.parametrize("as_tokens", [False, True])
async def test_several_prompts_each_have_n_choices_in_order(as_tokens: bool) -> None:
    """Choice p·n+i is answer i to prompt p and has the seed plus i; each prompt counts once."""

    def tell(request: GenerationRequest) -> str:
        return f"{len(request.prompt)}:{request.params.seed}"

    words: list[str] = ["a", "ab🎉"]
    lengths = [len(tiny_tokenizer().encode(word)) for word in words]
    prompt = [list(tiny_tokenizer().encode(word)) for word in words] if as_tokens else words
    answer = (await api_saying("", answer=tell).complete(prompt=prompt, n=2, seed=7)).json()
    assert [choice["text"] for choice in answer["choices"]] == [
        f"{length}:{seed}" for length in lengths for seed in (7, 8)
    ]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


async def test_one_prompt_as_token_ids_is_used_as_it_is() -> None:
    """A prompt of token ids reaches the engine unchanged."""
    api = api_saying("x")
    await api.complete(prompt=[5, 6, 7])
    assert [request.prompt for request in api.generator.requests] == [(5, 6, 7)]


async def test_a_stream_adds_up_to_the_whole_text() -> None:
    """A stream has the same text and usage, the finish_reason and [DONE]; comments report the prefill progress."""
    text = "one 🎉 two three"
    asked: Any = {"stream_options": {"include_usage": True}}
    events = await api_saying(text).stream("/v1/completions", **asked)
    assert events.data[-1]["usage"] == (await api_saying(text).complete()).json()["usage"]
    entries = [entry for chunk in events.data for entry in chunk["choices"]]
    assert "".join(entry["text"] for entry in entries) == text
    assert events.finish_reasons() == ["stop"]
    assert events.done
    assert events.comments == ["prefill 1/2", "prefill 2/2"]


async def test_logprobs_name_each_token_and_its_rivals() -> None:
    """Tokens of one character are named by their bytes; a stream has the same tokens."""
    text = "ab 🎉c"
    answer = (await api_saying(text).complete(logprobs=2)).json()
    told = answer["choices"][0]["logprobs"]
    names = "".join(told["tokens"])
    assert names.startswith("ab")
    assert "bytes:\\xf0" in names
    assert len(told["tokens"]) == len(told["token_logprobs"])
    assert all(len(top) == 2 for top in told["top_logprobs"])
    events = await api_saying(text).stream("/v1/completions", logprobs=2)
    entries = [entry["logprobs"] for chunk in events.data for entry in chunk["choices"]]
    assert [name for entry in entries if entry for name in entry["tokens"]] == told["tokens"]
    alone = (await api_saying(text).complete(logprobs=0)).json()
    assert alone["choices"][0]["logprobs"]["top_logprobs"] is None


async def test_ignore_eos_and_stop_token_ids_reach_the_engine() -> None:
    """With `ignore_eos` only the ids of the request stop the engine."""
    api = api_saying("x")
    await api.complete(ignore_eos=True, stop_token_ids=[3])
    await api.complete(stop_token_ids=[3])
    (end,) = tiny_tokenizer().encode("<|im_end|>")
    assert [request.stop_tokens for request in api.generator.requests] == [{3}, {3, end}]


async def test_token_ids_are_returned_as_vllm_does() -> None:
    """Each choice has the ids of its prompt, in its first chunk only, and of its text."""
    api = api_saying("one two three")
    asked: Any = {"prompt": ["a", "ab"], "return_token_ids": True}
    prompts = [list(tiny_tokenizer().encode(text)) for text in asked["prompt"]]
    generated = list(tiny_tokenizer().encode("one two three"))
    whole = (await api.complete(**asked)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == prompts
    assert [choice["token_ids"] for choice in whole] == [generated] * 2
    events = await api.stream("/v1/completions", **asked)
    entries = [entry for chunk in events.data for entry in chunk["choices"]]
    for index, prompt in enumerate(prompts):
        first, *rest = [entry for entry in entries if entry["index"] == index]
        assert first["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in entry for entry in rest)
        ids = [entry["token_ids"] for entry in (first, *rest)]
        assert list(chain(*ids)) == generated


async def test_too_many_prompts_are_refused_before_they_are_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokenizing 100,000 prompts would take the server's time for nothing."""
    encoded: list[str] = []
    api = api_saying("x")
    own = api.generator.tokenizer.encode

    def encode(text: str) -> tuple[int, ...]:
        encoded.append(text)
        return own(text)

    monkeypatch.setattr(api.generator.tokenizer, "encode", encode)
    answer = await api.complete(prompt=["a"] * 50_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("n: 50000 prompts with n 1 exceed")
    assert encoded == []


NUMBERS = [
    ('{"type": "number", "minimum": NaN}', "response_format"),
    ('{"type": "number", "maximum": 1e999}', "response_format"),
    ('{"const": 1e400}', "response_format"),
    ('{"type": "object", "properties": {"a": {"minimum": -Infinity}}}', "tools"),
]


@pytest.mark.parametrize(("schema", "field"), NUMBERS)
async def test_a_number_that_is_none_is_refused_by_its_field(schema: str, field: str) -> None:
    """JSON has no NaN, and a float no 1e999. Neither reaches the compiler of formats."""
    shape = {
        "response_format": '{"type": "json_schema", "json_schema": {"schema": HERE}}',
        "tools": '[{"type": "function", "function": {"name": "f", "parameters": HERE}}], "tool_choice": "required"',
    }[field]
    asked = shape.replace("HERE", schema)
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "{field}": {asked}}}'
    reply = await api_saying("x").post("/v1/chat/completions", body.encode())
    assert reply.status_code == 400, reply.text
    assert field in reply.json()["error"]["message"]
    assert "finite" in reply.json()["error"]["message"]
