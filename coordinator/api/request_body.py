"""The body of a request: keys, bounds on its size and its values, and the fields that are refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Self, TypeVar, cast, get_args

import pydantic
from pydantic import AliasChoices, AliasPath
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from coordinator.api.context import LARGE_BYTES, ApiOptions, api_of
from coordinator.api.conversation import RoleName, newest_of_user, note_of, role_of
from coordinator.api.error_responses import field_error, request_error
from coordinator.text.schemas import Json
from coordinator.trust.keys import Scope
from proto.errors import AccessError, ClusterError, RequestError

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


class Told(Body):
    """An object of the history. Nothing of what other servers have added to it is refused."""

    @pydantic.model_validator(mode="after")
    def _check_others(self) -> Self:
        (self.__pydantic_extra__ or {}).clear()
        return self


def named(*names: str) -> Any:
    """Return an optional field of several names. The first that is sent counts; one with a dot is a path."""
    paths = [AliasPath(*name.split(".")) if "." in name else name for name in names]
    return pydantic.Field(None, validation_alias=AliasChoices(*paths))


B = TypeVar("B", bound=Body)
T = TypeVar("T")

Many = Annotated[list[T], pydantic.Field(fail_fast=True)]
"""A list whose validation ends at the first error. A client could otherwise cause an error object for each byte."""


def _read_or_tell(content: Any, read: pydantic.ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(content)
    except pydantic.ValidationError:
        return note_of({"type": "result", "content": content})


AS_WORDS = pydantic.WrapValidator(_read_or_tell)
"""A validator of a tool's output, which an agent cannot change: an invalid one becomes its words."""


def _role(turn: Any) -> str:
    """Return the role of a message that may be invalid. An unknown name counts as the user's."""
    name = turn.get("role") if isinstance(turn, dict) else "user"
    if name in get_args(RoleName):
        return role_of(cast(RoleName, name))
    return "user" if isinstance(name, str) else "tool"


def _as_text(turn: Any) -> Json:
    content = turn if isinstance(turn, dict) else {"content": turn}
    role = content["role"] if content.get("role") in get_args(RoleName) else "user"
    return {"role": role, "content": note_of({**content, "type": str(content.get("type") or "message")})}


def _read_history(turns: Any, read: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Validate a history. An invalid message becomes its words, except the newest of the user: others stay invalid."""
    try:
        return read(turns)
    except pydantic.ValidationError:
        if not isinstance(turns, list):
            raise
    newest, found = newest_of_user([*map(_role, turns)]), [*turns]
    for index, turn in enumerate(turns):
        with suppress(pydantic.ValidationError):
            read([turn])
            continue
        if index != newest:
            found[index] = _as_text(turn)
    return read(found)


History = Annotated[list[T], pydantic.Field(fail_fast=True), pydantic.WrapValidator(_read_history)]
"""The messages of a conversation. A client cannot change an earlier one, so it is never refused."""

StopString = Annotated[str, pydantic.Field(max_length=256)]
StopStrings = Annotated[list[StopString], pydantic.Field(max_length=64)]
"""Stop strings. The end of the text is compared with each of them at every token. Empty ones have no effect."""


def _check_limit(limit: int) -> int | None:
    if limit == 0:
        raise ValueError("send 1 or more, or -1 for no limit")
    return limit if limit > 0 else None


def _check_budget(limit: int) -> int | None:
    return limit if limit >= 0 else None


Budget = Annotated[int, pydantic.Field(ge=-2), pydantic.AfterValidator(_check_budget)]
"""A number of reasoning tokens. 0 switches the reasoning off, a negative one is no limit."""

TokenLimit = Annotated[int, pydantic.Field(ge=-2), pydantic.AfterValidator(_check_limit)]
"""A number of tokens, None for a negative one: llama.cpp's and LM Studio's clients send it for no limit."""

Seed = Annotated[int, pydantic.Field(ge=-(2**63), lt=2**64)]


ADMIN_PATHS = frozenset({"/trace", "/v1/models/load"})
ADMIN_PREFIX = "/v1/cluster/"
METRICS_PATHS = frozenset({"/metrics", "/status", "/v1/events"})
"""Paths that need another scope than inference."""


def keys_are_set(options: ApiOptions) -> bool:
    """Return whether requests need a key."""
    ring = options.key_ring
    return bool(options.api_keys or (ring and (ring.stored_keys() or ring.required)))


async def require_key(request: Request) -> None:
    """Raise HTTPException 401 unless the request carries a valid key or no keys are set.

    The key is in `Authorization: Bearer KEY` or, as Anthropic's clients send it, in `x-api-key`. Every key is compared,
    in constant time. `request.state` gets a digest as `owner`, and the `key_name` of a named key. Raises AccessError
    for a named key without the scope of the request, and for a web page of another site.
    """
    check_origin(request)
    options = api_of(request).options
    ring = options.key_ring
    if not keys_are_set(options):
        return
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    sent = credentials if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    content = sent.strip().encode("latin-1")  # headers are bytes that Starlette decodes as Latin-1
    request.state.owner = hashlib.sha256(b"owner of answers " + content).hexdigest()
    matches = [secrets.compare_digest(content, key.encode()) for key in options.api_keys]
    named = ring.find(content) if ring else None
    if any(matches):
        return
    if ring is None or named is None:
        text = "API key: missing or invalid. Send Authorization: Bearer KEY."
        raise HTTPException(401, text, headers={"WWW-Authenticate": "Bearer"})
    request.state.key_name = named.name
    ring.check_scope(named, scope_of(request.url.path))


def scope_of(path: str) -> Scope:
    """Return the scope that a request for `path` needs."""
    if path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX):
        return Scope.ADMIN
    return Scope.METRICS if path in METRICS_PATHS else Scope.INFERENCE


def require_json(request: Request) -> None:
    """Raise RequestError for another content type, which a web page could send across sites without permission.

    Some programs send none. A browser then sends the page's origin.
    """
    sent = request.headers.get("content-type")
    if sent is None and "origin" not in request.headers:
        return
    if (sent or "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(f"{request.url.path}: send the header Content-Type: application/json")


def check_origin(request: Request) -> None:
    """Raise AccessError for a request that a web page of another site sends, unless the user allowed its origin.

    Images and frames of a page send no origin, but the relation of the sites. A link that the user follows is allowed.
    """
    headers, allowed = request.headers, api_of(request).options.allowed_origins
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if not {origin, "*"}.isdisjoint(allowed):
        return
    if origin is None:
        own = site in ("same-origin", "none") or headers.get("sec-fetch-dest") == "document"
    else:
        own = origin.partition("://")[2] == headers.get("host")
    if not own:
        raise AccessError(
            f"Origin: web pages of {origin or site!r:.100} may not call this server. Allow them with --allowed-origins."
        )


async def read_body(request: Request, kind: type[B]) -> B:
    """Return the JSON body as a `kind`. Raises RequestError, or HTTPException if it is too large or too slow."""
    api = api_of(request)
    options, context = api.options, api.model.context_length
    if not keys_are_set(options):
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
