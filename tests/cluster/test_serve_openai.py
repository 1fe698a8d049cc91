"""The clients of OpenAI and Anthropic with `mtp-coord serve` and two workers, all of them real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.cluster.conftest import Pool
from tests.support.processes.processes import serving

KEY = "of-this-test-alone"
USER: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]
FLAGS = ("--mtp", "2", "--dtype", "float32", "--served-model-name", "claude-x")


@pytest.mark.smoke
def test_dialects_give_the_same_text(pool: Pool, tmp_path: Path) -> None:
    """A greedy answer to the same prompt is equal in OpenAI's and Anthropic's dialects, whole and streamed."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    asked: Any = {"model": "claude-x", "messages": USER, "max_tokens": 40}
    common: Any = {"api_key": KEY, "max_retries": 0, "timeout": 60}
    env = {"MTP_API_KEY": f"other {KEY}"}
    with (
        serving(tmp_path, "builtin", pool(2), *FLAGS, env=env) as coordinator,
        openai.OpenAI(base_url=f"{coordinator.url}/v1", **common) as client,
        anthropic.Anthropic(base_url=coordinator.url, **common) as other,
    ):
        reply = client.chat.completions.create(**asked, temperature=0, extra_body=off)
        whole = other.messages.create(**asked, extra_body={"temperature": 0})
        with other.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        (block,) = message.content
        assert isinstance(block, anthropic.types.TextBlock)
        assert block.text == reply.choices[0].message.content
        assert message.stop_reason in ("max_tokens", "end_turn")
