"""The answer to one HTTP request while it is generated: its choices and their counts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.api.answer.choice import Choice
from coordinator.api.request.chat import ChatRequest, render_chat
from coordinator.api.request.context import Api
from coordinator.api.request.forced import grammar_fields, text_grammar
from coordinator.api.request.settings import GenerationSettings, Stops, requests_of, stops_of
from coordinator.generation.request import GenerationRequest
from coordinator.text.chat_parser import ChatParser
from coordinator.text.output_format import OutputFormat
from coordinator.text.tokenizer import ChatPrompt

ID_LENGTH = 24
"""Characters of an answer's id after its prefix, as OpenAI's ids have."""


def new_id(prefix: str) -> str:
    """Return a new id of an answer, for the body, `X-Request-Id`, the engine's requests and the log."""
    return f"{prefix}{uuid.uuid4().hex[:ID_LENGTH]}"


@dataclass(frozen=True)
class GeneratedAnswer:
    """The choices of one prompt or several: each prompt has `per_prompt` consecutive choices.

    `user` is the client's label for the log.
    """

    id: str
    model: str
    settings: GenerationSettings
    choices: Sequence[Choice]
    per_prompt: int = 1
    user: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        assert len(self.choices) % self.per_prompt == 0
        assert [choice.index for choice in self.choices] == list(range(len(self.choices)))

    @property
    def done(self) -> bool:
        """True after all choices have ended."""
        return all(choice.done for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts. A prompt counts once for all its choices."""
        first_choices = self.choices[:: self.per_prompt]
        return sum(len(choice.request.prompt) + choice.echoed_tokens for choice in first_choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return sum(choice.cached for choice in self.choices[:: self.per_prompt])

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(max(0, choice.tokens - choice.echoed_tokens) for choice in self.choices)


@dataclass(frozen=True)
class RestoredAnswer:
    """The engine's requests of an answer that an earlier process began, and the time in seconds since 1970."""

    requests: Sequence[GenerationRequest]
    created: int


async def text_answer(
    api: Api,
    settings: GenerationSettings,
    prompts: Sequence[tuple[int, ...]],
    answer_id: str,
    *,
    user: str | None = None,
    output: OutputFormat | None = None,
) -> GeneratedAnswer:
    """Return the continuations of `prompts`, before their first token. Raises RequestError for an invalid request."""
    forced: dict[str, Any] = await text_grammar(api, output)
    stops = stops_of(api, settings)
    requests = [
        replace(request, params=replace(request.params, **forced))
        for request in requests_of(api, settings, prompts, request_id=answer_id, stops=stops)
    ]
    return GeneratedAnswer(
        id=answer_id,
        model=api.model.id,
        settings=settings,
        choices=[
            Choice(index, each, api.tokenizer, stops.strings) for index, each in enumerate(requests)
        ],
        per_prompt=settings.n,
        user=user,
    )


async def chat_answer(
    api: Api, chat: ChatRequest, answer_id: str, restored: RestoredAnswer | None = None
) -> GeneratedAnswer:
    """Return the answer to a conversation, before its first token. Raises RequestError for an invalid request.

    With `restored` the answer continues one of an earlier process.
    """
    prompt = await render_chat(api, chat)
    stops = stops_of(api, chat.settings)
    if restored is not None:
        requests = list(restored.requests)
    else:
        requests = await _chat_requests(api, chat, prompt, stops, answer_id)
    return GeneratedAnswer(
        id=answer_id,
        model=api.model.id,
        settings=chat.settings,
        choices=[
            Choice(
                index,
                request,
                api.tokenizer,
                stops.strings,
                ChatParser(api.tokenizer, thinking=prompt.thinking, tools=chat.tools),
                reasoning_budget=chat.reasoning_budget,
                one_call=chat.one_call,
            )
            for index, request in enumerate(requests)
        ],
        per_prompt=len(requests),
        user=chat.user,
        created=int(time.time()) if restored is None else restored.created,
    )


async def _chat_requests(
    api: Api, chat: ChatRequest, prompt: ChatPrompt, stops: Stops, answer_id: str
) -> list[GenerationRequest]:
    forced: dict[str, Any] = await grammar_fields(api, chat, thinking=prompt.thinking)
    return [
        replace(
            request,
            turn=prompt.turn,
            continued=prompt.continued,
            params=replace(request.params, **forced),
        )
        for request in requests_of(
            api, chat.settings, [prompt.tokens], request_id=answer_id, stops=stops
        )
    ]
