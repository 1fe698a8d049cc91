"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.body import read_body
from coordinator.api.choice import Choice
from coordinator.api.context import Api
from coordinator.api.delivery import serve
from coordinator.api.http_answer import Answer, new_id
from coordinator.api.logprobs import chat_logprobs
from coordinator.api.parameters import check_model, requests_of, stops_of
from coordinator.api.schemas import ChatBody, Message
from coordinator.generation.request import GenerationRequest
from coordinator.text.chat_parser import ChatParser, Content, Part, Reasoning, ToolCall, join_parts
from coordinator.text.detokenizer import Piece
from coordinator.text.model_info import Json
from coordinator.text.tokenizer import ChatPrompt, Tokenizer
from proto.errors import RequestError
from proto.frame import TokenLogprob

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Go on from a conversation."""
    return await serve(request, "chat", prepare)


async def prepare(api: Api, request: Request) -> Answer:
    """Read the body and render the chat. Raises RequestError, naming the field that is wrong."""
    body = await read_body(request, ChatBody)
    check_model(api, body.model)
    messages = [as_template_reads(message) for message in body.messages]
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    if body.tool_choice == "none":
        tools = []  # what the model is not told of it will not call
    render = partial(
        api.tokenizer.chat_prompt, tools=tools, template_kwargs=body.chat_template_kwargs
    )
    prompt = await asyncio.to_thread(render, messages)
    await asyncio.to_thread(_check_names, messages, prompt, render)
    answer_id = new_id("chatcmpl")
    stops = stops_of(api, body)
    requests = requests_of(
        api,
        body,
        [prompt.tokens],
        request_id=answer_id,
        stops=stops,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    requests = [replace(r, turn=prompt.turn, continued=prompt.continued) for r in requests]
    return Answer(
        id=answer_id,
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        model=api.model.id,
        choices=[
            ChatChoice(
                index,
                each,
                api.tokenizer,
                stops.strings,
                ChatParser(api.tokenizer, thinking=prompt.thinking, tools=tools),
            )
            for index, each in enumerate(requests)
        ],
        per_prompt=len(requests),
        stream=bool(body.stream),
        include_usage=body.include_usage,
        user=body.user,
        names={"max_tokens": body.limit_field, "prompt": body.prompt_field},
    )


def _check_names(
    messages: list[Json], prompt: ChatPrompt, render: Callable[[list[Json]], ChatPrompt]
) -> None:
    """Raise RequestError, naming the first, where the names in the turns of a role do not show in the prompt."""
    named = {m["role"]: i for i, m in reversed([*enumerate(messages)]) if "name" in m}
    for role, first in named.items():
        without = [
            {key: value for key, value in m.items() if key != "name" or m["role"] != role}
            for m in messages
        ]
        if render(without) == prompt:
            param = f"messages[{first}].name"
            raise RequestError(
                f"{param}: this model's chat template does not look at it", param=param
            )


def as_template_reads(message: Message) -> Json:
    """A message as chat templates expect it: arguments as objects, no nulls, no role they do not know."""
    turn: Json = {**message.model_dump(exclude_none=True), "content": message.content or ""}
    if message.role == "developer":
        turn["role"] = "system"  # OpenAI's newer name for it
    for call in turn.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            raise RequestError(
                f"messages: the arguments of the call of {call['function']['name']!r} are not JSON",
                param="messages",
            ) from None
    return turn


class ChatChoice(Choice):
    """A choice whose text is parsed into content, reasoning and tool calls."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        parser: ChatParser,
    ) -> None:
        super().__init__(index, request, tokenizer, stop)
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Json] = []
        self._reasoning_tokens = 0
        self._parts: list[Part] = []
        self._untold: list[TokenLogprob] = []  # of tokens whose text the parser holds back
        self._told: list[TokenLogprob] = []

    @property
    def reasoning_tokens(self) -> int:
        return self._reasoning_tokens

    def opening(self) -> list[Json]:
        return [self._entry({"role": "assistant", "content": ""})]

    def result(self) -> Json:
        message: Json = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"}
                for call in self._calls
            ]
        logprobs = chat_logprobs(self._tokenizer, self._told) if self._told else None
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }

    def _read(self, piece: Piece) -> None:
        self._untold += self._take_logprobs(piece)
        was_reasoning = self._parser.reasoning
        self._parts += self._parser.add(piece.text)
        if was_reasoning or self._parser.reasoning:
            self._reasoning_tokens += len(piece.tokens)

    def _read_end(self) -> None:
        self._parts += self._parser.finish()

    def _flush(self) -> list[Json]:
        parts, self._parts = join_parts(self._parts), []
        entries = [self._entry(self._delta(part)) for part in parts]
        return [*entries[:-1], self._with_logprobs(entries[-1])] if entries else []

    def _closing(self) -> Json:
        return self._with_logprobs(self._entry({}, self.finish_reason))

    def _reason(self, reason: str) -> str:
        called = bool(self._calls) or any(isinstance(part, ToolCall) for part in self._parts)
        return "tool_calls" if called and reason == "stop" else reason

    def _delta(self, part: Part) -> Json:
        """Note the part for `result` and return it as a delta."""
        match part:
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case Reasoning(text):
                self._reasoning.append(text)
                return {"reasoning_content": text}
            case call:
                entry = {
                    "index": len(self._calls),
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                self._calls.append(entry)
                return {"tool_calls": [entry]}

    def _entry(self, delta: Json, finish_reason: str | None = None) -> Json:
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def _with_logprobs(self, entry: Json) -> Json:
        """Put what is known of the tokens so far into the entry."""
        if not self._untold:
            return entry
        told, self._untold = self._untold, []
        self._told += told
        return {**entry, "logprobs": chat_logprobs(self._tokenizer, told)}
