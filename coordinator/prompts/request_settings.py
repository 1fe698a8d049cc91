"""The internal request that all dialects share: messages, tools, sampling, limits, stops and forced output."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from coordinator.prompts.conversation import Turn, template_messages
from coordinator.schedule.admission import most_waiting
from coordinator.schedule.request import GenerationRequest
from coordinator.text.forced_forms import JsonForm, channel_format, json_form_grammar
from coordinator.text.grammars import OutputFormat, call_grammar, check_schema
from coordinator.text.schemas import Json
from coordinator.text.tokenizer import ChatPrompt, ContextLengthError, ModelInfo
from coordinator.web.context import Api
from coordinator.web.error_responses import ModelNotLoadedError, UnknownModelError, refused_field
from proto.errors import RequestError
from proto.params import SamplingParams

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

BUDGETS = {"minimal": 256, "low": 1024, "medium": 8192}
"""Tokens. Maximum reasoning per level. Higher ones have no limit of their own."""


def reasoning_of(effort: ReasoningEffort | None) -> tuple[bool | None, int | None]:
    """Return whether the model reasons, None for the template's default, and the maximum number of reasoning tokens."""
    if effort is None:
        return None, None
    if effort == "none":
        return False, None
    return True, BUDGETS.get(effort)


MAX_CHOICES = 128
"""Maximum number of answers to one HTTP request; OpenAI's limit on `n`."""


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of one HTTP request, in any dialect. None and empty values mean that the client omitted a field.

    `sampling` holds fields of SamplingParams. `logprobs` is the number of alternatives per token. Every prompt gets
    `n` answers; answer i has the seed plus i. `field_names` maps names of GenerationRequest's fields to the names in
    the client's request.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    drafts: int | None = None
    logprobs: int | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)

    def client_name(self, engine_name: str) -> str:
        """Return the client's name of a field of the engine."""
        return self.field_names.get(engine_name, engine_name)


TAG = ":latest"
"""The tag that Ollama's clients add to a name without one."""


def check_model(api: Api, name: str | None, *, strictly: bool = False, served: ModelInfo | None = None) -> None:
    """Raise UnknownModelError or ModelNotLoadedError unless `name`, perhaps with Ollama's tag, is empty or `served`.

    A name of no model on this machine is served too, unless the server has strict names or this is to be done
    `strictly`: clients have fixed names, and the answer names the model that wrote it.
    """
    served = served or api.model
    if not name or served.answers_to(name):
        return
    plain = name.removesuffix(TAG)
    if served.answers_to(plain):
        return
    if any(model.answers_to(plain) for model in api.served_models):
        lacks = "writes no answers" if served is api.model else "computes no embeddings"
        raise UnknownModelError(f"model: {plain!r} {lacks}. Use {served.id!r}.", param="model")
    is_known = api.model_loader is not None and api.model_loader.can_load(plain)
    if is_known and served is api.model:
        raise ModelNotLoadedError(
            f"model: {plain!r} is not loaded, {api.model.id!r} is. Change the model with mtp-coord load or POST "
            "/v1/models/load.",
            param="model",
        )
    if is_known or strictly or api.options.strict_names:
        raise UnknownModelError(f"model: {name!r} is not served here. Use {served.id!r}.", param="model")


def stops_of(api: Api, settings: GenerationSettings) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the stop tokens, those spelled as strings included, and the stop strings. Raises RequestError."""
    check_tokens(api, settings.stop_token_ids, "stop_token_ids")
    tokens = set(settings.stop_token_ids)
    if not settings.ignore_eos:
        tokens |= api.tokenizer.eos_ids
    strings = []
    for string in settings.stop_strings:
        control = api.tokenizer.control_id(string)
        if control is None:
            strings.append(string)
        else:
            tokens.add(control)
    return frozenset(tokens), tuple(strings)


def check_choices(api: Api, prompts: int, n: int) -> None:
    """Raise RequestError for more answers than an idle server can run or queue. Tokenizing them would take long."""
    status, maximum = api.status.status(), MAX_CHOICES
    if status.running_limit and status.waiting_limit is not None:
        maximum = min(maximum, most_waiting(status.running_limit + status.waiting_limit))
    if prompts * n > maximum:
        text = f"{prompts} prompts with n {n} exceed {maximum} choices. Send fewer."
        raise refused_field("n", text)


def requests_of(
    api: Api,
    settings: GenerationSettings,
    prompts: Sequence[tuple[int, ...]],
    request_id: str,
    stop_tokens: frozenset[int],
    forced: Json,
) -> list[GenerationRequest]:
    """Return `n` requests per prompt, with the fields of SamplingParams in `forced`. Raises RequestError."""
    check_choices(api, len(prompts), settings.n)
    params = replace(_sampling_params(api, settings), **forced)
    # vLLM, llama.cpp and Ollama read -1 as no seed.
    seed = settings.seed if settings.seed not in (None, -1) else secrets.randbits(64)
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        limit = _token_limit(api, settings, len(prompt))
        for i in range(settings.n):
            requests.append(
                GenerationRequest(
                    prompt=prompt,
                    max_tokens=limit,
                    params=replace(params, seed=(seed + i) % 2**64),
                    stop_tokens=stop_tokens,
                    request_id=f"{request_id}-{len(requests)}",
                    drafts=settings.drafts,
                )
            )
    return requests


def _sampling_params(api: Api, settings: GenerationSettings) -> SamplingParams:
    chosen: Json = {name: value for name, value in settings.sampling.items() if value is not None}
    if "top_k" in chosen:
        chosen["top_k"] = max(chosen["top_k"], 0)  # vLLM's clients send -1 for no limit
    if chosen.get("top_p") == 0:  # the smallest share, which the likeliest token has alone
        chosen |= {"top_p": 1.0, "top_k": 1}
    if settings.logit_bias:
        check_tokens(api, settings.logit_bias, "logit_bias")
        chosen["logit_bias"] = settings.logit_bias
    if chosen.get("xtc_probability"):
        # Without line breaks code loses its form, and without ends an answer or its reasoning never stops.
        ends = api.tokenizer.eos_ids | {api.tokenizer.reasoning_end_id} - {None}
        chosen["xtc_exempt"] = tuple(sorted(ends.union(api.tokenizer.encode("\n"))))
    try:
        return replace(api.model.defaults, logprobs=settings.logprobs, **chosen)
    except RequestError as error:
        if error.param is not None:
            error.param = settings.client_name(error.param)
        raise


def check_tokens(api: Api, tokens: Collection[int], param: str) -> None:
    """Raise RequestError, naming `param`, for a token outside the vocabulary."""
    size = api.tokenizer.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise refused_field(param, f"token {wrong[0]} is invalid. The vocabulary has {size} tokens.")


def _token_limit(api: Api, settings: GenerationSettings, prompt: int) -> int:
    """Return the maximum number of tokens of one answer to `prompt` tokens. Raises RequestError if they do not fit."""
    context = api.model.context_length
    limit = min(context, api.status.status().kv_limit or context)
    bound = "the model's context" if limit == context else "the K/V memory of this cluster"
    prompt_name = settings.client_name("prompt")
    limit_name = settings.client_name("max_tokens")
    if prompt == 0:
        raise refused_field(prompt_name, "empty. Send at least one token.")
    if prompt >= limit:
        raise ContextLengthError(
            f"{prompt_name}: {prompt} tokens leave no room for an answer in {bound} of {limit} tokens. Shorten it.",
            prompt,
            limit,
            param=prompt_name,
        )
    room = limit - prompt
    if settings.max_tokens and api.options.clamp_max_tokens:
        return min(settings.max_tokens, room)
    if settings.max_tokens and settings.max_tokens > room:
        raise ContextLengthError(
            f"{limit_name}: {settings.max_tokens} and a prompt of {prompt} tokens exceed {bound} of {limit} tokens. "
            f"Lower {limit_name}.",
            prompt,
            limit,
            param=limit_name,
            max_tokens=settings.max_tokens,
        )
    return settings.max_tokens or min(api.options.default_max_tokens, room)


EFFORT = "reasoning_effort"
"""The variable of chat templates that have levels of reasoning."""


@dataclass(frozen=True)
class ChatRequest:
    """A conversation and the settings of its next message.

    `tools` are function tools in OpenAI's format. `thinking` switches reasoning on or
    off, where None leaves it to the template; `reasoning_budget` is its maximum number of tokens. `effort` is that of
    the client, for templates that have levels. With `one_call` the
    answer ends after its first tool call. `forced_tool` is the tool that the answer must call, or an empty string for
    any tool. `output` is the format of the content, which a forced call replaces. With `continue_final` the answer
    continues the last message.
    """

    turns: Sequence[Turn]
    settings: GenerationSettings
    tools: Sequence[Json] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    reasoning_budget: int | None = None
    effort: str | None = None
    one_call: bool = False
    forced_tool: str | None = None
    output: OutputFormat | None = None
    continue_final: bool = False


async def render_chat(api: Api, chat: ChatRequest, places: Mapping[str, str] | None = None) -> ChatPrompt:
    """Render the conversation in a thread. Raises RequestError, naming the field, if the template rejects it.

    `places` are texts of the turns that stand for others, which may have control tokens.
    """
    kwargs = dict(chat.template_kwargs)
    form = api.tokenizer.template
    if chat.thinking is not None:
        kwargs |= dict.fromkeys(form.switches, chat.thinking)
    if chat.effort is not None and form.uses(EFFORT):
        kwargs.setdefault(EFFORT, form.level(chat.effort))
    messages = template_messages(chat.turns, api.tokenizer.tool_markers)
    options: Json = {"continue_final": chat.continue_final, "places": places}
    render = partial(api.tokenizer.chat_prompt, messages, chat.tools, kwargs, **options)
    size = sum(len(turn.text) for turn in chat.turns)
    try:
        return await api.large_work.run(size, render)
    except ContextLengthError as error:
        error.param = chat.settings.client_name("prompt")
        raise


async def constraint_fields(api: Api, chat: ChatRequest, prompt: ChatPrompt, stop_tokens: Collection[int]) -> Json:
    """Return the fields of SamplingParams that force the chat's output and limit the reasoning. Raises RequestError.

    If the answer begins inside reasoning, the grammar starts at the token that closes it, and a stop token closes it.
    """
    output, limit = await asyncio.to_thread(_forced_output, api, chat), reasoning_limit(api, chat, prompt)
    if output is None:
        return limit
    if chat.settings.ignore_eos:
        raise refused_field(output.param, "cannot be combined with ignore_eos. Send one of them.")
    # An error of the calls' grammar names the tool whose schema is the cause.
    schemas = _tool_schemas(chat) if chat.forced_tool is not None else ()
    causes = [OutputFormat("json_schema", schema, path) for path, schema in schemas]
    grammar = await api.compiler.compile([output, *causes])
    if not prompt.thinking:
        return {"grammar": grammar}
    mark = api.tokenizer.reasoning_end_id
    if mark is None:
        raise refused_field(output.param, "this model's reasoning has no end token. Switch reasoning off.")
    stops = tuple(sorted({*stop_tokens} - {mark}))
    return {"grammar": grammar, "grammar_start": mark, "reasoning_stops": stops, **limit}


def reasoning_limit(api: Api, chat: ChatRequest, prompt: ChatPrompt) -> Json:
    """Return the fields of SamplingParams that limit the reasoning of an answer to `prompt`. Raises RequestError."""
    if chat.reasoning_budget is None or not (prompt.reasons and api.tokenizer.reasoning_end):
        return {}
    if api.tokenizer.reasoning_end_id is None:
        text = "this model's reasoning has no end token, so it has no limit. Omit the field."
        raise refused_field(chat.settings.client_name("reasoning_budget"), text)
    return {
        "reasoning_budget": chat.reasoning_budget,
        "reasoning_start": () if prompt.thinking else api.tokenizer.reasoning_start,
        "reasoning_end": api.tokenizer.encode(api.tokenizer.reasoning_end),
    }


def _tool_schemas(chat: ChatRequest) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of the tools' arguments, with their paths in the client's request."""
    for index, tool in enumerate(chat.tools):
        schema = tool["function"].get("parameters") or {}
        yield f"tools[{index}].{chat.settings.client_name('parameters')}", schema


def _forced_output(api: Api, chat: ChatRequest) -> OutputFormat | None:
    if chat.forced_tool is None:
        in_channels = chat.output and api.tokenizer.marks.channels and not chat.continue_final
        return channel_format(chat.output, api.tokenizer.controls) if chat.output and in_channels else chat.output
    tools = [t for t in chat.tools if chat.forced_tool in ("", t["function"]["name"])]
    if not tools:
        name = chat.forced_tool or "any"
        raise refused_field("tool_choice", f"{name!r}: not found. Send it in tools.")
    style = api.tokenizer.call_form
    if style is None:
        raise refused_field("tool_choice", "this model's call format cannot be forced. Use auto.")
    for (path, _), tool in zip(_tool_schemas(chat), chat.tools, strict=True):
        if tool in tools:
            check_schema(tool, path, "json" if isinstance(style, JsonForm) else style)
    single = chat.one_call or bool(chat.forced_tool)
    if isinstance(style, JsonForm):
        return OutputFormat("lark", json_form_grammar(tools, style, api.tokenizer.controls, single=single), "tools")
    grammar = call_grammar(tools, style, api.tokenizer.tool_markers, single=single)
    return OutputFormat("lark", grammar, "tools")
