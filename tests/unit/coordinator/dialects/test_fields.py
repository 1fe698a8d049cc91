"""Request fields of other servers: other names, neutral values, unknown fields, and formats that cannot be forced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.dialects import anthropic, ollama, openai_responses, openai_schemas
from coordinator.schedule.request import GenerationRequest
from coordinator.text.grammars import OutputFormat
from coordinator.web.request_body import NEUTRAL, Body
from proto.params import MAX_GRAMMAR_BYTES
from tests.support.api.api_client import REQUESTS, USER, ApiClient, api_saying

_TEXT = (Path(__file__).parents[4] / "docs" / "API.md").read_text()
PAGE = re.sub(r"^```.*?^```$", "", _TEXT, flags=re.MULTILINE | re.DOTALL)
"""The page without its blocks of code."""


@pytest.mark.parametrize(
    "kind",
    [
        openai_schemas.ChatBody,
        openai_schemas.CompletionBody,
        openai_responses.ResponsesBody,
        anthropic.MessagesBody,
        ollama.ChatBody,
        ollama.GenerateBody,
        ollama.Options,
    ],
)
def test_the_page_names_every_field_that_is_taken(kind: type[Body]) -> None:
    """API.md has every field with an effect."""
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall("`[^`]+`", PAGE))))
    assert kind.model_fields.keys() - {"text_format"} <= named, "written as text.format"


async def test_neutral_values_are_taken_and_others_refused() -> None:
    """Each field that cannot be honoured is taken at each of its neutral values, and otherwise named in a 400."""
    api = ApiClient()
    for name, values in NEUTRAL.items():
        chat = openai_schemas.ChatBody.model_fields
        path = "/v1/responses" if name in chat else "/v1/chat/completions"
        for value in (*values, None, "", [], {}):
            response = await api.post(path, {**REQUESTS[path], name: value})
            assert response.status_code == 200, (name, value, response.text)
        response = await api.post(path, {**REQUESTS[path], name: [7]})
        assert response.status_code == 400, (name, response.text)
        assert response.json()["error"]["param"] == name
        assert name in response.json()["error"]["message"]


SYNONYMS: dict[str, tuple[str, Any]] = {
    "max_tokens": ("max_completion_tokens n_predict num_predict max_new_tokens", 9),
    "max_output_tokens": ("max_tokens max_completion_tokens", 9),
    "repetition_penalty": ("repeat_penalty rep_pen", 1.3),
    "seed": ("sampler_seed", 12),
    "stop": ("stop_sequences stopping_strings", ["zzz"]),
    "ignore_eos": ("ban_eos_token", True),
    "reasoning_effort": ("reasoning.effort", "none"),
    "enable_thinking": ("thinking.type reasoning.enabled", False),
    "thinking_budget": (
        "thinking_token_budget thinking.budget_tokens reasoning.max_tokens",
        30,
    ),
    "guided_json": ("json_schema structured_outputs.json", {"type": "object"}),
    "guided_regex": ("structured_outputs.regex", "[a-z]+"),
    "guided_choice": ("structured_outputs.choice", ["yes", "no"]),
    "reasoning_content": ("messages[].reasoning messages[].thinking", "hm"),
}
"""The other names of fields, and a value for each."""


def stripped(request: GenerationRequest) -> tuple[Any, ...]:
    """Return what a request asks of the engine."""
    params = request.params.to_wire()
    params.pop("seed") if params["seed"] != SYNONYMS["seed"][1] else None
    return request.prompt, request.max_tokens, params, request.stop_tokens


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, key) for key, (names, _) in SYNONYMS.items() for name in names.split()],
)
async def test_a_synonym_does_what_its_field_does(name: str, target: str) -> None:
    """The engine gets the same request."""
    value = "disabled" if name == "thinking.type" else SYNONYMS[target][1]
    path = "/v1/responses" if target == "max_output_tokens" else "/v1/chat/completions"
    if name == "max_completion_tokens" and target == "max_tokens":
        path = "/v1/completions"
    api = ApiClient()

    def body(field: str, content: Any) -> dict[str, Any]:
        """Return a request with a field, given as a path."""
        outer, _, inner = field.partition(".")
        if outer == "messages[]":
            asked = [USER, {"role": "assistant", "content": "a", inner: content}, USER]
            return {"messages": asked}
        return {**REQUESTS[path], outer: {inner: content} if inner else content}

    place = name.rpartition(".")[0] + "." if name.startswith("messages") else ""
    for sent in (REQUESTS[path], body(place + target, SYNONYMS[target][1]), body(name, value)):
        response = await api.post(path, sent)
        assert response.status_code == 200, response.text
    plain, direct, mapped = map(stripped, api.generator.requests)
    assert direct == mapped
    if target not in ("stop", "thinking_budget", "reasoning_content"):
        assert direct != plain, "the value has no effect, so the comparison proves nothing"


async def test_a_null_of_one_name_leaves_the_other() -> None:
    """OpenAI has two names of the limit, and clients send both."""
    api = ApiClient()
    await api.chat(max_tokens=None, max_completion_tokens=7)
    await api.chat(max_tokens=7, max_completion_tokens=None)
    assert [request.max_tokens for request in api.generator.requests] == [7, 7]


async def test_an_error_of_a_synonym_names_it() -> None:
    """`error.param` is the name that the client wrote."""
    for body, name in (
        ({"repeat_penalty": "high"}, "repeat_penalty"),
        ({"n_predict": 1.5}, "n_predict"),
        ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar"),
    ):
        response = await ApiClient().chat(**body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("path", REQUESTS)
async def test_unknown_fields_are_ignored(path: str) -> None:
    """Every dialect answers, and the engine gets the same prompt."""
    api = ApiClient()
    for sent in (REQUESTS[path], {**REQUESTS[path], "temprature": 1, "cache_control": {"type": "x"}}):
        response = await api.post(path, sent)
        assert response.status_code == 200, response.text
    first, second = api.generator.requests
    assert first.prompt == second.prompt


def test_a_stored_item_is_read_again() -> None:
    """The items of a stored conversation, images included, are those of the request."""
    parts = [{"type": "input_text", "text": "Look"}, {"type": "input_image", "image_url": "data:x"}]
    sent = [{"type": "message", "role": "user", "content": parts}]
    items = openai_responses._items.validate_python(sent)
    stored = [openai_responses.stored_item(item) for item in items]
    assert stored == sent
    assert openai_responses._items.validate_python(stored) == items


CACHED = {"cache_control": {"type": "ephemeral"}}

CLIENTS: list[tuple[str, dict[str, Any]]] = [
    (  # SillyTavern's text completion
        "/v1/completions",
        {"max_new_tokens": 90, "max_tokens": 90, "n_predict": 90, "num_predict": 90, "min_p": 0}
        | {"typical_p": 1, "typical": 1, "tfs": 1, "tfs_z": 1, "top_a": 0, "skew": 0, "nsigma": 0}
        | {"repetition_penalty": 1.1, "repeat_penalty": 1.1, "rep_pen": 1.1, "rep_pen_range": 0}
        | {"repeat_last_n": 0, "min_tokens": 0, "max_length": 8192, "add_bos_token": True}
        | {"smoothing_factor": 0, "smoothing_curve": 1, "dry_multiplier": 0, "dry_base": 1.75}
        | {"dry_allowed_length": 2, "dry_sequence_breakers": '["\\n"]', "dry_penalty_last_n": 0}
        | {"ban_eos_token": False, "ignore_eos": False, "skip_special_tokens": True}
        | {"mirostat": 0, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1}
        | {"custom_token_bans": "", "banned_strings": [], "sampler_order": [6, 0], "samplers": []}
        | {"xtc_threshold": 0.1, "xtc_probability": 0, "guidance_scale": 1, "grammar": ""}
        | {"stop": ["\nUser:"], "stopping_strings": ["\nUser:"], "temperature_last": True}
        | {"include_reasoning": True, "cache_prompt": True, "do_sample": True, "api_type": "x"},
    ),
    (  # vLLM's extra parameters
        "/v1/chat/completions",
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "min_tokens": 0, "top_k": -1}
        | {"skip_special_tokens": True, "spaces_between_special_tokens": True, "bad_words": []}
        | {"include_stop_str_in_output": False, "truncate_prompt_tokens": None, "echo": False}
        | {"prompt_logprobs": None, "add_generation_prompt": True, "continue_final_message": False}
        | {"add_special_tokens": False, "documents": None, "chat_template": None, "priority": 0}
        | {"mm_processor_kwargs": None, "request_id": "r", "cache_salt": "s", "top_logprobs": 0}
        | {"stop": [f"word {number}" for number in range(64)], "temperature": 0}
        | {"return_tokens_as_token_ids": False, "kv_transfer_params": None, "stream_options": {}},
    ),
    (  # llama.cpp's page, and LM Studio
        "/v1/chat/completions",
        {"cache_prompt": True, "id_slot": -1, "n_probs": 0, "dynatemp_range": 0, "max_tokens": -1}
        | {"dynatemp_exponent": 1, "typical_p": 1, "samplers": "edkypmxt"}
        | {"timings_per_token": True}
        | {"reasoning_format": "auto", "ttl": 300, "draft_model": "d", "return_progress": True},
    ),
    (  # Open WebUI
        "/v1/chat/completions",
        {"chat_id": "c", "session_id": "s", "id": "i", "files": [], "features": {"x": False}}
        | {"functions": [], "tool_ids": [], "background_tasks": {"title": True}},
    ),
    (  # a history that OpenRouter's and Ollama's clients send back
        "/v1/chat/completions",
        {
            "messages": [
                {**USER, "images": []},
                {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_details": []},
                {**USER, "tool_calls": [], "refusal": None, "annotations": []},
            ],
            "reasoning": {"effort": "low", "exclude": False, "enabled": True},
        },
    ),
    (
        "/api/chat",
        {"options": {"repeat_last_n": 64, "mirostat": 0, "tfs_z": 1, "top_k": -1, "num_ctx": 4096}}
        | {"keep_alive": 0, "messages": [{**USER, "images": []}]},
    ),
    *(
        ("/v1/chat/completions", {name: value})
        for name, value in {"top_p": 0, "user": "u" * 300, "reasoning_effort": "max", "model": ""}.items()
    ),
    ("/v1/chat/completions", {"n": 1, "frequency_penalty": None}),
    ("/v1/responses", {"truncation": "auto", "top_logprobs": 0, "include": ["x"], "top_k": 5}),
    (
        "/v1/responses",
        {"reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"}, "prompt_cache_key": "k"}
        | {"text": {"verbosity": "low"}, "truncation": "disabled"},
    ),
    ("/v1/messages", {"betas": [], "mcp_servers": [], "container": None}),
    (  # Claude Code
        "/v1/messages",
        {"system": [{"type": "text", "text": "Rule", **CACHED}], "metadata": {"user_id": "u"}}
        | {"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}
        | {"tools": [{"name": "f", "input_schema": {"type": "object"}, **CACHED}]}
        | {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    ),
]


@pytest.mark.parametrize(("path", "body"), CLIENTS)
async def test_what_clients_send_is_taken(path: str, body: dict[str, Any]) -> None:
    """Fields at the defaults of other servers and their clients cause no error."""
    response = await ApiClient().post(path, {**REQUESTS[path], **body})
    assert response.status_code == 200, response.text


async def test_a_choice_and_an_expression_constrain_both_endpoints() -> None:
    """Guides become the engine's grammar. Two formats at once are refused."""
    api = ApiClient()
    formats: list[tuple[dict[str, Any], OutputFormat]] = [
        ({"guided_choice": ['"yes"', "no"]}, OutputFormat("choice", ['"yes"', "no"], "f")),
        ({"guided_regex": "a/b+"}, OutputFormat("regex", "a/b+", "f")),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            OutputFormat("json_schema", {"type": "array"}, "f"),
        ),
    ]
    for body, output in formats:
        grammar = await api.app.state.api.compiler.compile([output])
        for response in (await api.chat(**body), await api.complete(**body)):
            assert response.status_code == 200, response.text
            assert api.generator.requests[-1].params.grammar == grammar
    response = await api.chat(guided_regex="a", response_format={"type": "json_object"})
    assert response.json()["error"]["param"] == "guided_regex"


async def test_a_negative_seed_is_random() -> None:
    """-1 is no seed, as at vLLM, llama.cpp and Ollama."""
    api = ApiClient()
    for _ in range(2):
        await api.chat(seed=-1)
    first, second = api.generator.requests
    assert first.params.seed != second.params.seed


BAD_PATTERN = {"type": "string", "pattern": "(("}
IN_AN_ITEM = {"type": "array", "items": {"type": "object", "properties": {"x": BAD_PATTERN}}}
ROOT = "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def api() -> ApiClient:
    """Return an API with a model that answers OK."""
    return api_saying("</think>ok")


def named(schema: Any) -> dict[str, Any]:
    """Return the format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"type": "text"}}}, ""),
        ({"properties": {"ok": {"type": "string"}, "a": IN_AN_ITEM}}, ""),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}], "$defs": {"d": BAD_PATTERN}}, ""),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, ""),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"type": "integer"}]}}}, None),
        ({"properties": {"a": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}}, ""),
        ({"properties": [1]}, ""),
        ({"anyOf": {"type": "string"}}, ""),
    ],
)  # fmt: skip
async def test_a_schema_that_cannot_be_forced_is_a_400_with_its_path(
    api: ApiClient, schema: Any, path: str | None
) -> None:
    """The error names the schema that fails, and the part of it that is no schema."""
    response = await api.chat(response_format=named(schema))
    if path is None:  # a schema that no value has may be refused or compiled
        assert response.status_code in (200, 400)
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == ROOT + path
    assert error["message"].startswith(ROOT + path)


async def test_deep_schemas_are_refused(api: ApiClient) -> None:
    """A schema with too many levels is a client error."""
    schema: Any = {"type": "string"}
    for _ in range(150):
        schema = {"items": schema}
    response = await api.chat(response_format=named(schema))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ROOT
