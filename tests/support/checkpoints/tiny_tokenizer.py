"""A small tokenizer folder of the served model family: bytes, a few merges, ChatML and markers."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
GLM_CONTROL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|image|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

TEXT = (
    "The capital of France is Paris. Hello world, how are you? def add(a, b): return a + b",
    "system user assistant tool function parameter name arguments weather city value",
)

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
{{- '\\nSay <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('a system message comes first') }}{% endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' ~ key ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}
"""


def write_tokenizer(
    folder: Path,
    *,
    template: str | None = TEMPLATE,
    vision: bool = False,
    control: tuple[str, ...] = (),
    markers: tuple[str, ...] = MARKERS,
) -> Path:
    """Write tokenizer.json and its companion files into the existing `folder`. Return `folder`.

    `control` are further control tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*CONTROL, *control)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in markers])
    if vision:
        tokenizer.add_special_tokens([AddedToken(t, special=True) for t in VISION])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
