"""OpenAI's own client with `mtp-coord serve` and two workers, all of them real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from tests.cluster.conftest import Pool
from tests.support.processes.processes import Coordinator, serving

KEY = "of-this-test-alone"
BEARER = {"Authorization": f"Bearer {KEY}"}
PAGE = "https://chat.example"
CODE = "import os\nimport sys\n\n\ndef find_files(path, suffix):\n    "
USER: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def coordinator(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("serve")
    flags = ["--mtp", "2", "--dtype", "float32", "--log-level", "debug", "--allowed-origins", PAGE]
    flags += ["--served-model-name", "claude-x"]
    with serving(folder, "builtin", pool(2), *flags, env={"MTP_API_KEY": f"other {KEY}"}) as found:
        yield found


@pytest.fixture(scope="module")
def url(coordinator: Coordinator) -> str:
    return coordinator.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_dir())


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Text, finish reason and usage of a completion are the same streamed or whole."""
    asked: Any = {"model": "builtin", "prompt": CODE, "max_tokens": 40, "temperature": 0.7}
    whole = client.completions.create(**asked, seed=5)
    chunks = list(
        client.completions.create(
            **asked, seed=5, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text != ""
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "length"
    texts = [choice.text for choice in choices if choice.text]
    assert len(texts) > 30, "a token has a chunk of its own, although three share a window"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.prompt_tokens == len(tokenizer.encode(CODE))
        assert usage.completion_tokens == 40
        details = usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens
        assert details.rejected_prediction_tokens is not None


def test_an_allowed_page_may_call_from_a_browser(url: str) -> None:
    """The browser's preflight request, which has no key, succeeds for the allowed page only."""
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    for page, status in ((PAGE, 200), ("https://evil.example", 400)):
        reply = httpx.options(f"{url}/v1/chat/completions", headers={"Origin": page, **asks})
        assert reply.status_code == status
        assert reply.headers.get("access-control-allow-origin") == (PAGE if status == 200 else None)


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    """A chat's message is the sum of its deltas; the role comes first, the finish reason last."""
    asked: Any = {"model": "builtin", "messages": USER, "max_completion_tokens": 30, "seed": 2}
    whole = client.chat.completions.create(**asked, temperature=0.8)
    stream = client.chat.completions.create(**asked, temperature=0.8, stream=True)
    deltas = [chunk.choices[0] for chunk in stream]
    text = "".join(_said(choice.delta) for choice in deltas)
    assert text == _said(whole.choices[0].message) != ""
    assert deltas[0].delta.role == "assistant"
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason


def _said(message: Any) -> str:
    """Return reasoning and content of a message or delta."""
    return ((message.model_extra or {}).get("reasoning_content") or "") + (message.content or "")


def test_dialects_give_the_same_text(client: openai.OpenAI, url: str) -> None:
    """A greedy answer to the same prompt is equal in OpenAI's and Anthropic's dialects, whole and streamed."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    reply = client.chat.completions.create(
        model="builtin", messages=USER, max_tokens=40, temperature=0, extra_body=off
    )
    expected = reply.choices[0].message.content
    asked: Any = {"model": "claude-x", "messages": USER, "max_tokens": 40}
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as other:
        whole = other.messages.create(**asked, extra_body={"temperature": 0})
        with other.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        (block,) = message.content
        assert isinstance(block, anthropic.types.TextBlock)
        assert block.text == expected
        assert message.stop_reason in ("max_tokens", "end_turn")


def test_the_seed_decides(client: openai.OpenAI) -> None:
    """The same seed gives the same answer, another seed another one; greedy answers need no seed."""

    def text(**asked: Any) -> str:
        reply = client.completions.create(model="builtin", prompt=CODE, max_tokens=24, **asked)
        return str(reply.choices[0].text)

    assert text(seed=1, temperature=1.0) == text(seed=1, temperature=1.0)
    assert text(seed=1, temperature=1.0) != text(seed=2, temperature=1.0)
    assert text(temperature=0) == text(temperature=0, seed=9)


def test_several_choices_and_prompts(client: openai.OpenAI) -> None:
    """`n` answers have different seeds, the first that of a single answer; prompts keep their order."""
    one = client.completions.create(
        model="builtin", prompt=CODE, max_tokens=12, temperature=1.0, seed=3
    )
    many = client.completions.create(
        model="builtin", prompt=[CODE, "x = "], n=3, max_tokens=12, temperature=1.0, seed=3
    )
    texts = [choice.text for choice in many.choices]
    assert [choice.index for choice in many.choices] == list(range(6))
    assert texts[0] == one.choices[0].text
    assert len(set(texts)) > 4


def test_logprobs_are_the_targets_own(client: openai.OpenAI) -> None:
    """The most likely token is the greedy one, and the alternatives include the chosen token."""
    reply = client.chat.completions.create(
        model="builtin",
        messages=USER,
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    for entry in logprobs.content:
        best = entry.top_logprobs[0]
        assert (entry.token, entry.logprob) == (best.token, best.logprob)
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    """A stop string is not part of the text, whole or streamed, also if it spans tokens."""
    asked: Any = {"model": "builtin", "prompt": CODE, "max_tokens": 60, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    stop = free[20:24]
    cut = client.completions.create(**asked, stop=stop).choices[0]
    pieces = client.completions.create(**asked, stop=[stop], stream=True)
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"
    assert "".join(c.choices[0].text for c in pieces if c.choices) == cut.text


def test_penalties_bias_and_filters_have_an_effect(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    """A bias of 100 forces a token, and a frequency penalty changes a greedy text."""
    asked: Any = {"model": "builtin", "prompt": CODE, "max_tokens": 16, "temperature": 0}
    (x,) = tokenizer.encode("x")
    forced = client.completions.create(**asked, logit_bias={str(x): 100})
    assert forced.choices[0].text == "x" * 16
    free = client.completions.create(**asked).choices[0].text
    other = client.completions.create(**asked, frequency_penalty=2.0).choices[0].text
    assert other != free
    one = client.completions.create(
        **{**asked, "temperature": 2.0}, seed=8, extra_body={"top_k": 1}
    )
    assert one.choices[0].text == free


def test_tools_reach_the_prompt(client: openai.OpenAI) -> None:
    """The prompt contains the tools; an answer without a call is text."""
    without = client.chat.completions.create(model="builtin", messages=USER, max_tokens=8)
    tools = client.chat.completions.create(
        model="builtin", messages=USER, max_tokens=8, tools=[TOOL]
    )
    assert without.usage is not None
    assert tools.usage is not None
    assert tools.usage.prompt_tokens > without.usage.prompt_tokens + 10
    assert tools.choices[0].finish_reason == "length"


def test_models_and_health(client: openai.OpenAI, url: str) -> None:
    """The served model is listed; the operators' paths answer, and /status has figures of the answer."""
    client.completions.create(model="builtin", prompt=CODE, max_tokens=24, temperature=0)
    assert [model.id for model in client.models.list()] == ["builtin", "claude-x"]
    for path in ("/health", "/ready", "/status", "/metrics"):
        assert httpx.get(url + path, headers=BEARER, timeout=60).status_code == 200
    status = httpx.get(url + "/status", headers=BEARER, timeout=60).json()
    layers = [node["span"].split("-") for node in status["nodes"]]
    assert [n for a, b in layers for n in range(int(a), int(b) + 1)] == list(range(8))
    assert {node["health"] for node in status["nodes"]} == {"ready"}
    assert all(0 < node["memory_used"] < node["memory_limit"] for node in status["nodes"])
    assert all(0 < node["stage_ms"] < 60_000 for node in status["nodes"])
    assert status["mtp"] == "2"
    assert 0 < status["accepted_by_position"][0] <= status["drafted_by_position"][0]


def test_keys_of_the_server(coordinator: Coordinator, client: openai.OpenAI) -> None:
    """Without a key only the paths for supervisors answer; the log contains no key."""
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert client.with_options(api_key="other").models.list().data
    found = [
        httpx.get(coordinator.url + path, timeout=60).status_code
        for path in ("/health", "/ready", "/v1/models", "/status", "/metrics")
    ]
    assert found == [200, 200, 401, 401, 401]
    assert coordinator.records("serving")
    assert KEY not in coordinator.text()


def test_refusals_name_the_field(client: openai.OpenAI) -> None:
    """An unknown field, an invalid value, another model and an empty list of messages raise OpenAI's exceptions."""
    asked: Any = {"model": "builtin", "messages": USER, "max_tokens": 4}
    for change, field in (
        ({"extra_body": {"best_effort": True}}, "best_effort"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**asked, **change})
        assert (refused.value.param or "").startswith(field), refused.value
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "gpt-4"})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "x", "max_tokens": 1e400}',
        b"[" * 5000,
    ],
    ids=["empty", "cut", "list", "string", "not UTF-8", "infinite", "nested"],
)
def test_a_body_that_is_no_json_object(url: str, body: bytes) -> None:
    """Any bytes that are not a JSON object get a 400 in OpenAI's format."""
    for path in ("completions", "chat/completions"):
        reply = httpx.post(
            f"{url}/v1/{path}", content=body, headers={"Content-Type": "application/json", **BEARER}
        )
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"]
        assert "Traceback" not in reply.text
