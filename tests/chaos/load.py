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

LINE = "def read_{0}(path):\n    with open(path) as file:\n        return file.read({0})\n\n"


@dataclass(frozen=True)
class Question:
    """One request. Every correct run gives the same answer to the same question."""

    prompt: str
    tokens: int
    temperature: float
    seed: int
    logprobs: bool = False
    chat: bool = False

    @property
    def path(self) -> str:
        """The path of the request."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON body of the request to `model`."""
        if self.chat:
            own: dict[str, Any] = {"messages": [{"role": "user", "content": self.prompt}]}
        else:
            own = {"prompt": self.prompt, "logprobs": 2 if self.logprobs else None}
        return {
            **own,
            "model": model,
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "top_p": 0.95,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


QUESTIONS = tuple(
    Question(
        "".join(LINE.format(100 * i + line) for line in range((1, 1, 2, 4, 8, 16)[i // 2])),
        60 + 40 * (i % 5),
        0.0 if i % 2 else 0.8,
        i,
        logprobs=i % 6 in (1, 4),
        chat=i % 6 == 2,
    )
    for i in range(12)
)
"""Greedy and sampled questions whose prompts have about 40 to 600 tokens. Some ask for log-probabilities."""

CANCELLED_SHARE = 0.08
"""Share of the requests whose client leaves before the end."""


class HungError(Exception):
    """A client received no token for READ_SECONDS."""


@dataclass
class Answer:
    """The answer that one client received.

    `tokens` is the server's count. `times` holds the arrival of each piece, in seconds since 1970.
    """

    text: str = ""
    tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def ask(
    url: str,
    model: str,
    question: Question,
    answer: Answer | None = None,
    *,
    leave_after: int | None = None,
) -> Answer:
    """Return one streamed answer. `answer` is filled while the stream runs.

    With `leave_after` the client closes its connection after this number of pieces. Raises HungError if the stream is
    silent too long, RuntimeError if it ends with an error or is cut.
    """
    answer = answer or Answer()
    answer.times.append(time.time())
    with httpx.stream("POST", f"{url}{question.path}", json=question.body(model), timeout=READ_SECONDS) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.read().decode()[:200]}")
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                return answer
            if line.startswith("data: {"):
                _add_event(json.loads(line.removeprefix("data: ")), answer)
                if leave_after is not None and len(answer.times) > leave_after:
                    return answer
            elif time.time() - answer.times[-1] > READ_SECONDS:
                raise HungError
    raise RuntimeError("the stream was cut")


def _add_event(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise RuntimeError(event["error"]["message"])
    answer.times.append(time.time())
    for choice in event["choices"]:
        delta = choice.get("delta", {})
        answer.text += choice.get("text", "")
        answer.text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        if found := choice.get("logprobs"):
            answer.logprobs += found["token_logprobs"]
    answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)


@dataclass
class Outcome:
    """The combined result of all answers. `wrong` describes each failed or differing answer."""

    finished: int = 0
    cancelled: int = 0
    """Number of answers whose client left. The text until then is compared."""
    lost: int = 0
    """Number of tokens missing at the end of answers."""
    duplicated: int = 0
    """Number of tokens beyond the expected count."""
    hung: int = 0
    tokens: int = 0
    """Number of tokens of the finished answers."""
    logprobs: int = 0
    """Number of log-probabilities that were compared bit by bit."""
    wrong: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of every wait for a piece, in seconds since 1970."""

    def add(self, answer: Answer, wanted: Answer, *, left: bool) -> None:
        """Record `answer`, comparing it with `wanted`, or with its beginning if its client has `left`."""
        self.gaps += zip(answer.times, answer.times[1:], strict=False)
        self.logprobs += len(answer.logprobs)
        if left:
            self.cancelled += 1
            wanted = Answer(wanted.text[: len(answer.text)], 0, wanted.logprobs[: len(answer.logprobs)])
        else:
            self.finished += 1
            self.tokens += answer.tokens
            self.lost += max(0, wanted.tokens - answer.tokens)
            self.duplicated += max(0, answer.tokens - wanted.tokens)
        if (answer.text, answer.logprobs) != (wanted.text, wanted.logprobs):
            self.wrong.append(_difference(answer, wanted))

    def silence(self, start: float, end: float) -> float:
        """Return the longest wait of a client, in seconds, that overlaps the time from `start` to `end`."""
        return max((b - a for a, b in self.gaps if a < end and b > start), default=0.0)


def _difference(answer: Answer, wanted: Answer) -> str:
    """Return the first place where two answers differ, with what stands there."""
    pairs: list[tuple[Any, Any, str]] = [(answer.text, wanted.text, "text")]
    pairs.append((answer.logprobs, wanted.logprobs, "log-probabilities"))
    own, other, name = next(pair for pair in pairs if pair[0] != pair[1])
    at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
    at = min(len(own), len(other)) if at is None else at
    return f"{name} from {at} of {len(other)}: {own[at : at + 3]!r} instead of {other[at : at + 3]!r}"


class Clients:
    """Threads that send requests until `stop`."""

    def __init__(self, url: str, model: str, wanted: dict[Question, Answer], count: int) -> None:
        self.url, self.model, self.wanted = url, model, wanted
        self.outcome = Outcome()
        self._present: dict[int, Answer] = {}
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

    @property
    def latest(self) -> float:
        """The arrival of the latest piece of the present answers, in seconds since 1970."""
        answers = [*self._present.values()]
        return max((answer.times[-1] for answer in answers if len(answer.times) > 1), default=0.0)

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            question = chance.choice(QUESTIONS)
            leave_after = None
            if chance.random() < CANCELLED_SHARE:
                leave_after = chance.randint(1, question.tokens // 2)
            answer = self._present[number] = Answer()
            try:
                ask(self.url, self.model, question, answer, leave_after=leave_after)
            except (HungError, httpx.ReadTimeout):
                with self._lock:
                    self.outcome.hung += 1
            except (RuntimeError, httpx.HTTPError) as error:
                with self._lock:
                    self.outcome.wrong.append(f"{type(error).__name__}: {error}")
                self._stop.wait(1.0)
            else:
                with self._lock:
                    self.outcome.add(answer, self.wanted[question], left=leave_after is not None)


@contextmanager
def clients(url: str, model: str, wanted: dict[Question, Answer], count: int) -> Iterator[Clients]:
    """Run `count` clients inside the block. All answers have ended when it exits."""
    asking = Clients(url, model, wanted, count)
    asking.start()
    try:
        yield asking
    finally:
        asking.stop()
