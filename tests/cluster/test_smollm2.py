"""A real model in English over workers: the texts of mlx-lm in every turn, in every dialect, and through kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load

from tests.support.api.streams import events_of
from tests.support.checkpoints.smollm2 import smollm2
from tests.support.processes.processes import (
    Cluster,
    Worker,
    as_worker,
    ending,
    launch_worker,
    running_cluster,
    running_workers,
    serving,
)

TOKENS = 16
QUESTIONS = ("What is the capital of France?", "Name a river there.", "Which sea does it flow into?")
SYSTEM = (
    "You are a teacher of geography who answers in one short sentence. You name places by their usual English names. "
    "You know the rivers, mountains, seas, cities and countries of the whole world, the languages that people speak "
    "there, what they grow and build, and how the land looks in summer and in winter. If a question has no answer, you "
    "say so. If a question is about another subject than geography, you answer it as well as you can, and ask whether "
    "the student wants to know more about a place. You are patient and kind, and you never repeat yourself."
)
"""A text that is long enough for a prefix to be kept."""

DEADLINE = 300.0

Messages = list[dict[str, str]]


@cache
def loaded() -> Any:
    """Return the model and the tokenizer of mlx-lm."""
    return load(str(smollm2()))


class Conversation:
    """mlx-lm's own greedy answers, each of which continues the cache of the one before."""

    def __init__(self) -> None:
        self.cache = make_prompt_cache(loaded()[0])
        self.known: list[int] = []

    def answer(self, messages: Messages, count: int = TOKENS) -> str:
        """Return the answer to a conversation that begins with the one before."""
        model, tokenizer = loaded()
        prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        same = next((i for i, (a, b) in enumerate(zip(self.known, prompt, strict=False)) if a != b), len(self.known))
        trim_prompt_cache(self.cache, len(self.known) - same)
        tokens: list[int] = []
        steps = generate_step(mx.array(prompt[same:]), model, max_tokens=count, prompt_cache=self.cache)
        for token, _ in steps:
            if int(token) in tokenizer.eos_token_ids:
                break
            tokens.append(int(token))
        self.known = [*prompt, *tokens][: self.cache[0].offset]
        return str(tokenizer.decode(tokens))


def own_text(messages: Messages, count: int = TOKENS) -> str:
    """Return mlx-lm's own greedy answer."""
    return Conversation().answer(messages, count)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Serve the model over two workers."""
    with running_cluster(tmp_path_factory.mktemp("smollm2"), smollm2(), 2) as found:
        yield found


def asked(url: str, messages: Messages, count: int = TOKENS) -> tuple[str, int]:
    """Return the text of an answer, and the cached tokens of its prompt."""
    body = {"messages": messages, "max_tokens": count, "temperature": 0}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE).raise_for_status().json()
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["message"]["content"], cached


@pytest.mark.timeout(600)
def test_a_conversation_has_the_texts_of_mlx_lm(cluster: Cluster) -> None:
    """Every turn goes on from the one before, whose prefix is kept."""
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    own = Conversation()
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        text, cached = asked(cluster.url, messages)
        assert text == own.answer(messages)
        assert (cached > 0) == (number > 0)
        messages.append({"role": "assistant", "content": text})
    assert "Paris" in messages[2]["content"]


MESSAGES = [{"role": "user", "content": QUESTIONS[0]}]
DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "responses": (
        "/v1/responses",
        {"input": QUESTIONS[0], "max_output_tokens": TOKENS, "temperature": 0},
        lambda reply: reply["output"][0]["content"][0]["text"],
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0},
        lambda reply: reply["content"][0]["text"],
    ),
    "ollama": (
        "/api/chat",
        {"messages": MESSAGES, "stream": False, "options": {"num_predict": TOKENS, "temperature": 0}},
        lambda reply: reply["message"]["content"],
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_has_the_same_answer(cluster: Cluster, dialect: str) -> None:
    """The others than OpenAI's chat, which the conversation has."""
    path, body, text = DIALECTS[dialect]
    reply = httpx.post(f"{cluster.url}{path}", json={"model": "smollm2", **body}, timeout=DEADLINE)
    assert text(reply.raise_for_status().json()) == own_text(MESSAGES)


def streamed(url: str, messages: Messages, after: int, then: Callable[[], object]) -> str:
    """Return the text of a streamed answer. Call `then` once `after` pieces have come."""
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}
    pieces: list[str] = []
    for event in events_of(f"{url}/v1/chat/completions", body):
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                pieces.append(piece)
                if len(pieces) == after:
                    then()
    return "".join(pieces)


def test_a_killed_worker_changes_no_word(cluster: Cluster) -> None:
    """The worker that is left takes all layers, and the answer goes on."""
    messages = [{"role": "user", "content": "Count from one to twenty in words."}]
    assert streamed(cluster.url, messages, 6, cluster.workers[-1].kill) == own_text(messages)
    assert httpx.get(f"{cluster.url}/status", timeout=60).json()["recoveries"] == 1


TOPICS = ("rivers", "bread", "the moon", "bees", "maps", "rain", "music", "ships", "glass", "trees")
FORMS = ("Write a sentence about {}.", "What are {}?", "Give an example of {} in daily life.")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_conversations_with_a_kill_in_every_second_one(tmp_path: Path) -> None:
    """Three workers, of which one is killed in mid-answer and started again."""

    def start(stack: ExitStack, number: int, address: str) -> Worker:
        """Start a worker where another one was killed."""
        flags = ("--model", str(smollm2()), "--listen", address)
        return as_worker(stack.enter_context(ending(launch_worker(tmp_path, f"again-{number}", *flags))))

    with ExitStack() as stack:
        workers = stack.enter_context(running_workers(tmp_path, smollm2(), 3))
        coordinator = stack.enter_context(serving(tmp_path, smollm2(), [w.address for w in workers]))
        for number, question in enumerate(form.format(topic) for topic in TOPICS for form in FORMS):
            victim, kills = workers[number % 3], number % 2
            messages = [{"role": "user", "content": question}]
            first = streamed(coordinator.url, messages, 8 if kills else 0, victim.kill)
            assert first == own_text(messages)
            messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Say more."}]
            assert streamed(coordinator.url, messages, 0, victim.kill) == own_text(messages)
            if kills:
                workers[number % 3] = start(stack, number, victim.address)


def test_the_texts_are_english() -> None:
    """The checkpoint that the tests make is the model that was published."""
    assert own_text(MESSAGES).startswith("The capital of France is Paris")
