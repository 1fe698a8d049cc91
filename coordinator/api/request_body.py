"""The body of a request: keys, bounds on its size and its values, and the thread for large bodies.

The fields of a body are attributes of its class. A table has those of other servers: hints, refused values, synonyms.
docs/API.md shows the table, and a test compares both.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from coordinator.api.context import LARGE_BYTES, ApiOptions, api_of
from coordinator.api.error_responses import field_error, request_error
from coordinator.text.calls import Json
from coordinator.trust.registry import Scope
from proto.errors import AccessError, ClusterError, RequestError

log = logging.getLogger(__name__)

HINTS = frozenset(
    """
    add_bos_token add_special_tokens allowed_domains annotations background_tasks blocked_domains cache_control
    cache_prompt cache_salt caller chat_id citations client_metadata context_management defer_loading description
    display draft_model dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
    dynatemp_high dynatemp_low dynatemp_max dynatemp_min eager_input_streaming early_stopping f16_kv features files
    filter_ids guided_decoding_backend guided_whitespace_pattern id id_slot include include_obfuscation
    include_reasoning index keep_alive kv_transfer_params length_penalty logits_all low_vram main_gpu max_length
    max_tokens_second max_tool_calls max_uses media_io_kwargs metadata min_keep mirostat_eta mirostat_tau
    mm_processor_kwargs modalities moderation n_keep name num_batch num_ctx num_gpu num_keep num_thread numa parsed
    parsed_arguments penalize_newline penalize_nl prediction preserved_tokens priority prompt_cache_key
    prompt_cache_options prompt_cache_retention provider_specific_fields reasoning.exclude reasoning.summary
    reasoning_details rep_pen_range rep_pen_slope repeat_last_n repetition_penalty_range request_id response_fields
    return_progress safety_identifier sampler_order sampler_priority samplers service_tier session_id shift signature
    slot_id smoothing_curve spaces_between_special_tokens speculative_ngram store stream_options strict
    temperature_last thinking.display thinking_blocks timings_per_token tool_ids tool_servers tools[].web_search
    truncate truncation truncation_length ttl type use_mlock use_mmap user_location verbose verbosity vllm_xargs
    vocab_only web_search_options
    """.split()
)
"""Fields of other servers and clients, accepted without effect. `GET /v1/models` lists them as `ignored_fields`."""

_REFUSED = {
    "": """
        bad_words banned_strings banned_tokens custom_token_bans allowed_token_ids logits_processors lora
        grammar grammar_string grammar_triggers guided_grammar structured_outputs.grammar structural_tag
        structured_outputs.structural_tag negative_prompt chat_template template documents functions suffix
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
        grammar_lazy dynamic_temperature""",
    '"auto" "none"': "function_call",
}
NEUTRAL = {
    name: [json.loads(value) for value in values.split()]
    for values, names in _REFUSED.items()
    for name in names.split()
}
"""The values without effect of fields that change the answer, besides empty ones. Other values are refused."""

SYNONYMS = {
    "max_tokens": "n_predict num_predict max_new_tokens max_completion_tokens",
    "max_output_tokens": "max_tokens max_completion_tokens",
    "repetition_penalty": "repeat_penalty rep_pen",
    "seed": "sampler_seed",
    "stop": "stopping_strings stop_sequences",
    "ignore_eos": "ban_eos_token",
    "reasoning_effort": "reasoning.effort",
    "enable_thinking": "thinking.type reasoning.enabled",
    "thinking_budget": "thinking.budget_tokens reasoning.max_tokens thinking_token_budget",
    "guided_json": "json_schema structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "reasoning_content": "messages[].reasoning messages[].thinking",
}
"""Other names of a field. They count only in bodies that have the field."""

_SYNONYMS = [(name, target) for target, names in SYNONYMS.items() for name in names.split()]

_OBJECTS = ("reasoning", "thinking", "structured_outputs")
"""Fields whose members have rows of their own in the table."""

SWITCH = {"enabled": True, "adaptive": True, "disabled": False}
"""The values of `thinking.type`, as `enable_thinking` has them."""

MAX_UNKNOWN = 32
"""Maximum number of unknown fields of a request that its answer names."""


@dataclass
class FieldNotes:
    """The fields of a request that its body lacks: `unknown` ones, and `synonyms` from field to the client's name."""

    unknown: set[str] = field(default_factory=set)
    synonyms: dict[str, str] = field(default_factory=dict)

    def translate(self, sent: Json, names: Set[str], place: str) -> Json:
        """Return `sent` with fields of `names` only. Raises PydanticCustomError for a value that changes the answer."""
        if sent.keys() <= names:
            return sent
        known = {name: value for name, value in sent.items() if name in names}
        for name, value in sent.items():
            if name in names:
                continue
            if name in _OBJECTS and isinstance(value, dict):
                for member, inner in value.items():
                    self._apply_row(f"{name}.{member}", inner, known, names, place)
            else:
                self._apply_row(name, value, known, names, place)
        return known

    def _apply_row(self, name: str, value: Any, known: Json, names: Set[str], place: str) -> None:
        """Apply the table to one field that is not in `names`. A synonym is added to `known`."""
        if value is None:
            return
        paths = {place + name, name}
        for path, target in _SYNONYMS:
            if path in paths and target in names:
                value = SWITCH.get(str(value), value) if name == "thinking.type" else value
                if known.get(target) not in (None, value):
                    raise field_error(name, f"differs from {target}. Send one of them.")
                known[target] = value
                self.synonyms[target] = name
                return
        if name in NEUTRAL:
            _check_neutral(name, value)
        elif HINTS.isdisjoint(paths):
            self.add_unknown(place + name)

    def add_unknown(self, path: str) -> None:
        """Record an ignored field, in characters that a header may have, and log it once."""
        if len(self.unknown) < MAX_UNKNOWN:
            printable = re.sub(r"[^\w.\[\]-]", "?", path, flags=re.ASCII)[:64]
            self.unknown.add(printable)
            _log_unknown(printable)


@lru_cache(1024)
def _log_unknown(name: str) -> None:
    log.info("unknown request field ignored", extra={"field": name})


def _check_neutral(name: str, value: Any) -> None:
    if value in (*NEUTRAL[name], "", [], {}):
        return
    if name in ("images", "audio"):
        raise field_error(
            name, "not supported here. Send images as parts of the content, and no audio."
        )
    values = "".join(f" or send {json.dumps(each)}" for each in NEUTRAL[name][:1])
    raise field_error(name, f"{value!r:.40} is not supported. Omit the field{values}.")


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


MAX_DIGITS = 15
"""Maximum digits of a number, so that no text is converted that no list could be so long for."""


def number_in_query(request: Request, name: str, default: int) -> int:
    """Return the whole number `name` of the query. Raises RequestError for other values."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_DIGITS:
        raise RequestError(f"{name}: {text!r:.40} is not a whole number", param=name)
    return int(text)


class Body(pydantic.BaseModel):
    """A JSON object without conversion of types. `FieldNotes` decides about other fields; `place` is its path."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)
    place: ClassVar[str] = ""
    names: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the names of the fields, as clients write them."""
        cls.names = frozenset(each.alias or name for name, each in cls.model_fields.items())

    @pydantic.model_validator(mode="before")
    @classmethod
    def _translate_fields(cls, sent: Any, info: pydantic.ValidationInfo) -> Any:
        if not isinstance(sent, dict) or cls.model_config.get("extra") == "allow":
            return sent
        notes = info.context if isinstance(info.context, FieldNotes) else FieldNotes()
        return notes.translate(sent, cls.names, cls.place)


B = TypeVar("B", bound=Body)
T = TypeVar("T")

Many = Annotated[list[T], pydantic.Field(fail_fast=True)]
"""A list whose validation ends at the first error. A client could otherwise cause an error object for each byte."""

MAX_LABEL = 256
"""Maximum length of `user` in characters: it becomes part of a log line."""


def _check_label(text: str) -> str:
    if len(text) > MAX_LABEL or not text.isprintable():
        raise ValueError(f"the label is logged. Send at most {MAX_LABEL} printable characters.")
    return text


Label = Annotated[str, pydantic.AfterValidator(_check_label)]
"""A client's name for the log."""

StopString = Annotated[str, pydantic.Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], pydantic.Field(max_length=64)]
"""Stop strings. The end of the text is compared with each of them at every token."""


def _check_limit(limit: int) -> int | None:
    if limit == 0:
        raise ValueError("send 1 or more, or -1 for no limit")
    return limit if limit > 0 else None


TokenLimit = Annotated[int, pydantic.Field(ge=-2), pydantic.AfterValidator(_check_limit)]
"""A number of tokens, None for a negative one: llama.cpp's and LM Studio's clients send it for no limit."""

Seed = Annotated[int, pydantic.Field(ge=-(2**63), lt=2**64)]


def shape(description: str) -> pydantic.WrapValidator:
    """Return a validator with one message for a union of types, instead of one per type."""

    def check(value: Any, handler: pydantic.ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except pydantic.ValidationError as error:
            raise PydanticCustomError("shape", "send {what}", {"what": description}) from error

    return pydantic.WrapValidator(check)


ADMIN_PATHS = frozenset({"/replan", "/trace", "/v1/models/load"})
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
    with api.large_work.reading() as reserve:
        try:
            async with asyncio.timeout(options.body_seconds):
                content = await _read_bytes(
                    request, options.max_body_bytes, JsonBounds(context), reserve
                )
        except TimeoutError:
            raise HTTPException(
                408, f"request body: not complete after {options.body_seconds:g} s. Send it faster."
            ) from None
        except ClientDisconnect:
            raise HTTPException(400, "request body: the client disconnected") from None

        request.state.notes = FieldNotes()
        parse = partial(parse_body, kind, content, request.state.notes)
        large = len(content) > LARGE_BYTES
        return await api.large_work.run(len(content), parse) if large else parse()


def parse_body(kind: type[B], content: bytes | bytearray, notes: FieldNotes) -> B:
    """Return `content` as a `kind`. Raises RequestError for invalid content."""
    try:
        return kind.model_validate_json(content, context=notes)
    except pydantic.ValidationError as error:
        raise request_error(error) from error


async def _read_bytes(
    request: Request, limit: int, bounds: JsonBounds, reserve: Callable[[int], None]
) -> bytearray:
    """Return the body. A refused one is read to its end, because most clients read no answer before."""
    content, size, refusal = bytearray(), 0, None
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise HTTPException(413, f"request body: exceeds {limit} bytes. Send a shorter one.")
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
