"""Sessions of coding agents, replayed over two workers in the request shapes of Claude Code and Codex."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Pool
from tests.support.api.agent_transcripts import claude_code, codex
from tests.support.processes.processes import Coordinator, serving

HEADERS = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
}
AGENT_TOKENS = 28_000
"""Tokens. The first prompt of Claude Code has 28,190."""

AGENT_WORDS, TOOLS = 12_000, 30
"""Words of the system prompt, and tools, which make a first prompt of that size."""

PATIENT = ("--failure-timeout", "30")
"""A worker that computes a long prompt on a busy machine answers late. Recoveries would begin the prompt again."""


@pytest.fixture(scope="module")
def coordinator(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Serve the built-in model from two workers, with three drafts per window."""
    flags = ("--mtp", "3", "--served-model-name", "claude-x", "--clamp-max-tokens", *PATIENT)
    with serving(tmp_path_factory.mktemp("serve"), "builtin", pool(2), *flags) as found:
        yield found


def events_of(url: str, path: str, body: Any) -> list[Any]:
    """Send a streamed request and return its events."""
    found = []
    with httpx.stream("POST", url + path, json=body, headers=HEADERS, timeout=120) as reply:
        assert reply.status_code == 200, reply.read().decode()
        for line in reply.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
    return found


def replay_claude_code(url: str, words: int, steps: int, tools: int) -> list[Any]:
    """Replay a session. Return the usage of each answer, after checks of the order of its events."""
    assert httpx.head(url, timeout=60).status_code == 200
    usages = []
    for body in claude_code(words, steps, tools):
        events = events_of(url, "/v1/messages?beta=true", {"model": "claude-x", **body})
        types = [event["type"] for event in events]
        assert (types[0], types[-2:]) == ("message_start", ["message_delta", "message_stop"])
        assert types.count("content_block_start") == types.count("content_block_stop")
        assert events[-2]["delta"]["stop_reason"] in ("max_tokens", "end_turn", "tool_use")
        usages.append(events[-2]["usage"])
    return usages


def check_cache(usages: list[Any], shared: int) -> None:
    """Assert that every prompt but the first was found in the cache up to its last turn, `shared` tokens at least."""
    totals = [each["cache_read_input_tokens"] + each["input_tokens"] for each in usages]
    assert totals == sorted(totals)
    for before, each in zip(totals, usages[1:], strict=False):
        assert each["cache_read_input_tokens"] >= shared
        assert each["input_tokens"] < before / 2


def test_a_session_of_claude_code(coordinator: Coordinator) -> None:
    """Three system blocks, tools and a loop of calls and results work, and each prompt continues the cached one."""
    check_cache(replay_claude_code(coordinator.url, words=100, steps=3, tools=4), shared=1000)
    body = {"model": "claude-x", **next(claude_code(100, tools=4))}
    count = {k: v for k, v in body.items() if k not in ("max_tokens", "stream", "metadata")}
    url = f"{coordinator.url}/v1/messages/count_tokens"
    counted = httpx.post(url, json=count, headers=HEADERS, timeout=60).json()["input_tokens"]
    whole = {**body, "stream": False}
    reply = httpx.post(f"{coordinator.url}/v1/messages", json=whole, headers=HEADERS, timeout=120)
    usage = reply.json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


SHARE = 0.95
"""Least share of a prompt that the cache has from the second turn on."""


@pytest.mark.slow
def test_turns_whose_first_block_changes_find_their_prefix(coordinator: Coordinator) -> None:
    """Claude Code sends another hash with every request, before everything else."""
    usages = replay_claude_code(coordinator.url, words=800, steps=3, tools=12)
    for usage in usages[1:]:
        cached = usage["cache_read_input_tokens"]
        assert cached / (cached + usage["input_tokens"]) >= SHARE, usages


@pytest.mark.slow
def test_a_session_of_codex(coordinator: Coordinator) -> None:
    """Instructions, tools, reasoning items, a call with broken arguments and its result reach the model."""
    cached = []
    for body in codex(100, steps=2, tools=1):
        events = events_of(coordinator.url, "/v1/responses", {"model": "claude-x", **body})
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        final = events[-1]["response"]
        assert events[-1]["type"] == f"response.{final['status']}"
        assert final["status"] in ("completed", "incomplete")
        cached.append(final["usage"]["input_tokens_details"]["cached_tokens"])
    assert all(tokens > 500 for tokens in cached[1:])


def test_the_built_in_model_has_room_for_an_agent(coordinator: Coordinator) -> None:
    """A first prompt of Claude Code's size is counted, fits beside its answer, and is no error."""
    body = next(claude_code(AGENT_WORDS, tools=TOOLS))
    count = {k: body[k] for k in ("system", "tools", "messages", "thinking")}
    url = f"{coordinator.url}/v1/messages/count_tokens"
    counted = httpx.post(url, json={"model": "claude-x", **count}, headers=HEADERS, timeout=60)
    listed = httpx.get(f"{coordinator.url}/v1/models", timeout=60).json()["data"]
    served = next(each for each in listed if each["loaded"])
    assert AGENT_TOKENS < counted.json()["input_tokens"] < served["max_model_len"] - 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_session_of_claude_codes_size(coordinator: Coordinator) -> None:
    """The built-in model computes the first prompt once; each further request finds it in the cache."""
    usages = replay_claude_code(coordinator.url, words=AGENT_WORDS, steps=3, tools=TOOLS)
    assert usages[0]["input_tokens"] > AGENT_TOKENS
    check_cache(usages, shared=AGENT_TOKENS)
