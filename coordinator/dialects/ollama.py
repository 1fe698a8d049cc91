"""Ollama's API: `/api/chat`, `/api/generate`, and the list of models."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import AliasChoices, AliasPath, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.answers.choice import AnswerEvent, GeneratedAnswer, GeneratedCall, chat_answer, new_id, text_answer
from coordinator.answers.delivery import AnswerWriter, PreparedAnswer, json_line
from coordinator.answers.stored_answers import serve_answer
from coordinator.dialects.openai_schemas import SamplingBody
from coordinator.prompts import request_settings
from coordinator.prompts.conversation import IMAGE_PLACE, Call, RoleName, Turn, role_of
from coordinator.prompts.image_parts import data_url
from coordinator.prompts.message_fields import History, HistoryObject, Many, aliased
from coordinator.text.answer_reader import CallEnd, Content, Reasoning
from coordinator.text.grammars import ANY_OBJECT, OutputFormat
from coordinator.text.schemas import Json
from coordinator.text.tokenizer import ModelInfo
from coordinator.web.context import Api, api_of
from coordinator.web.error_responses import message_of
from coordinator.web.model_catalog import ModelFacts
from coordinator.web.request_body import Body, read_body
from proto.errors import RequestError


def utc_time(seconds: float) -> str:
    """Return a time in seconds since 1970 in RFC 3339 format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def ollama_error(error: Exception) -> Json:
    """Return the error body of Ollama's API."""
    return {"error": message_of(error)}


class Options(SamplingBody):
    """Sampling and limits."""

    num_predict: int | None = Field(None, ge=-2)


class ModelBody(Body):
    """The fields that all requests for an answer share."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    format: Literal["", "json"] | Json | None = None

    @property
    def output(self) -> OutputFormat | None:
        if not self.format:
            return None
        schema = ANY_OBJECT if self.format == "json" else self.format
        return OutputFormat("json_schema", schema, "format")

    def settings(self, prompt_field: str) -> request_settings.GenerationSettings:
        """Return the settings of the internal request. A negative `num_predict` means no limit of the client."""
        options = self.options or Options.model_validate({})
        return options.sampling_settings(
            max_tokens=max(options.num_predict or 0, 0) or None,
            field_names={"prompt": prompt_field, "max_tokens": "options.num_predict"},
        )


class MessageCall(HistoryObject):
    """A call in the history."""

    id: str | None = None
    name: str = Field(validation_alias=AliasPath("function", "name"))
    arguments: Any = aliased("function.arguments")


class Message(HistoryObject):
    """One message."""

    role: RoleName
    content: str | None = None
    thinking: str | None = None
    tool_calls: Many[MessageCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Many[str] | None = None

    def turn(self) -> Turn:
        """Return the message as all dialects have it."""
        images = self.images or ()
        return Turn(
            role_of(self.role),
            IMAGE_PLACE * len(images) + (self.content or ""),
            self.thinking or "",
            tuple(Call(each.id or "", each.name, each.arguments) for each in self.tool_calls or ()),
            tuple(map(data_url, images)),
            self.tool_call_id,
            self.tool_name,
        )


class Tool(Body):
    """A tool that the model may call. Its function goes to the chat template unchanged."""

    type: Literal["function"] | None = None
    function: Json
    name: str = Field(validation_alias=AliasPath("function", "name"))


class ChatBody(ModelBody):
    """The body of `POST /api/chat`. Without messages it only asks whether the model is loaded."""

    messages: History[Message] | None = None
    tools: Many[Tool] | None = None


class GenerateBody(ModelBody):
    """The body of `POST /api/generate`. Without a prompt it only asks whether the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Many[str] | None = None


class ShowBody(Body):
    """The body of `POST /api/show`. Older clients send `name`."""

    model: str = Field(validation_alias=AliasChoices("model", "name"))


class LineWriter(AnswerWriter):
    """The writer of `/api/chat` and, with `flat`, of `/api/generate`, which has no message object.

    Ollama's calls have objects as arguments, so a line holds a complete call. A call that the limit cut off is
    omitted. Ollama's streams have no comments. A line without content is the sign of life during a pause.
    """

    media_type = "application/x-ndjson"

    def __init__(self, answer: GeneratedAnswer, *, flat: bool) -> None:
        super().__init__(answer)
        assert len(answer.choices) == 1
        self._flat = flat

    def whole(self) -> Json:
        (choice,) = self._answer.choices
        calls = [_call(call) for call in choice.complete_calls]
        part = self._part("".join(choice.content), "".join(choice.reasoning), calls)
        return {**part, **self._end()}

    def comment(self, text: str) -> bytes:
        return b""

    def keep_alive(self, *, queued: bool) -> bytes:
        return json_line({**self._part(), "done": False})

    def closing(self) -> bytes:
        return json_line({**self._part(), **self._end()})

    def error(self, error: Exception) -> bytes:
        return json_line(ollama_error(error))

    def write_event(self, event: AnswerEvent) -> bytes:
        match event.part:
            case Content(text):
                part = self._part(text=text)
            case Reasoning(text):
                part = self._part(thinking=text)
            case CallEnd(complete=True) if event.call:
                part = self._part(calls=[_call(event.call)])
            case _:
                return b""
        return json_line({**part, "done": False})

    def _part(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        content: Json = {"response" if self._flat else "content": text}
        if thinking:
            content["thinking"] = thinking
        if calls:
            content["tool_calls"] = list(calls)
        head = {"model": self._answer.model, "created_at": utc_time(time.time())}
        if self._flat:
            return {**head, **content}
        return {**head, "message": {"role": "assistant", **content}}

    def _end(self) -> Json:
        (choice,) = self._answer.choices
        now = time.perf_counter()
        first = choice.first_token_at or now
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(now - choice.began),
            "load_duration": 0,
            "prompt_eval_count": self._answer.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - choice.began),
            "eval_count": self._answer.completion_tokens,
            "eval_duration": _nanoseconds(now - first),
        }


def _call(call: GeneratedCall) -> Json:
    return {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


router = APIRouter()


@router.post("/api/chat")
async def chat(request: Request) -> Response:
    """Generate the next message of a conversation."""
    body = await read_body(request, ChatBody)
    api = api_of(request)
    request_settings.check_model(api, body.model)
    if not body.messages:
        return _loaded(api, {"message": {"role": "assistant", "content": ""}})

    async def prepare(api: Api, request: Request) -> PreparedAnswer:
        """Render the conversation. Raises RequestError, naming the invalid field."""
        turns = [message.turn() for message in body.messages or ()]
        tools = [{"type": "function", "function": tool.function} for tool in body.tools or ()]
        answer = await _chat_answer(request, body, turns, "messages", tools)
        return _prepared(answer, body)

    return await serve_answer(request, "ollama_chat", prepare)


@router.post("/api/generate")
async def generate(request: Request) -> Response:
    """Generate the answer to a prompt, or with `raw` the continuation of a text."""
    body = await read_body(request, GenerateBody)
    api, prompt = api_of(request), body.prompt
    request_settings.check_model(api, body.model)
    if not prompt:
        return _loaded(api, {"response": ""})

    async def prepare(api: Api, request: Request) -> PreparedAnswer:
        """Tokenize the prompt. Raises RequestError, naming the invalid field."""
        if body.raw:
            if body.images:
                raise RequestError("images: have no place in a raw prompt", param="images")
            tokens = await api.large_work.run(len(prompt), partial(api.tokenizer.encode, prompt))
            settings = body.settings("prompt")
            answer = await text_answer(api, settings, [tokens], new_id("gen-"), output=body.output)
        else:
            turns = [Turn("system", body.system)] if body.system else []
            turns.append(Message(role="user", content=prompt, images=body.images).turn())
            answer = await _chat_answer(request, body, turns, "prompt")
        return _prepared(answer, body)

    return await serve_answer(request, "ollama_generate", prepare)


async def _chat_answer(
    request: Request,
    body: ModelBody,
    turns: list[Turn],
    prompt_field: str,
    tools: Sequence[Json] = (),
) -> GeneratedAnswer:
    if isinstance(body.think, str):
        thinking, budget = request_settings.reasoning_of(body.think)
    else:
        thinking, budget = body.think, None
    settings, output = body.settings(prompt_field), body.output
    chat = request_settings.ChatRequest(
        turns, settings, tools, thinking=thinking, reasoning_budget=budget, output=output
    )
    return await chat_answer(api_of(request), chat, new_id("chat-"))


def _prepared(answer: GeneratedAnswer, body: ModelBody) -> PreparedAnswer:
    """Return the answer with its writer. Ollama streams unless the client switches it off."""
    writer = LineWriter(answer, flat=isinstance(body, GenerateBody))
    return PreparedAnswer(answer, writer, stream=body.stream is not False)


def _loaded(api: Api, content: Json) -> JSONResponse:
    """Return the answer to a request that only loads the model, which is always loaded."""
    head = {"model": api.model.id, "created_at": utc_time(time.time())}
    return JSONResponse({**head, **content, "done": True, "done_reason": "load"})


OLLAMA_VERSION = "0.12.6"
"""The version of Ollama whose API this dialect follows. Clients compare it with the versions they require."""

NEVER = 253402300799.0
"""Seconds since 1970 at the end of the year 9999: the model is not unloaded while the server runs."""


@router.api_route("/api/version", methods=["GET", "HEAD"])
async def version() -> Response:
    """Return the version of the API."""
    return JSONResponse({"version": OLLAMA_VERSION})


@router.api_route("/api/tags", methods=["GET", "HEAD"])
async def tags(request: Request) -> Response:
    """List the served models and their aliases, then the other models on this machine."""
    api = api_of(request)
    others = [_entry(api, found.name, found) for found in await api.loadable_models()]
    served = [_entry(api, name, model) for model in api.served_models for name in model.listed_names]
    return JSONResponse({"models": served + others})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the loaded model, with its size on all nodes and its context."""
    api = api_of(request)
    context, expires = api.model.context_length, utc_time(NEVER)
    size = sum(node.memory_used for node in api.status.status().nodes) or api.model.nbytes
    extra = {"expires_at": expires, "size": size, "size_vram": size, "context_length": context}
    entries = [_entry(api, name, api.model) for name in api.model.listed_names]
    return JSONResponse({"models": [{**entry, **extra} for entry in entries]})


@router.post("/api/show")
async def show(request: Request) -> Response:
    """Describe the served model."""
    body = await read_body(request, ShowBody)
    api, name = api_of(request), body.model.removesuffix(request_settings.TAG)
    model = next((one for one in api.served_models if one.answers_to(name)), api.model)
    request_settings.check_model(api, body.model, served=model)
    capabilities = ["completion"]
    capabilities += ["tools"] if api.tokenizer.has_tools else []
    capabilities += ["thinking"] if api.tokenizer.reasoning_end else []
    capabilities += ["vision"] if api.images.reads_images else []
    capabilities = capabilities if model is api.model else ["embedding"]
    family = model.family
    return JSONResponse(
        {
            "details": _details(model),
            "model_info": {"general.architecture": family, f"{family}.context_length": model.context_length},
            "capabilities": capabilities,
            "modified_at": utc_time(model.created),
        }
    )


def _entry(api: Api, name: str, model: ModelInfo | ModelFacts) -> Json:
    known = model.id if isinstance(model, ModelInfo) else model.name
    tagged = name if ":" in name else name + request_settings.TAG
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": utc_time(api.model.created),
        "size": model.nbytes,
        "digest": hashlib.sha256(known.encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ModelInfo | ModelFacts) -> Json:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": model.family,
        "families": [model.family] if model.family else [],
        "parameter_size": "",
        "quantization_level": model.quantization,
    }
