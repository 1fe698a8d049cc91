"""Templates of other families get calls, ids, reasoning and levels in the form that they read, in every dialect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, trainers
from tokenizers import Tokenizer as Backend

from coordinator.text.template_form import TemplateForm
from coordinator.text.tokenizer import TextStream, Tokenizer, pack_vocabulary
from mtp.sampling.grammar import tokenizer_of
from proto.errors import CheckpointError
from tests.support.api.api_client import ApiClient
from tests.support.api.fake_generator import FakeGenerator
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}


def call(name: str, city: str) -> Any:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": {"city": city}}}


HISTORY: Any = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [call("call_a1", "Paris"), call("call_a2", "Rome")]},
    {"role": "tool", "tool_call_id": "call_a2", "content": "28"},
    {"role": "tool", "tool_call_id": "call_a1", "content": "18"},
    {"role": "assistant", "content": "", "tool_calls": [call("call_a3", "Bonn")]},
    {"role": "tool", "tool_call_id": "call_a3", "content": "8"},
]


def ids(messages: Any) -> list[list[str]]:
    calls = [[each["id"] for each in message.get("tool_calls", [])] for message in messages]
    return [
        sent or [message["tool_call_id"]]
        for sent, message in zip(calls, messages, strict=True)
        if sent or "tool_call_id" in message
    ]


def test_ids_of_calls_have_the_form_of_the_family() -> None:
    """Mistral's have nine characters, and Kimi's name the function and count the calls of the conversation."""
    mistral = TemplateForm("{% if call.id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}")
    assert ids(mistral.messages(HISTORY)) == [
        ["000calla1", "000calla2"], ["000calla2"], ["000calla1"], ["000calla3"], ["000calla3"]
    ]  # fmt: skip
    kimi = TemplateForm("", "kimi")
    assert ids(kimi.messages(HISTORY)) == [
        ["functions.f:0", "functions.f:1"], ["functions.f:1"], ["functions.f:0"], ["functions.f:2"], ["functions.f:2"]
    ]  # fmt: skip
    assert TemplateForm("").messages(HISTORY) == HISTORY


def test_a_template_of_one_call_gets_each_before_its_result() -> None:
    """As Llama's and gpt-oss', which write the first call of a message only, or raise. A text stays with the first."""
    said = [HISTORY[0], HISTORY[1] | {"content": "So."}, *HISTORY[2:]]
    found = TemplateForm("{{ message.tool_calls[0].function }}").messages(said)
    assert ids(found) == [[each] for each in ("call_a2", "call_a2", "call_a1", "call_a1", "call_a3", "call_a3")]
    assert [message["content"] for message in found] == ["Weather?", "", "28", "So.", "18", "", "8"]
    lonely = TemplateForm("{{ message.tool_calls[0].function }}").messages(HISTORY[:2])
    assert ids(lonely) == [["call_a1"], ["call_a2"]]


def test_reasoning_before_a_call_is_one_text_for_gpt_oss() -> None:
    """Its template raises for a message with content, reasoning and a call."""
    form = TemplateForm("{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}")
    said = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    assert form.messages([said])[0]["content"] == "So."
    asked = form.messages([said | {"tool_calls": [call("a", "Paris")]}])[0]
    assert (asked["content"], asked["thinking"]) == ("", "Hm.\n\nSo.")


@pytest.mark.parametrize(
    ("written", "takes_text"),
    [
        ("{{ call.function.arguments | tojson }}", False),
        ("{{ call.function.name + call.function.arguments }}", True),
        ("{{ call.function.arguments }}", True),
        ("{% for key, value in call.function.arguments.items() %}{{ key }}: {{ value }}{% endfor %}", False),
    ],
)
def test_arguments_are_rendered_as_json(tmp_path: Path, written: str, takes_text: bool) -> None:
    """Templates of DeepSeek add the text of arguments to a name, and fail at objects."""
    template = (
        "{% if tools %}<TOOLCALL>{% endif %}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    )
    template += written + "{% endfor %}{% endfor %}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, template=template))
    assert tokenizer.template.takes_text == takes_text
    prompt = tokenizer.chat_prompt([HISTORY[0], HISTORY[4]], [TOOL])
    text = tokenizer.backend.decode(list(prompt.tokens))
    assert ('{"city": "Bonn"}' in text) != ("city: Bonn" in text)


@pytest.mark.parametrize(
    ("source", "levels"),
    [
        ('{{ "medium" if x }}', {"none": "low", "minimal": "low", "medium": "medium", "high": "high", "max": "high"}),
        ("{{ 'low' }}{{ 'high' }}", {"none": "low", "medium": "high", "max": "high"}),
        ("{{ 'xhigh' }}{{ 'medium' }}{{ 'low' }}", {"high": "xhigh", "max": "xhigh", "low": "low", "medium": "medium"}),
        ("{{ reasoning_effort }}", {"minimal": "minimal", "max": "max"}),
    ],
)
def test_a_client_gets_the_nearest_level_of_reasoning(source: str, levels: dict[str, str]) -> None:
    """The one that the template names, and gpt-oss' three where it names its default only."""
    assert {effort: TemplateForm(source).level(effort) for effort in levels} == levels


def test_reasoning_that_mlx_lm_does_not_know_is_on_by_default(tmp_path: Path) -> None:
    """mlx-lm's wrapper would switch it off."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '[THINK]' if enable_thinking else '[/THINK]' }}{% endif %}"
    tokenizer = Tokenizer.load(
        write_tokenizer(tmp_path, template=template, control=("[THINK]", "[/THINK]"), markers=())
    )
    assert [tokenizer.chat_prompt(HISTORY[:1], (), kwargs).thinking for kwargs in ({}, {"enable_thinking": False})] == [
        True,
        False,
    ]


DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% endfor %}{{ '<think>' if thinking else '</think>' }}"
)


@pytest.mark.parametrize(("path", "fields"), [
    (CHAT, {"reasoning_effort": "high"}),
    (RESPONSES, {"reasoning": {"effort": "high"}}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (OLLAMA, {"think": True}),
])  # fmt: skip
async def test_every_dialect_switches_reasoning_on_where_it_is_off(tmp_path: Path, path: str, fields: Any) -> None:
    """DeepSeek's variable has another name than Qwen's, and its default is off."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, template=DEEPSEEK))
    for given, text in (({}, "</think>"), (fields, "<think>")):
        client = ApiClient(FakeGenerator(tokenizer, "Yes."), context_length=9000)
        assert (await client.post(path, body_of(path) | given)).status_code == 200
        assert client.generator.prompt_text().endswith(f"Hi{text}")


def body_of(path: str, tools: bool = False) -> Any:
    """Return a request of a dialect."""
    message = [{"role": "user", "content": "Hi"}]
    own = {"name": "f", "input_schema": SCHEMA} if path == MESSAGES else {"type": "function", **TOOL["function"]}
    found: Any = {"input": "Hi"} if path == RESPONSES else {"messages": message, "model": "tiny"}
    found |= {"max_tokens": 2000} if path == MESSAGES else {"stream": False}
    return found | ({"tools": [own if path in (MESSAGES, RESPONSES) else TOOL]} if tools else {})


HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
GPT = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
WRITTEN = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"city": "Bonn"}<|call|>'
)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
async def test_every_dialect_reads_channels(tmp_path: Path, path: str) -> None:
    """The analysis is the reasoning of the dialect, and a message to a function is its call."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, template=GPT, control=HARMONY, markers=()))
    client = ApiClient(FakeGenerator(tokenizer, WRITTEN), context_length=9000)
    response = await client.post(path, body_of(path, tools=True))
    assert response.status_code == 200, response.text
    body = response.json()
    found = {
        CHAT: lambda: [body["choices"][0]["message"][key] for key in ("reasoning_content", "tool_calls")],
        MESSAGES: lambda: [body["content"][0]["thinking"], body["content"][1:]],
        RESPONSES: lambda: [body["output"][0]["content"][0]["text"], body["output"][1:]],
        OLLAMA: lambda: [body["message"][key] for key in ("thinking", "tool_calls")],
    }[path]()
    assert found[0] == "Hm."
    assert len(found[1]) == 1 and "Bonn" in json.dumps(found[1])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
async def test_what_a_template_cannot_render_is_refused_with_its_reason(tmp_path: Path, path: str) -> None:
    """Without a template, with one that ignores tools, and with one that raises."""
    raises = "{{ raise_exception('System role not supported') }}"
    cases: list[Any] = [
        (None, False, "no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True, "chat template ignores them"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}",
            True,
            "form of this model's calls is unknown",
        ),
        (raises, False, "System role not supported"),
    ]
    for number, (template, tools, message) in enumerate(cases):
        (folder := tmp_path / str(number)).mkdir()
        client = ApiClient(FakeGenerator(Tokenizer.load(write_tokenizer(folder, template=template)), "Yes."))
        response = await client.post(path, body_of(path, tools))
        assert response.status_code == 400
        assert message in response.text
        text = await client.post("/v1/completions", {"prompt": "Hi"})
        assert text.status_code == 200


def write_sentencepiece(folder: Path, *, prepends: bool) -> Path:
    """Write a tokenizer as Llama 2's, which puts a blank before a text, or as Gemma's."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    blank = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank]) if prepends else blank
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepends else steps)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=tokens)
    backend.train_from_iterator(['The capital of France is Paris. {"city": "Bonn"}'], trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    backend = Backend.from_str(json.dumps(content))
    backend.add_special_tokens([AddedToken("<start_of_turn>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<start_of_turn>{{ m.content }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("prepends", [False, True])
async def test_sentencepiece_is_read_as_its_own_decoder_does(tmp_path: Path, prepends: bool) -> None:
    """Bytes are spelled as such, and the blank that Llama 2 puts before a text is none of an answer in a chat."""
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path, prepends=prepends))
    text = 'The capital — é 🎉 {"city": "Bonn"}'
    tokens = tokenizer.encode(text)
    stream = TextStream(tokenizer.text_bytes, trims=tokenizer.trims_first_blank)
    assert "".join(stream.add_token(token).text for token in tokens) == text == tokenizer.backend.decode(list(tokens))
    client = ApiClient(FakeGenerator(tokenizer, text))
    assert (await client.post(CHAT, body_of(CHAT))).json()["choices"][0]["message"]["content"] == text
    if not prepends:  # a forced text gets the tokens that the model was trained with
        assert tuple(tokenizer_of(pack_vocabulary(tokenizer)).tokenize_str(text)) == tokens


def test_custom_code_of_a_tokenizer_is_refused_and_never_run(tmp_path: Path) -> None:
    """As Kimi K2 publishes its own: there is no tokenizer.json to read."""
    mark = tmp_path / "run"
    (tmp_path / "tokenization_kimi.py").write_text(f"open({str(mark)!r}, 'w')\nclass TikTokenTokenizer: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"custom code.*is not run"):
        Tokenizer.load(tmp_path)
    assert not mark.exists()
    write_tokenizer(tmp_path)
    Tokenizer.load(tmp_path)
    assert not mark.exists()
