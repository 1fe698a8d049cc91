"""The load of a chaos run: clients repeat questions with one correct answer each and compare what they receive."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

READ_SECONDS = 90.0
"""Seconds. Longest time without a token, keep-alives not counted, before a client is reported as hung."""

PROMPT = "def read(path):\n    "


@dataclass(frozen=True)
class Question:
    """One request. Every correct run gives the same answer to the same question."""

    prompt: str
    tokens: int
    temperature: float
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON body of the request to `model`."""
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "top_p": 0.95,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


QUESTIONS = tuple(
    Question(PROMPT * (1 + i % 4), 60 + 40 * (i % 5), 0.0 if i % 2 else 0.8, i) for i in range(12)
)
"""Greedy and sampled questions with prompts and answers of several lengths."""


class HungError(Exception):
    """A client received no token for READ_SECONDS."""


@dataclass
class Answer:
    """The answer that one client received.

    `tokens` is the server's count. `times` holds the arrival of each piece, in seconds since 1970.
    """

    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def pause(self) -> float:
        """Seconds of the longest pause between two pieces."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)


def ask(url: str, model: str, question: Question, answer: Answer | None = None) -> Answer:
    """Return one streamed answer. `answer` is filled while the stream runs.

    Raises HungError if the stream is silent too long, RuntimeError if it ends with an error or is cut.
    """
    answer = answer or Answer()
    answer.times.append(time.time())
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=question.body(model), timeout=READ_SECONDS
    ) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.read().decode()[:200]}")
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                return answer
            if line.startswith("data: {"):
                _take(json.loads(line.removeprefix("data: ")), answer)
            elif time.time() - answer.times[-1] > READ_SECONDS:
                raise HungError
    raise RuntimeError("the stream was cut")


def _take(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise RuntimeError(event["error"]["message"])
    answer.times.append(time.time())
    answer.text += "".join(choice["text"] for choice in event["choices"])
    answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)


@dataclass
class Outcome:
    """The combined result of all answers. `wrong` describes each failed or differing answer."""

    finished: int = 0
    lost: int = 0
    """Number of tokens missing at the end of answers."""
    duplicated: int = 0
    """Number of tokens beyond the expected count."""
    differing: int = 0
    """Number of answers whose text differs from the undisturbed answer."""
    hung: int = 0
    wrong: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def add(self, answer: Answer, wanted: Answer) -> None:
        """Record `answer`, comparing it with `wanted`."""
        self.finished += 1
        self.lost += max(0, wanted.tokens - answer.tokens)
        self.duplicated += max(0, answer.tokens - wanted.tokens)
        if answer.text != wanted.text:
            self.differing += 1
            self.wrong.append(f"{answer.text!r} instead of {wanted.text!r}")
        self.answers.append(Answer(times=answer.times))


class Clients:
    """Threads that send requests until `stop`."""

    def __init__(self, url: str, model: str, wanted: dict[Question, Answer], count: int) -> None:
        self.url, self.model, self.wanted = url, model, wanted
        self.outcome = Outcome()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the running answers. An answer that does not end is counted as hung."""
        self._stop.set()
        deadline = time.monotonic() + 2 * READ_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            self.outcome.hung += thread.is_alive()

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            question = chance.choice(QUESTIONS)
            try:
                answer = ask(self.url, self.model, question)
            except (HungError, httpx.ReadTimeout):
                with self._lock:
                    self.outcome.hung += 1
            except (RuntimeError, httpx.HTTPError) as error:
                with self._lock:
                    self.outcome.wrong.append(f"{type(error).__name__}: {error}")
                self._stop.wait(1.0)
            else:
                with self._lock:
                    self.outcome.add(answer, self.wanted[question])


@contextmanager
def clients(url: str, model: str, wanted: dict[Question, Answer], count: int) -> Iterator[Clients]:
    """Run `count` clients inside the block. All answers have ended when it exits."""
    asking = Clients(url, model, wanted, count)
    asking.start()
    try:
        yield asking
    finally:
        asking.stop()
