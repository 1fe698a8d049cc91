"""One HTTP answer as data: its choices, its chunks, its usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.api.choice import Choice
from coordinator.generation.request import GenerationEvent
from coordinator.text.model_info import Json


def new_id(prefix: str) -> str:
    """An id for an answer; it is in the body, in `X-Request-Id`, in the engine's requests and in the log."""
    return f"{prefix}-{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class Answer:
    """Choices of one prompt or several: each prompt has `per_prompt` of them in a row.

    `kind` and `chunk_kind` are what OpenAI calls the object, whole and streamed. `user` is the client's label for the
    log, `names` what the client calls the engine's fields where it calls them something else.
    """

    id: str
    kind: str
    chunk_kind: str
    model: str
    choices: Sequence[Choice]
    per_prompt: int = 1
    stream: bool = False
    include_usage: bool = False
    user: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        assert len(self.choices) % self.per_prompt == 0
        assert [choice.index for choice in self.choices] == list(range(len(self.choices)))

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self.choices)

    def accept(self, index: int, event: GenerationEvent) -> list[Json]:
        """Give an event to its choice; return the chunks it makes.

        Raises WorkerLostError when the engine gave up on the request.
        """
        return [self._chunk(entry) for entry in self.choices[index].accept(event)]

    def opening(self) -> list[Json]:
        """The chunks a stream begins with."""
        return [self._chunk(entry) for choice in self.choices for entry in choice.opening()]

    def closing(self) -> list[Json]:
        """The chunks a stream ends with, after every choice's own last one."""
        if not self.include_usage:
            return []
        return [{**self._head(self.chunk_kind), "choices": [], "usage": self.usage()}]

    def whole(self) -> Json:
        """The body of an answer that is not streamed."""
        choices = [choice.result() for choice in self.choices]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Tokens of the answer. A prompt counts once, however many choices go on from it."""
        completion = sum(choice.tokens for choice in self.choices)
        accepted = sum(choice.accepted for choice in self.choices)
        details = {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(c.drafted for c in self.choices) - accepted,
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": details,
        }

    @property
    def prompt_tokens(self) -> int:
        return sum(len(choice.request.prompt) for choice in self.choices[:: self.per_prompt])

    @property
    def cached_tokens(self) -> int:
        return sum(choice.cached for choice in self.choices[:: self.per_prompt])

    def _chunk(self, entry: Json) -> Json:
        chunk = {**self._head(self.chunk_kind), "choices": [entry]}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
