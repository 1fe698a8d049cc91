"""The built-in model: its files, its config, its tokenizer, and what it has learned."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AutoTokenizer

from coordinator.generation.request import GenerationRequest
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from proto.params import SamplingParams
from tests.bench.texts import Prompts, held_out_prompts, seen_prompts
from tests.support.stages.local_run import run

Loaded = tuple[nn.Module, TokenizerWrapper]
MAX_BYTES = 16_000_000
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
# Text of Lib/textwrap.py, a module held out of training. A uniform guess costs ln 4096 = 8.3 nats per token.
SNIPPET = '''\
    def _split(self, text):
        """_split(text : string) -> [string]

        Split the text to wrap into indivisible chunks.  Chunks are
        not quite the same as words; see _split_chunks() for full
        details.
        """
        if self.break_on_hyphens is True:
            chunks = self.wordsep_re.split(text)
        else:
            chunks = self.wordsep_simple_re.split(text)
        chunks = [c for c in chunks if c]
        return chunks
'''
SNIPPET_LOSS = 2.8


def weights() -> dict[str, mx.array]:
    """Return the stored tensors by their stored names."""
    found = mx.load(str(checkpoint_dir() / "model.safetensors"))
    assert isinstance(found, dict)
    return found


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    """Run the test in float32 on the CPU: the bounds below are for this arithmetic."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """Load model and tokenizer with stock mlx-lm, in float32."""
    model, tokenizer = load(str(checkpoint_dir()))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "least"),
    [(held_out_prompts, 0.70), (seen_prompts, 0.85)],
    ids=["held out", "seen"],
)
def test_first_drafts_are_mostly_right(prompts: Callable[..., Prompts], least: float) -> None:
    """Greedy decoding of 96 tokens after each of 12 prompts accepts the trained share of first drafts."""
    asked = [
        GenerationRequest(prompt, 96, SamplingParams())
        for prompt in prompts(Tokenizer.load(checkpoint_dir()), 12)
    ]
    found = run(checkpoint_dir(), asked, mtp="1", dtype=mx.float32)
    drafted = sum(answer.stats.drafted for answer in found)
    share = sum(answer.stats.accepted for answer in found) / drafted
    print(f"{share:.3f} of {drafted}")
    assert drafted > 400
    assert share >= least


def test_package_data_is_complete_and_small() -> None:
    """The checkpoint's files are present and stay below the size limit of the package."""
    sizes = {path.name: path.stat().st_size for path in Path(checkpoint_dir()).iterdir()}
    assert sizes.keys() >= FILES
    assert sum(sizes.values()) <= MAX_BYTES


def test_config_is_of_the_family() -> None:
    """The config has the fields of published Qwen3.5 configs."""
    config = json.loads((checkpoint_dir() / "config.json").read_text())
    text = config["text_config"]
    assert (config["model_type"], text["model_type"]) == ("qwen3_5", "qwen3_5_text")
    assert text["mtp_num_hidden_layers"] == 1
    assert text["mtp_use_dedicated_embeddings"] is False
    assert text["tie_word_embeddings"] is True
    assert text["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * (
        text["num_hidden_layers"] // 4
    )
    rope = text["rope_parameters"]
    assert sum(rope["mrope_section"]) * 2 == int(text["head_dim"] * rope["partial_rotary_factor"])


def test_mtp_tensors_have_the_raw_names_and_shapes() -> None:
    """The head has all 15 tensors of a dense head, under the names that Qwen publishes."""
    text = json.loads((checkpoint_dir() / "config.json").read_text())["text_config"]
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    queries, keys = (
        text[name] * text["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    layer = "mtp.layers.0."
    expected = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        layer + "input_layernorm.weight": (hidden,),
        layer + "post_attention_layernorm.weight": (hidden,),
        layer + "self_attn.q_proj.weight": (2 * queries, hidden),
        layer + "self_attn.k_proj.weight": (keys, hidden),
        layer + "self_attn.v_proj.weight": (keys, hidden),
        layer + "self_attn.o_proj.weight": (hidden, queries),
        layer + "self_attn.q_norm.weight": (text["head_dim"],),
        layer + "self_attn.k_norm.weight": (text["head_dim"],),
        layer + "mlp.gate_proj.weight": (inner, hidden),
        layer + "mlp.up_proj.weight": (inner, hidden),
        layer + "mlp.down_proj.weight": (hidden, inner),
    }
    assert {
        name: value.shape for name, value in weights().items() if name.startswith("mtp.")
    } == expected


def test_weights_are_raw_bf16() -> None:
    """The layout is raw (conv1d [C, 1, K]), and all tensors but A_log are stored in bf16."""
    for name, value in weights().items():
        assert value.dtype == (mx.float32 if name.endswith("A_log") else mx.bfloat16), name
        if "conv1d" in name:
            assert value.shape[1] == 1, name


@pytest.mark.parametrize(
    "text",
    [
        "import os\n",
        "def f(x):\n    return x + 1\n",
        "naïve 日本語 \t\r\n  {'a': 1.5e-3}",
        "1234567890",
        " ",
    ],
)
def test_tokenizer_round_trips(text: str) -> None:
    """Encoding and decoding returns the text byte for byte."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_agrees_with_the_config() -> None:
    """Special tokens are one token each, and the config's end tokens are the tokenizer's."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    config = json.loads((checkpoint_dir() / "config.json").read_text())
    assert len(tokenizer) == config["text_config"]["vocab_size"]
    for token in (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ):
        assert len(tokenizer.encode(token)) == 1, token
    ends = json.loads((checkpoint_dir() / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_chat_template_renders() -> None:
    """The template renders a system and a user turn as ChatML, with reasoning on or off."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Explain `os`."},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nExplain `os`.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt == turns + "<think>\n"
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert prompt == turns + "<think>\n\n</think>\n\n"


def test_chat_template_renders_tools() -> None:
    """Tool definitions, a call and its result appear in the form the family's parsers read."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[Any] = [
        {"role": "user", "content": "Add 1."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    prompt = tokenizer.apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    assert '"name": "add"' in prompt
    assert (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>"
        in prompt
    )
    assert "<tool_response>\n1\n</tool_response>" in prompt


def test_stock_mlx_lm_continues_code(loaded: Loaded) -> None:
    """Stock mlx-lm decodes greedily with finite logits, and the text is not one repeated token."""
    model, tokenizer = loaded
    cache = make_prompt_cache(model)
    tokens: list[int] = []
    fed = mx.array([tokenizer.encode("import os\n")])
    for _ in range(24):
        logits = model(fed, cache=cache)[:, -1]
        assert mx.isfinite(logits).all().item()
        fed = logits.argmax(-1)[None]
        tokens.append(int(fed.item()))
    assert len(set(tokens)) > 3
    assert "import" in tokenizer.decode(tokens)


def test_held_out_text_is_predicted(loaded: Loaded) -> None:
    """The loss on a held-out module is far below that of random weights."""
    model, tokenizer = loaded
    ids = mx.array([tokenizer.encode(SNIPPET)])
    loss = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")
    assert float(loss) < SNIPPET_LOSS
