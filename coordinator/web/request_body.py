"""The body of a request: bounds on its size and its values, and the fields that are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Self, TypeVar

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from coordinator.web.context import LARGE_BYTES, api_of
from coordinator.web.error_responses import field_error, request_error
from proto.errors import ClusterError, RequestError

_REFUSED = {
    "": """
        bad_words banned_strings banned_tokens custom_token_bans allowed_token_ids logits_processors lora
        grammar grammar_string grammar_triggers guided_grammar structured_outputs.grammar structural_tag
        structured_outputs.structural_tag negative_prompt chat_template template documents functions
        context images audio refusal prompt_logprobs prompt_embeds prompt conversation container mcp_servers""",
    "0": """
        min_tokens min_length mirostat mirostat_mode dynatemp_range dry_multiplier n_probs top_logprobs
        logprobs top_a skew smoothing_factor epsilon_cutoff eta_cutoff no_repeat_ngram_size penalty_alpha
        repetition_decay""",
    "0 -1": "nsigma top_n_sigma t_max_predict_ms truncate_prompt_tokens",
    "1": """
        best_of num_beams typical_p typical tfs tfs_z guidance_scale encoder_repetition_penalty""",
    "true": "skip_special_tokens do_sample",
    "false": """
        use_beam_search include_stop_str_in_output return_tokens_as_token_ids post_sampling_probs
        grammar_lazy dynamic_temperature echo""",
    '"auto" "none"': "function_call",
}
NEUTRAL = {
    name: [json.loads(value) for value in values.split()]
    for values, names in _REFUSED.items()
    for name in names.split()
}
"""The values without effect of fields that change the answer, besides empty ones. Other values are refused."""

MAX_FIELDS = 2**16
"""Objects, lists and fields of objects in a body. The slowest to read are messages, about 0.3 s for all."""

MAX_ITEMS = 2**18
"""Values of a body after a comma, besides one for each token of the context. Reading as many takes about 0.2 s."""


class JsonBounds:
    """A counter of the values in a JSON text. The parser stops all threads, so it must not get millions of them."""

    def __init__(self, context: int) -> None:
        self.fields = 0
        self.items = 0
        self._max_items = MAX_ITEMS + context
        self._in_string = False
        self._escaped = False

    def add_part(self, part: bytes) -> None:
        """Count the values in the next part. Raises RequestError above a bound."""
        if not part:
            return
        text = part[self._escaped :].replace(b"\\\\", b"")
        self._escaped = text.endswith(b"\\")
        pieces = text.replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        self.fields += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        self.items += outside.count(b",")
        for count, limit, unit in (
            (self.fields, MAX_FIELDS, "objects, lists and fields"),
            (self.items, self._max_items, "values"),
        ):
            if count > limit:
                raise RequestError(f"request body: more than {limit} {unit}. Send fewer.")


class Body(pydantic.BaseModel):
    """A JSON object without conversion of types. Unknown fields are ignored, those of `NEUTRAL` refused."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    @pydantic.model_validator(mode="after")
    def _check_others(self) -> Self:
        others = self.__pydantic_extra__ or {}
        for name, value in others.items():
            if value not in (*NEUTRAL.get(name, [value]), None, "", [], {}):
                values = "".join(f" or send {json.dumps(each)}" for each in NEUTRAL[name][:1])
                raise field_error(name, f"{value!r:.40} is not supported. Omit the field{values}.")
        others.clear()
        return self


B = TypeVar("B", bound=Body)


def require_json(request: Request) -> None:
    """Raise RequestError for another content type, which a web page could send across sites without permission.

    Some programs send none. A browser then sends the page's origin.
    """
    sent = request.headers.get("content-type")
    if sent is None and "origin" not in request.headers:
        return
    if (sent or "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(f"{request.url.path}: send the header Content-Type: application/json")


async def read_body(request: Request, kind: type[B]) -> B:
    """Return the JSON body as a `kind`. Raises RequestError, or HTTPException if it is too large or too slow."""
    api = api_of(request)
    options, context = api.options, api.model.context_length
    if not options.needs_key:
        require_json(request)
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise HTTPException(415, f"Content-Encoding: {encoding!r:.40} is not supported. Send the body uncompressed.")
    if request.headers.get("content-length", "").isdecimal():  # before any of it is read
        _check_size(int(request.headers["content-length"]), options.max_body_bytes)
    with api.large_work.reading() as reserve:
        try:
            async with asyncio.timeout(options.body_seconds):
                content = await _read_bytes(request, options.max_body_bytes, JsonBounds(context), reserve)
        except TimeoutError:
            raise HTTPException(
                408, f"request body: not complete after {options.body_seconds:g} s. Send it faster."
            ) from None
        except ClientDisconnect:
            raise HTTPException(400, "request body: the client disconnected") from None

        parse = partial(parse_body, kind, content)
        large = len(content) > LARGE_BYTES
        return await api.large_work.run(len(content), parse) if large else parse()


def parse_body(kind: type[B], content: bytes | bytearray) -> B:
    """Return `content` as a `kind`. Raises RequestError for invalid content."""
    try:
        return kind.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise request_error(error.errors(include_url=False, include_input=False)) from error


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise HTTPException(413, f"request body: exceeds {limit} bytes. Send a shorter one.")


async def _read_bytes(request: Request, limit: int, bounds: JsonBounds, reserve: Callable[[int], None]) -> bytearray:
    """Return the body. A refused one is read to its end, because most clients read no answer before."""
    content, size, refusal = bytearray(), 0, None
    async for chunk in request.stream():
        size += len(chunk)
        _check_size(size, limit)
        if refusal is not None:
            continue
        try:
            bounds.add_part(chunk)
            if size > LARGE_BYTES:
                reserve(len(chunk))
            content += chunk
        except ClusterError as error:
            refusal = error
            content.clear()
    if refusal is not None:
        raise refusal
    return content
