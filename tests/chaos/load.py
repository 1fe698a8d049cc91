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
        PROMPT * (1 + i % 4),
        60 + 40 * (i % 5),
        0.0 if i % 2 else 0.8,
        i,
        logprobs=i % 6 in (1, 4),
        chat=i % 6 == 2,
    )
    for i in range(12)
)
"""Greedy and sampled questions with prompts and answers of several lengths. Some ask for log-probabilities."""

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

    @property
    def pause(self) -> float:
        """Seconds of the longest pause between two pieces."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)


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
    with httpx.stream(
        "POST", f"{url}{question.path}", json=question.body(model), timeout=READ_SECONDS
    ) as reply:
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
    lost: int = 0
    """Number of tokens missing at the end of answers."""
    duplicated: int = 0
    """Number of tokens beyond the expected count."""
    differing: int = 0
    """Number of answers whose text differs from the undisturbed answer."""
    hung: int = 0
    cancelled: int = 0
    """Number of answers whose client left. The text until then is compared."""
    tokens: int = 0
    """Number of tokens of the finished answers."""
    logprobs: int = 0
    """Number of log-probabilities that were compared bit by bit."""
    wrong: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def add(self, answer: Answer, wanted: Answer) -> None:
        """Record `answer`, comparing it with `wanted`."""
        self.finished += 1
        self.tokens += answer.tokens
        self.logprobs += len(answer.logprobs)
        self.lost += max(0, wanted.tokens - answer.tokens)
        self.duplicated += max(0, answer.tokens - wanted.tokens)
        if answer.text != wanted.text:
            self.differing += 1
            self.wrong.append(f"{answer.text!r} instead of {wanted.text!r}")
        elif answer.logprobs != wanted.logprobs:
            self.differing += 1
            self.wrong.append(f"{answer.logprobs} instead of {wanted.logprobs}")
        self.answers.append(Answer(times=answer.times))

    def add_cancelled(self, answer: Answer, wanted: Answer) -> None:
        """Record an answer whose client left, comparing its text and log-probabilities so far."""
        self.cancelled += 1
        self.logprobs += len(answer.logprobs)
        count = len(answer.logprobs)
        if not wanted.text.startswith(answer.text) or wanted.logprobs[:count] != answer.logprobs:
            self.differing += 1
            self.wrong.append(f"{answer.text!r} does not begin {wanted.text!r}")
        self.answers.append(Answer(times=answer.times))


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
                add = self.outcome.add if leave_after is None else self.outcome.add_cancelled
                with self._lock:
                    add(answer, self.wanted[question])


@contextmanager
def clients(url: str, model: str, wanted: dict[Question, Answer], count: int) -> Iterator[Clients]:
    """Run `count` clients inside the block. All answers have ended when it exits."""
    asking = Clients(url, model, wanted, count)
    asking.start()
    try:
        yield asking
    finally:
        asking.stop()
