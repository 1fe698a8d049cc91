"""`POST /v1/chat/completions` and `POST /v1/completions`, and the formats of their answers, whole and streamed."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from coordinator.answers.choice import (
    AnswerEvent,
    ChoiceEnd,
    GeneratedAnswer,
    GeneratedCall,
    chat_answer,
    new_id,
    text_answer,
)
from coordinator.answers.delivery import AnswerWriter, PreparedAnswer, sse_data
from coordinator.answers.stored_answers import serve_answer
from coordinator.dialects import openai_schemas
from coordinator.prompts.conversation import freeform_input
from coordinator.prompts.request_settings import ChatRequest, check_choices, check_model, check_tokens
from coordinator.text.answer_reader import CallArguments, CallEnd, CallStart, Content, Reasoning
from coordinator.text.schemas import Json
from coordinator.text.tokenizer import Tokenizer
from coordinator.web.context import Api
from coordinator.web.error_responses import error_body, refused_field
from coordinator.web.request_body import read_body
from proto.frame import TokenLogprob

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await serve_answer(request, "chat", prepare)


async def prepare(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and render the conversation. Raises RequestError, naming the invalid field."""
    body = await read_body(request, openai_schemas.ChatBody)
    check_model(api, body.model)
    thinking, budget = body.thinking
    variables = body.chat_template_kwargs or {}
    variables = {name: v for name, v in variables.items() if api.tokenizer.template.uses(name)}
    offered = [tool.for_template() for tool in body.tools or ()]
    tools, forced = openai_schemas.chosen_tools(body.tool_choice, offered)
    chat = ChatRequest(
        turns=[message.turn() for message in body.messages],
        settings=body.generation_settings("messages", (body.top_logprobs or 0) if body.logprobs else None),
        tools=tools,
        template_kwargs=variables,
        thinking=thinking,
        reasoning_budget=budget,
        effort=body.reasoning_effort,
        one_call=body.parallel_tool_calls is False,
        forced_tool=forced,
        output=body.output,
        continue_final=bool(body.continue_final_message),
    )
    answer = await chat_answer(api, chat, new_id("chatcmpl-"))
    return PreparedAnswer(answer, ChatWriter(answer, api.tokenizer, body), bool(body.stream))


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Generate the continuation of a text."""
    return await serve_answer(request, "completions", prepare_completion)


async def prepare_completion(api: Api, request: Request) -> PreparedAnswer:
    """Read the body and tokenize its prompts. Raises RequestError, naming the invalid field."""
    body = await read_body(request, openai_schemas.CompletionBody)
    check_model(api, body.model)
    settings = body.generation_settings("prompt", body.logprobs)
    check_choices(api, len(body.prompts), settings.n)
    prompts = [await _tokens(api, prompt) for prompt in body.prompts]
    if body.suffix:
        prompts = [await _around(api, prompt, body.suffix) for prompt in prompts]
    answer = await text_answer(api, settings, prompts, new_id("cmpl-"), output=body.output)
    return PreparedAnswer(answer, CompletionWriter(answer, api.tokenizer, body), bool(body.stream))


async def _tokens(api: Api, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await api.large_work.run(len(prompt), partial(api.tokenizer.encode, prompt))
    check_tokens(api, prompt, "prompt")
    return tuple(prompt)


async def _around(api: Api, prompt: tuple[int, ...], suffix: str) -> tuple[int, ...]:
    """Return the prompt of a text between `prompt` and `suffix`, in the form of Qwen's coding models."""
    found = [api.tokenizer.backend.token_to_id(f"<|fim_{name}|>") for name in FIM]
    ids = [token for token in found if token is not None]
    if len(ids) < len(FIM):
        raise refused_field("suffix", "this model has no tokens for it. Omit the field.")
    prefix, after, middle = ids
    return (prefix, *prompt, after, *await _tokens(api, suffix), middle)


FIM = ("prefix", "suffix", "middle")


def usage_of(answer: GeneratedAnswer) -> Json:
    """Return the `usage` of an answer so far. A prompt counts once for all its choices."""
    completion = answer.completion_tokens
    accepted = sum(choice.accepted for choice in answer.choices)
    details = {
        "reasoning_tokens": sum(choice.reasoning_tokens for choice in answer.choices),
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(c.drafted for c in answer.choices) - accepted,
    }
    images = {"image_tokens": answer.image_tokens} if answer.image_tokens else {}
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens} | images,
        "completion_tokens_details": details,
    }


LOWEST = -9999.0
"""The value for minus infinity, which JSON cannot represent; OpenAI documents this number."""


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    content = tokenizer.token_bytes(token)
    return {"token": content.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(content)}


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text, or its bytes if they are not whole characters, so that all names differ."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST


DONE = b"data: [DONE]\n\n"


class ChunkWriter(AnswerWriter):
    """The writer of both completion endpoints.

    `kind` and `chunk_kind` are OpenAI's names of the object, whole and streamed. `prompt_on_top` is True if the tokens
    of the prompt stand beside the choices.
    """

    kind: str
    chunk_kind: str
    prompt_on_top = False

    def __init__(self, answer: GeneratedAnswer, tokenizer: Tokenizer, body: openai_schemas.GenerationBody) -> None:
        super().__init__(answer)
        self._tokenizer = tokenizer
        self._body = body
        self._shown: dict[int, int] = {}  # token ids that each choice has shown
        self._hidden: dict[int, AnswerEvent] = {}  # the events of choices since their last chunk, joined

    @abc.abstractmethod
    def choice_result(self, index: int) -> Json:
        """Return the entry of a complete choice in `choices`."""

    @abc.abstractmethod
    def choice_entry(self, event: AnswerEvent) -> Json:
        """Return the entry of an event in a chunk's `choices`."""

    def whole(self) -> Json:
        choices = [self.choice_result(choice.index) for choice in self._answer.choices]
        return self._add_token_ids({**self._head(self.kind), "choices": choices, "usage": usage_of(self._answer)})

    def write_event(self, event: AnswerEvent) -> bytes:
        if (hidden := self._hidden.pop(event.choice, None)) is not None:
            logprobs, origins = hidden.logprobs + event.logprobs, hidden.origins + event.origins
            event = replace(event, logprobs=logprobs, origins=origins)
        if self.shows(event):
            return self.chunk(self.choice_entry(event))
        self._hidden[event.choice] = event
        return b""

    def shows(self, event: AnswerEvent) -> bool:
        """Return whether an event has a chunk. The next one shows that a call has ended."""
        return not isinstance(event.part, CallEnd)

    def closing(self) -> bytes:
        if not self._body.include_usage:
            return DONE
        last = {**self._head(self.chunk_kind), "choices": [], "usage": usage_of(self._answer)}
        return sse_data(last) + DONE

    def error(self, error: Exception) -> bytes:
        return sse_data(error_body(error))

    def chunk(self, entry: Json) -> bytes:
        chunk = self._add_token_ids({**self._head(self.chunk_kind), "choices": [entry]})
        if self._body.include_usage:
            chunk["usage"] = None
        return sse_data(chunk)

    def _add_token_ids(self, body: Json) -> Json:
        """Add to each choice its tokens since its last entry, and first the prompt's, as vLLM does."""
        for entry in body["choices"] if self._body.return_token_ids else ():
            index = entry["index"]
            choice, shown = self._answer.choices[index], self._shown.get(index)
            entry["token_ids"] = choice.generated[shown or 0 :]
            if shown is None:
                place = body if self.prompt_on_top else entry
                place["prompt_token_ids"] = list(choice.request.prompt)
            self._shown[index] = len(choice.generated)
        return body

    def _head(self, kind: str) -> Json:
        answer = self._answer
        return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


class ChatWriter(ChunkWriter):
    """The writer of `POST /v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prompt_on_top = True

    def opening(self) -> bytes:
        return b"".join(
            self.chunk(self._entry(choice.index, {"role": "assistant", "content": ""}))
            for choice in self._answer.choices
        )

    def choice_result(self, index: int) -> Json:
        choice = self._answer.choices[index]
        message: Json = {"role": "assistant", "content": "".join(choice.content)}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if calls := choice.shown_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self._call(call, call.arguments) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _call(self, call: GeneratedCall, arguments: str) -> Json:
        if call.name in self._custom:
            own = {"name": call.name, "input": arguments and freeform_input(arguments)}
            return {"id": call.id, "type": "custom", "custom": own}
        function = {"name": call.name, "arguments": arguments}
        return {"id": call.id, "type": "function", "function": function}

    @property
    def _custom(self) -> set[str]:
        """The names of custom tools, whose input is sent when it is whole."""
        assert isinstance(self._body, openai_schemas.ChatBody)
        return {t.name for t in self._body.tools or () if isinstance(t, openai_schemas.CustomTool)}

    def shows(self, event: AnswerEvent) -> bool:
        custom = event.call is not None and event.call.name in self._custom
        return not isinstance(event.part, CallArguments if custom else CallEnd)

    def choice_entry(self, event: AnswerEvent) -> Json:
        reason: str | None = None
        match event.part:
            case Content(text):
                delta: Json = {"content": text}
            case Reasoning(text):
                delta = {"reasoning_content": text}
            case CallStart() if event.call:
                delta = {"tool_calls": [{"index": event.call.index, **self._call(event.call, "")}]}
            case CallArguments(text) if event.call:
                part = {"index": event.call.index, "function": {"arguments": text}}
                delta = {"tool_calls": [part]}
            case CallEnd() if event.call:
                text = freeform_input(event.call.arguments)
                delta = {"tool_calls": [{"index": event.call.index, "custom": {"input": text}}]}
            case ChoiceEnd(reason):
                delta = {}
            case _:
                raise AssertionError("the end of a call has no chunk")
        entry = self._entry(event.choice, delta, event.logprobs, reason)
        if self._body.token_origins and (event.origins or reason is None):
            entry["token_origins"] = event.origins
        return entry

    def _entry(
        self,
        index: int,
        delta: Json,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": finish_reason}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json | None:
        """Return `logprobs`, with an entry for every token, also of reasoning and calls."""
        content = [
            {
                **_token(self._tokenizer, entry.token, entry.logprob),
                "top_logprobs": [_token(self._tokenizer, *pair) for pair in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None} if content else None


class CompletionWriter(ChunkWriter):
    """The writer of `POST /v1/completions`."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def choice_result(self, index: int) -> Json:
        choice = self._answer.choices[index]
        text = "".join(choice.content)
        return self._entry(index, text, choice.logprobs, choice.finish_reason)

    def choice_entry(self, event: AnswerEvent) -> Json:
        if isinstance(event.part, Content):
            return self._entry(event.choice, event.part.text, event.logprobs)
        reason = self._answer.choices[event.choice].finish_reason
        return self._entry(event.choice, "", event.logprobs, reason)

    def _entry(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> Json:
        name = partial(_name, self._tokenizer)
        top = [{name(token): _finite(value) for token, value in entry.top} for entry in logprobs]
        found = {
            "tokens": [name(entry.token) for entry in logprobs],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": top if any(top) else None,
        }
        entry = {"index": index, "text": text, "logprobs": found if logprobs else None}
        return {**entry, "finish_reason": finish_reason}
