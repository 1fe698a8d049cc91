"""Request fields: values reach the engine, and a wrong one is rejected by name in OpenAI's format."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from coordinator.web.context import ApiOptions
from proto.params import SamplingParams
from tests.support.api.api_client import PATIENCE, REQUESTS, USER, ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 11,
    "min_p": 0.05,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": 42,
}


async def test_every_sampling_field_reaches_the_engine() -> None:
    """The engine gets the values that the client sent, on both endpoints."""
    api = ApiClient()
    await api.chat(**SAMPLING, logit_bias={"5": -100, "6": 2.5}, logprobs=True, top_logprobs=3)
    await api.complete(**SAMPLING, logit_bias={"5": -100, "6": 2.5}, logprobs=3)
    expected = SamplingParams(**SAMPLING, logit_bias={5: -100, 6: 2.5}, logprobs=3)
    assert [replace(r.params, xtc_exempt=()) for r in api.generator.requests] == [expected, expected]


@pytest.mark.parametrize("path", REQUESTS)
async def test_xtc_spares_the_ends_and_line_breaks_in_every_dialect(path: str) -> None:
    """Every dialect takes the two fields. The end of the text, that of reasoning and line breaks are spared."""
    api, tokenizer = ApiClient(), tiny_tokenizer()
    named = {"xtc_probability": 0.3, "xtc_threshold": 0.15}
    fields: dict[str, Any] = {"options": named} if path.startswith("/api/") else named
    response = await api.post(path, REQUESTS[path] | fields)
    assert response.status_code == 200, response.text
    params = api.generator.requests[0].params
    assert (params.xtc_probability, params.xtc_threshold) == (0.3, 0.15)
    assert {*tokenizer.eos_ids, *tokenizer.encode("\n")} <= set(params.xtc_exempt)
    assert {tokenizer.reasoning_end_id} - {None} <= set(params.xtc_exempt)


async def test_a_request_may_choose_its_number_of_drafts() -> None:
    """The engine gets the number, and no number unless the client sends one."""
    api = ApiClient()
    await api.chat(num_draft_tokens=0)
    await api.complete(num_draft_tokens=3)
    await api.chat()
    assert [request.drafts for request in api.generator.requests] == [0, 3, None]
    assert error_of(await api.chat(num_draft_tokens=-1))["param"] == "num_draft_tokens"


async def test_omitted_and_null_fields_have_the_models_defaults() -> None:
    """The checkpoint's recommendations apply to omitted and null fields."""
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    api = ApiClient(defaults=defaults)
    await api.chat(seed=0, temperature=None, top_k=None, stop=None, max_tokens=None, tools=None)
    await api.chat(seed=0, top_k=-1, temperature=0)
    first, second = (request.params for request in api.generator.requests)
    assert first == defaults
    assert (second.top_k, second.greedy, second.top_p) == (0, True, 0.95)


CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": True}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"9" * 5000: 1}}, f"logit_bias.{'9' * 88}"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": [{**USER, "images": ["iVBOR"]}]}, "messages[0].images"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"guided_choice": []}, "guided_choice"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.image_url",
    ),
]


@pytest.mark.parametrize(("body", "param"), CHAT_REFUSALS)
async def test_a_chat_field_that_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    """The error is a 400 with the field's name in message and param, and the engine gets no request."""
    api = ApiClient()
    error = error_of(await api.chat(**body))
    assert error["param"] == param
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert error["type"] == "invalid_request_error"
    assert api.generator.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"echo": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ],
)
async def test_a_completion_field_that_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    """The error is a 400 with the field's name, and the engine gets no request."""
    api = ApiClient()
    error = error_of(await api.complete(**body))
    assert error["param"] == param
    assert api.generator.requests == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"x"', b"\xff", b'{"messages": "\\ud800"}', b'{"temperature": NaN}', b"[" * 9999],
)
async def test_a_body_that_is_no_json_object_is_a_400(content: bytes) -> None:
    """Any bytes that are not a JSON object get an error in OpenAI's format."""
    error_of(await ApiClient().post("/v1/chat/completions", content))


async def test_another_model_is_a_404() -> None:
    """Another model is a 404 as OpenAI sends it; the served id and the alias of mlx-lm's clients are accepted."""
    api = ApiClient()
    error = error_of(await api.chat(model="gpt-4"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    for name in ("tiny", "default_model", None):
        assert (await api.chat(model=name)).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "prompt"),
        ({"max_tokens": 5}, "prompt"),
        ({"max_completion_tokens": 5}, "prompt"),
        ({"max_tokens": 30, "prompt": "a"}, "max_tokens"),
        ({"max_completion_tokens": 30, "prompt": "a"}, "max_completion_tokens"),
    ],
)
async def test_what_exceeds_the_context_is_refused_with_openais_code(body: dict[str, Any], param: str) -> None:
    """The error names the client's field: the prompt that fills the context, or the limit that exceeds the rest."""
    api = ApiClient(context_length=30)
    body = {"prompt": "word " * 40, **body}
    chat = {**body, "messages": [{"role": "user", "content": body["prompt"]}]}
    del chat["prompt"]
    errors = [(error_of(await api.chat(**chat)), "messages" if param == "prompt" else param)]
    if "max_completion_tokens" not in body:
        errors.append((error_of(await api.complete(**body)), param))
    for error, name in errors:
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
        assert name in error["message"]
        assert "30" in error["message"]
    assert (await api.complete(prompt="a", max_tokens=29)).status_code == 200


async def test_without_a_limit_an_answer_may_fill_the_context_up_to_the_default() -> None:
    """The server's default prevents one request from reserving all memory."""
    small = ApiClient(context_length=30)
    await small.complete(prompt=[1, 2])
    assert small.generator.requests[0].max_tokens == 28
    large = ApiClient(context_length=10**6, options=ApiOptions(default_max_tokens=100))
    await large.complete(prompt=[1, 2])
    assert large.generator.requests[0].max_tokens == 100


async def test_a_length_that_is_too_large_is_a_413_at_once() -> None:
    """The server does not wait for the body, of which nothing comes."""
    with serving(ApiClient().app) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as one:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        one.settimeout(PATIENCE)
        one.sendall(f"{head}Content-Length: {20 * 2**20}\r\n\r\n".encode())
        assert (await asyncio.to_thread(one.recv, 1000)).startswith(b"HTTP/1.1 413 ")


async def test_a_compressed_body_is_a_415() -> None:
    """The error names the encoding, and `identity` is none."""
    api, body = ApiClient(), json.dumps({"prompt": "Hi"}).encode()
    for name, content in (("gzip", gzip.compress(body)), ("br", b"x"), ("zstd", b"x")):
        reply = await api.post("/v1/completions", content, headers={"Content-Encoding": name})
        assert f"Content-Encoding: '{name}'" in error_of(reply, 415)["message"]
    assert (await api.post("/v1/completions", body, headers={"Content-Encoding": "identity"})).status_code == 200


async def test_a_body_that_is_too_large_is_a_413() -> None:
    """The server reads no more than the limit."""
    api = ApiClient(options=ApiOptions(max_body_bytes=1000))
    body = json.dumps({"prompt": "x" * 2000}).encode()
    assert "1000 bytes" in error_of(await api.post("/v1/completions", body), 413)["message"]
