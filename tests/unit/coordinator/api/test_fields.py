"""Request fields of other servers: the table in the code, the page that shows it, and what each row does."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.api import anthropic, ollama, openai_responses, openai_schemas
from coordinator.api.request_body import HINTS, NEUTRAL, SYNONYMS, Body
from coordinator.schedule.request import GenerationRequest
from coordinator.text.grammars import OutputFormat
from tests.support.api.api_client import USER, ApiClient

_TEXT = (Path(__file__).parents[4] / "docs" / "API.md").read_text()
PAGE = re.sub(r"^```.*?^```$", "", _TEXT, flags=re.MULTILINE | re.DOTALL)
"""The page without its blocks of code."""

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 100},
    "/api/chat": {"model": "tiny", "messages": [USER], "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
}
"""A short request of each dialect."""

IGNORED = "x-ignored-fields"


def names_of(names: list[str]) -> str:
    """Return field names as the page writes them."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def test_the_page_shows_the_table() -> None:
    """The table of API.md has the rows of the table in the code, and no others."""
    rows = [
        f"| {names_of(names.split())} | mapped to `{target}` |"
        for target, names in SYNONYMS.items()
    ]
    kinds = {name: json.dumps(values)[1:-1] for name, values in NEUTRAL.items()}
    for values in dict.fromkeys(kinds.values()):
        allowed = ", ".join([f"`{value}`" for value in values.split(", ") if value])
        fields = [name for name, others in kinds.items() if others == values]
        rows.append(
            f"| {names_of(fields)} | refused unless {f'{allowed}, ' * bool(allowed)}null or empty |"
        )
    rows.append(f"| {names_of(list(HINTS))} | ignored |")
    section = PAGE.partition("## Fields of other servers")[2].partition("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("| `")]
    assert shown == rows, "\n".join(rows)


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
    """A field with an effect stands in API.md outside the table of other servers' fields."""
    before, _, rest = PAGE.partition("## Fields of other servers")
    named = set(
        re.findall(r"[a-z_]+", " ".join(re.findall("`[^`]+`", before + rest.partition("\n## ")[2])))
    )
    assert kind.names <= named


async def test_hints_have_no_effect_in_any_dialect() -> None:
    """All hints at once change no request, whatever their values, and the header does not name them."""
    hints = {name: "anything" for name in HINTS if name.isidentifier()}
    for path, body in PATHS.items():
        api = ApiClient()
        for sent in (body, {**hints, "stream_options": {}, "metadata": {}, **body}):
            response = await api.post(path, {**sent, "store": False})
            assert response.status_code == 200, response.text
            assert not {*response.headers.get(IGNORED, "").split(", ")} & HINTS
        first, second = api.generator.requests
        assert first.prompt == second.prompt
        assert first.max_tokens == second.max_tokens


async def test_neutral_values_are_taken_and_others_refused() -> None:
    """Each field that cannot be honoured is taken at each of its neutral values, and otherwise named in a 400."""
    api = ApiClient()
    for name, values in NEUTRAL.items():
        path = "/v1/chat/completions"
        if name in openai_schemas.ChatBody.names:
            path = "/v1/responses"
        outer, _, inner = name.partition(".")
        for value in (*values, None, "", [], {}):
            response = await api.post(
                path, {**PATHS[path], outer: {inner: value} if inner else value}
            )
            assert response.status_code == 200, (name, value, response.text)
            assert IGNORED not in response.headers
        response = await api.post(path, {**PATHS[path], outer: {inner: [7]} if inner else [7]})
        assert response.status_code == 400, (name, response.text)
        assert response.json()["error"]["param"] == name
        assert name in response.json()["error"]["message"]


VALUES: dict[str, Any] = {
    "max_tokens": 9,
    "max_output_tokens": 9,
    "repetition_penalty": 1.3,
    "seed": 12,
    "stop": ["zzz"],
    "ignore_eos": True,
    "reasoning_effort": "none",
    "enable_thinking": False,
    "thinking_budget": 30,
    "guided_json": {"type": "object"},
    "guided_regex": "[a-z]+",
    "guided_choice": ["yes", "no"],
    "reasoning_content": "hm",
}
"""A value for each field that has synonyms."""


def stripped(request: GenerationRequest) -> tuple[Any, ...]:
    """Return what a request asks of the engine."""
    params = request.params.to_wire()
    params.pop("seed") if params["seed"] != VALUES["seed"] else None
    return request.prompt, request.max_tokens, params, request.stop_tokens


@pytest.mark.parametrize(
    ("name", "target"), [(name, key) for key, names in SYNONYMS.items() for name in names.split()]
)
async def test_a_synonym_does_what_its_field_does(name: str, target: str) -> None:
    """The engine gets the same request."""
    value = "disabled" if name == "thinking.type" else VALUES[target]
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
        return {**PATHS[path], outer: {inner: content} if inner else content}

    place = name.rpartition(".")[0] + "." if name.startswith("messages") else ""
    for sent in (PATHS[path], body(place + target, VALUES[target]), body(name, value)):
        response = await api.post(path, sent)
        assert response.status_code == 200, response.text
        assert IGNORED not in response.headers
    plain, direct, mapped = map(stripped, api.generator.requests)
    assert direct == mapped
    if target not in ("stop", "thinking_budget", "reasoning_content"):
        assert direct != plain, "the value has no effect, so the comparison proves nothing"


async def test_two_names_with_different_values_are_refused() -> None:
    """Equal values are taken, because some clients send every name."""
    api = ApiClient()
    assert (await api.chat(seed=1, sampler_seed=1)).status_code == 200
    response = await api.chat(seed=1, sampler_seed=2)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "sampler_seed")


async def test_an_error_of_a_synonym_names_it() -> None:
    """`error.param` is the name that the client wrote, for errors of the body and of the engine's bounds."""
    api = ApiClient()
    for body, name in (
        ({"repeat_penalty": "high"}, "repeat_penalty"),
        ({"repeat_penalty": 50}, "repeat_penalty"),
        ({"n_predict": 10_000}, "n_predict"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "guided_json.type"),
    ):
        response = await api.chat(**body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("path", PATHS)
async def test_unknown_fields_are_ignored_and_named(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every dialect answers, names the fields in a header without control characters, and logs each name once."""
    caplog.set_level(logging.INFO)
    api = ApiClient()
    word = path.replace("/", "_")
    names = [f"a??Set-Cookie??{word}", f"temprature{word}"]
    body = {**PATHS[path], names[1]: 1, f"a\r\nSet-Cookie: {word}": 1, "nothing": None}
    for _ in range(2):
        response = await api.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers[IGNORED] == ", ".join(names)
    records = [each for each in caplog.records if "unknown request field" in each.getMessage()]
    assert sorted(vars(each)["field"] for each in records) == names


async def test_unknown_fields_inside_objects_are_named_by_their_path() -> None:
    """The header of a stream and of an error names them too. Their number is bounded."""
    api = ApiClient()
    message = {**USER, "colour": 1}
    response = await api.chat(messages=[message], stream=True, stream_options={"speed": 1})
    assert response.headers[IGNORED] == "messages[].colour, stream_options.speed"
    response = await api.chat(temperature=-1, chat_template_kwargs={"no_such": 1}, tint=2)
    assert (response.status_code, response.headers[IGNORED]) == (
        400,
        "chat_template_kwargs.no_such, tint",
    )
    response = await api.chat(**{f"field_{number}": 1 for number in range(1000)})
    assert response.headers[IGNORED].count(",") == 31


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
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "min_tokens": 0}
        | {
            "top_k": -1,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "bad_words": [],
        }
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
    ("/v1/responses", {"truncation": "auto", "top_logprobs": 0, "include": ["x"], "top_k": 5}),
    ("/v1/messages", {"betas": [], "mcp_servers": [], "container": None}),
]


@pytest.mark.parametrize(("path", "body"), CLIENTS)
async def test_what_clients_send_is_taken(path: str, body: dict[str, Any]) -> None:
    """Fields at the defaults of other servers and their clients cause no error."""
    response = await ApiClient().post(path, {**PATHS[path], **body})
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
