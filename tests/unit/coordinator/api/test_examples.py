"""The requests that the pages show to a new user."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.api.api_client import ApiClient, Events, tiny_tokenizer
from tests.support.api.fake_generator import FakeGenerator

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
