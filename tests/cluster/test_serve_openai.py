"""OpenAI's own client with `mtp-coord serve` and two workers, all of them real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.cluster.conftest import Pool
from tests.support.processes.processes import Coordinator, serving

KEY = "of-this-test-alone"
USER: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture(scope="module")
def coordinator(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("serve")
    flags = ["--mtp", "2", "--dtype", "float32", "--log-level", "debug"]
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


@pytest.mark.smoke
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
