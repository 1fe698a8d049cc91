"""The answer to one HTTP request while it is generated: its choices and their counts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.api.choice import Choice
from coordinator.api.context import Api
from coordinator.api.request_settings import (
    ChatRequest,
    GenerationSettings,
    grammar_fields,
    render_chat,
    requests_of,
    stops_of,
)
from coordinator.schedule.request import GenerationRequest
from coordinator.text.chat_parser import ChatParser
from coordinator.text.grammars import OutputFormat

ID_LENGTH = 24
"""Characters of an answer's id after its prefix, as OpenAI's ids have."""


def new_id(prefix: str) -> str:
    """Return a new id of an answer, for the body, `X-Request-Id`, the engine's requests and the log."""
    return f"{prefix}{uuid.uuid4().hex[:ID_LENGTH]}"


@dataclass(frozen=True)
class GeneratedAnswer:
    """The choices of one prompt or several: each prompt has `settings.n` consecutive choices.

    `user` is the client's label for the log.
    """

    id: str
    model: str
    settings: GenerationSettings
    choices: Sequence[Choice]
    user: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        assert len(self.choices) % self.settings.n == 0
        assert [choice.index for choice in self.choices] == list(range(len(self.choices)))

    @property
    def done(self) -> bool:
        """True after all choices have ended."""
        return all(choice.done for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts. A prompt counts once for all its choices."""
        return sum(len(choice.request.prompt) for choice in self.choices[:: self.settings.n])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return sum(choice.cached for choice in self.choices[:: self.settings.n])

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.tokens for choice in self.choices)


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
    forced = {}
    if output is not None:
        forced["grammar"] = await api.compiler.compile([output])
    stop_tokens, stop = stops_of(api, settings)
    requests = requests_of(api, settings, prompts, answer_id, stop_tokens, forced)
    choices = [Choice(index, each, api.tokenizer, stop) for index, each in enumerate(requests)]
    return GeneratedAnswer(answer_id, api.model.id, settings, choices, user)


async def chat_answer(
    api: Api,
    chat: ChatRequest,
    answer_id: str,
    restored: GenerationRequest | None = None,
) -> GeneratedAnswer:
    """Return the answer to a conversation, before its first token. Raises RequestError for an invalid request.

    `restored` is the engine's request of an answer that an earlier process began.
    """
    prompt = await render_chat(api, chat)
    stop_tokens, stop = stops_of(api, chat.settings)
    requests = [restored] if restored else []
    if restored is None:
        forced = await grammar_fields(api, chat, thinking=prompt.thinking)
        requests = [
            replace(request, turn=prompt.turn, continued=prompt.continued)
            for request in requests_of(
                api, chat.settings, [prompt.tokens], answer_id, stop_tokens, forced
            )
        ]
    choices = [
        Choice(
            index,
            request,
            api.tokenizer,
            stop,
            ChatParser(api.tokenizer, thinking=prompt.thinking, tools=chat.tools),
            reasoning_budget=chat.reasoning_budget,
            one_call=chat.one_call,
        )
        for index, request in enumerate(requests)
    ]
    return GeneratedAnswer(answer_id, api.model.id, chat.settings, choices, chat.user)
