"""From a checked body to what the engine takes: limits, sampling, stops, one request a choice."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.api.context import Api
from coordinator.api.errors import ContextLengthError, UnknownModelError
from coordinator.api.schemas import MAX_CHOICES, GenerationBody
from coordinator.generation.request import GenerationRequest
from coordinator.text.model_info import Json
from proto.errors import RequestError
from proto.params import SamplingParams

_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class Stops:
    """What ends an answer besides its length: tokens for the engine, strings for the text."""

    tokens: frozenset[int]
    strings: tuple[str, ...]


def check_model(api: Api, name: str | None) -> None:
    """Raise UnknownModelError unless the served model is meant; a body without a model means it."""
    if name is not None and not api.model.answers_to(name):
        raise UnknownModelError(
            f"the model {name!r} is not served here; {api.model.id!r} is", param="model"
        )


def stops_of(api: Api, body: GenerationBody) -> Stops:
    """A stop string that is a control token, such as `<|im_end|>`, has no text: it stops as a token."""
    _check_tokens(api, body.stop_token_ids or (), "stop_token_ids")
    tokens = set(body.stop_token_ids or ())
    if not body.ignore_eos:
        tokens |= api.tokenizer.eos_ids
    strings = []
    for string in body.stop_strings:
        control = api.tokenizer.control_id(string)
        if control is None:
            strings.append(string)
        else:
            tokens.add(control)
    return Stops(frozenset(tokens), tuple(strings))


def requests_of(
    api: Api,
    body: GenerationBody,
    prompts: Sequence[tuple[int, ...]],
    *,
    request_id: str,
    stops: Stops,
    logprobs: int | None,
) -> list[GenerationRequest]:
    """`n` requests a prompt, in the order of their choices; the i-th of a prompt has the seed plus i.

    Raises RequestError, naming the field, for what can never be served.
    """
    count = body.n or 1
    most = _most_choices(api)
    if len(prompts) * count > most:
        raise RequestError(
            f"{len(prompts)} prompts with n {count} are more than {most} choices", param="n"
        )
    params = _sampling(api, body, logprobs)
    seed = body.seed if body.seed is not None else secrets.randbits(64)
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        limit = _token_limit(api, body, len(prompt))
        for i in range(count):
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


def _most_choices(api: Api) -> int:
    """Of one request: no more than may run and wait, or an idle server would be too full for it."""
    status = api.status.status()
    if not status.running_limit or status.waiting_limit is None:
        return MAX_CHOICES
    return min(MAX_CHOICES, status.running_limit + status.waiting_limit)


def check_prompt(api: Api, prompt: Sequence[int]) -> tuple[int, ...]:
    """A prompt the client gave as tokens. Raises RequestError for ids that have no text."""
    _check_tokens(api, prompt, "prompt")
    return tuple(prompt)


def _sampling(api: Api, body: GenerationBody, logprobs: int | None) -> SamplingParams:
    chosen: Json = {name: getattr(body, name) for name in _SAMPLING}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if body.top_k is not None:
        chosen["top_k"] = max(body.top_k, 0)
    if body.logit_bias:
        chosen["logit_bias"] = _logit_bias(api, body.logit_bias)
    if chosen.get("xtc_probability"):
        # As mlx-lm's server does: without line breaks code and lists fall apart.
        chosen["xtc_exempt"] = api.tokenizer.encode("\n")
    return replace(api.model.defaults, logprobs=logprobs, **chosen)


def _logit_bias(api: Api, bias: dict[str, float]) -> dict[int, float]:
    if wrong := [key for key in bias if not (key.isascii() and key.isdigit())]:
        raise RequestError(f"logit_bias: {wrong[0]!r} is no token id", param="logit_bias")
    by_token = {int(key): value for key, value in bias.items()}
    _check_tokens(api, by_token, "logit_bias")
    return by_token


def _check_tokens(api: Api, tokens: Sequence[int] | dict[int, float], param: str) -> None:
    size = api.tokenizer.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise RequestError(
            f"{param}: there is no token {wrong[0]}, the vocabulary has {size}", param=param
        )


def _token_limit(api: Api, body: GenerationBody, prompt: int) -> int:
    """Most tokens of one answer to `prompt` tokens. Raises RequestError where the two cannot fit."""
    context = api.model.context_length
    if prompt == 0:
        raise RequestError(
            "the prompt is empty: there is nothing to go on from", param=body.prompt_field
        )
    if prompt >= context:
        raise ContextLengthError(
            f"{body.prompt_field}: {prompt} tokens leave no room for an answer in the model's context of "
            f"{context} tokens",
            param=body.prompt_field,
        )
    if body.limit and prompt + body.limit > context:
        raise ContextLengthError(
            f"a prompt of {prompt} tokens and {body.limit_field} {body.limit} exceed the model's context of "
            f"{context} tokens",
            param=body.limit_field,
        )
    # Without a wish it is what fits, into the memory of the plan in force too.
    room = min(context, api.status.status().kv_limit or context)
    return body.limit or max(1, min(api.options.default_max_tokens, room - prompt))
