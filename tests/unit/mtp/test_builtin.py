"""The built-in model: its files, its config, its tokenizer, and what it has learned."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AutoTokenizer

from coordinator.schedule.request import GenerationRequest
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
    ("prompts", "least"), [(held_out_prompts, 0.70), (seen_prompts, 0.85)], ids=["held out", "seen"]
)
def test_first_drafts_are_mostly_right(prompts: Callable[..., Prompts], least: float) -> None:
    """Greedy decoding of 96 tokens after each of 12 prompts accepts the trained share of first drafts."""
    asked = [
        GenerationRequest(prompt, 96, SamplingParams()) for prompt in prompts(Tokenizer.load(checkpoint_dir()), 12)
    ]
    found = run(checkpoint_dir(), asked, mtp="1", dtype="float32")
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


def test_chat_template_renders() -> None:
    """The template renders a system and a user turn as ChatML, with reasoning on or off."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Explain `os`."},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nExplain `os`.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt == turns + "<think>\n"
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
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
    prompt = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert '"name": "add"' in prompt
    assert "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>" in prompt
    assert "<tool_response>\n1\n</tool_response>" in prompt


def test_held_out_text_is_predicted(loaded: Loaded) -> None:
    """The loss on a held-out module is far below that of random weights."""
    model, tokenizer = loaded
    ids = mx.array([tokenizer.encode(SNIPPET)])
    loss = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")
    assert float(loss) < SNIPPET_LOSS
