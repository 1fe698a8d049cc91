"""Sampling, limits and stops of one HTTP request, and the engine's requests made from them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.api.request.context import Api
from coordinator.api.request.errors import (
    ContextLengthError,
    ModelNotLoadedError,
    UnknownModelError,
)
from coordinator.generation.admission import most_waiting
from coordinator.generation.request import GenerationRequest
from coordinator.text.model_info import Json
from proto.errors import RequestError
from proto.params import SamplingParams

MAX_CHOICES = 128
"""Maximum number of answers to one HTTP request; OpenAI's limit on `n`."""


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of one HTTP request, in any dialect. None and empty values mean that the client omitted a field.

    `sampling` holds fields of SamplingParams. `logit_bias` has token ids as strings, as JSON has them. `logprobs` is
    the number of alternatives per token. Every prompt gets `n` answers; answer i has the seed plus i. `field_names`
    maps names of GenerationRequest's fields to the names in the client's request.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)

    def client_name(self, engine_name: str) -> str:
        """Return the client's name of a field of the engine."""
        return self.field_names.get(engine_name, engine_name)


@dataclass(frozen=True)
class Stops:
    """The ends of an answer besides its length: `tokens` for the engine, `strings` for the text."""

    tokens: frozenset[int]
    strings: tuple[str, ...]


def check_model(api: Api, name: str | None) -> None:
    """Raise UnknownModelError or ModelNotLoadedError if `name` is not the served model. None means the served model."""
    if name is not None and not api.model.answers_to(name):
        if api.model_loader is not None and api.model_loader.can_load(name):
            raise ModelNotLoadedError(
                f"model: {name!r} is not loaded, {api.model.id!r} is. Change the model with mtp-coord load or POST "
                "/v1/models/load, or start the server with --auto-load.",
                param="model",
            )
        raise UnknownModelError(
            f"model: {name!r} is not served here. Use {api.model.id!r}.", param="model"
        )


def stops_of(api: Api, settings: GenerationSettings) -> Stops:
    """Return the stops of a request.

    A stop string that is a control token, such as `<|im_end|>`, has no text and becomes a stop token. Raises
    RequestError for a token outside the vocabulary.
    """
    _check_tokens(api, settings.stop_token_ids, "stop_token_ids")
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
    return Stops(frozenset(tokens), tuple(strings))


def requests_of(
    api: Api,
    settings: GenerationSettings,
    prompts: Sequence[tuple[int, ...]],
    *,
    request_id: str,
    stops: Stops,
) -> list[GenerationRequest]:
    """Return `n` requests per prompt, in the order of their choices.

    Raises RequestError, naming the client's field, for a request that can never be served.
    """
    maximum = _max_choices(api)
    if len(prompts) * settings.n > maximum:
        raise RequestError(
            f"n: {len(prompts)} prompts with n {settings.n} exceed {maximum} choices. Send fewer.",
            param="n",
        )
    params = _sampling_params(api, settings)
    seed = settings.seed if settings.seed is not None else secrets.randbits(64)
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        limit = _token_limit(api, settings, len(prompt))
        for i in range(settings.n):
            requests.append(
                GenerationRequest(
                    prompt=prompt,
                    max_tokens=limit,
                    params=replace(params, seed=(seed + i) % 2**64),
                    stop_tokens=stops.tokens,
                    request_id=f"{request_id}-{len(requests)}",
                )
            )
    return requests


def check_prompt(api: Api, prompt: Sequence[int]) -> tuple[int, ...]:
    """Return a prompt that the client sent as tokens. Raises RequestError for a token outside the vocabulary."""
    _check_tokens(api, prompt, "prompt")
    return tuple(prompt)


def _max_choices(api: Api) -> int:
    """Return the maximum number of choices of one request: an idle server must be able to run or queue them all."""
    status = api.status.status()
    if not status.running_limit or status.waiting_limit is None:
        return MAX_CHOICES
    return min(MAX_CHOICES, most_waiting(status.running_limit + status.waiting_limit))


def _sampling_params(api: Api, settings: GenerationSettings) -> SamplingParams:
    chosen: Json = {name: value for name, value in settings.sampling.items() if value is not None}
    if "top_k" in chosen:
        chosen["top_k"] = max(chosen["top_k"], 0)  # vLLM's clients send -1 for no limit
    if settings.logit_bias:
        chosen["logit_bias"] = _logit_bias(api, settings.logit_bias)
    if chosen.get("xtc_probability"):
        # As in mlx-lm's server: without line breaks code and lists lose their form.
        chosen["xtc_exempt"] = api.tokenizer.encode("\n")
    try:
        return replace(api.model.defaults, logprobs=settings.logprobs, **chosen)
    except RequestError as error:
        if error.param is not None:
            error.param = settings.client_name(error.param)
        raise


def _logit_bias(api: Api, bias: Mapping[str, float]) -> dict[int, float]:
    if wrong := [key for key in bias if not (key.isascii() and key.isdigit()) or len(key) > 10]:
        raise RequestError(
            f"logit_bias: {wrong[0]!r:.20} is not a token id. Use numbers as keys.",
            param="logit_bias",
        )
    by_token = {int(key): value for key, value in bias.items()}
    _check_tokens(api, by_token, "logit_bias")
    return by_token


def _check_tokens(api: Api, tokens: Collection[int], param: str) -> None:
    size = api.tokenizer.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise RequestError(
            f"{param}: token {wrong[0]} is invalid. The vocabulary has {size} tokens.", param=param
        )


def _token_limit(api: Api, settings: GenerationSettings, prompt: int) -> int:
    """Return the maximum number of tokens of one answer to `prompt` tokens. Raises RequestError if they do not fit."""
    context = api.model.context_length
    limit = min(context, api.status.status().kv_limit or context)
    bound = "the model's context" if limit == context else "the K/V memory of this cluster"
    prompt_name = settings.client_name("prompt")
    limit_name = settings.client_name("max_tokens")
    if prompt == 0:
        raise RequestError(f"{prompt_name}: empty. Send at least one token.", param=prompt_name)
    if prompt >= limit:
        raise ContextLengthError(
            f"{prompt_name}: {prompt} tokens leave no room for an answer in {bound} of {limit} tokens. Shorten it.",
            prompt_name,
            prompt=prompt,
            max_tokens=None,
            limit=limit,
        )
    room = limit - prompt
    if settings.max_tokens and api.options.clamp_max_tokens:
        return min(settings.max_tokens, room)
    if settings.max_tokens and settings.max_tokens > room:
        raise ContextLengthError(
            f"{limit_name}: {settings.max_tokens} and a prompt of {prompt} tokens exceed {bound} of {limit} tokens. "
            f"Lower {limit_name}.",
            limit_name,
            prompt=prompt,
            max_tokens=settings.max_tokens,
            limit=limit,
        )
    return settings.max_tokens or min(api.options.default_max_tokens, room)
