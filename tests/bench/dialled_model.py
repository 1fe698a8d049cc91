"""A checkpoint with the shape of a real model, predictable text and a head of a chosen accuracy.

The output projections of all mixers and MLPs are zero, so a hidden state is the embedding of its token. lm_head maps
each word to the next word of a cycle. The head's `fc` is the identity plus noise, which decides how often a draft is
right. Every matrix is still read and multiplied, so a pass costs what it costs in the real model.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.families.family import Family
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.names import part_names
from mtp.checkpoint.format.parts import part_module
from mtp.checkpoint.hub.published import FIELDS
from tests.support.checkpoints.checkpoints import config_of

VOCAB = 248_320

WORDS = 4096
"""Vocabulary of the built-in tokenizer."""

SHARD_BYTES = 2 * 10**9

NOISE = 17.0
"""Noise of the head at 5,120 hidden units for an acceptance near .82. Wider states need more, by the square root."""

TABLE = "ple.ple_embedding.ngram_embedding.shard_0.weight"
"""Name of the rows of n-grams within their layer."""

GROUP_SIZE = 64
BITS = 4

FULL_BITS = 16
"""Bits of weights in bfloat16, which are not quantized."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. `experts` 0 is a dense model of `mlp` units, else `mlp` are the units of an expert."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    value_heads: int
    mlp: int
    experts: int = 0
    vocab: int = VOCAB
    state: int = 128
    """Width of the keys and values of a GatedDeltaNet head."""
    per_token: int = 8
    """Experts that a token reads."""
    ngram_rows: int = 0
    """About the rows of each of the 16 tables of n-grams that make the model a Flash-Next, with random rows."""
    is_glm: bool = False
    """GLM-5.3-Flash, with its published sizes but for those above. `value_heads` are those of KDA."""

    @property
    def is_in_mlx_lm(self) -> bool:
        """Whether mlx-lm has a model of this family."""
        return not (self.is_glm or self.ngram_rows)

    def config(self, bits: int) -> dict[str, Any]:
        """Return config.json, with weights of `bits` bits. lm_head is never tied, because the text depends on it."""
        quantization = {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}
        quantized = {} if bits == FULL_BITS else {"quantization": quantization, "quantization_config": quantization}
        if self.is_glm:
            return {"model_type": "glm5_next", "text_config": self._glm_fields()} | quantized
        config = config_of(
            moe=bool(self.experts),
            layers=self.layers,
            hidden=self.hidden,
            vocab=self.vocab,
            tie=False,
            dtype=mx.bfloat16,
        )
        text = config["text_config"]
        text |= {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 256,
            "linear_num_value_heads": self.value_heads,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": self.state,
            "linear_value_head_dim": self.state,
            "max_position_embeddings": 32768,
            "eos_token_id": 4095,
        }
        text["rope_parameters"] |= {"rope_theta": 1e7, "mrope_section": [11, 11, 10]}
        if self.experts:
            text |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.per_token,
                "moe_intermediate_size": self.mlp,
                "shared_expert_intermediate_size": self.mlp,
            }
        else:
            text["intermediate_size"] = self.mlp
        if self.ngram_rows:
            config["model_type"] = "qwen4_exp"
            text |= FIELDS["qwen4_exp"] | {"model_type": "qwen4_exp_text", "eos_token_id": 4095}
            text["ngram_vocab_size_base"] = self.ngram_rows
        return config | quantized

    def _glm_fields(self) -> dict[str, Any]:
        kinds = ["linear_attention"] * 3 + ["deepseek_sparse_attention"]
        delta = FIELDS["glm5_next"]["linear_attn_config"] | {"num_heads": self.value_heads, "head_dim": self.state}
        return FIELDS["glm5_next"] | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": [kinds[layer % 4] for layer in range(self.layers)],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "linear_attn_config": delta,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.mlp,
            "intermediate_size": 6 * self.mlp,
            "vocab_size": self.vocab,
            "eos_token_id": 4095,
        }


# "toy" and "four" are small. The layers of "four" can be cut for four machines. "wide" in 16 bits has a Mac's ratio of
# bytes to launches on an NVIDIA GPU.
SHAPES = {
    "4B": ModelShape(2560, 32, 16, 4, 32, 9216),
    "9B": ModelShape(4096, 32, 16, 4, 32, 12288),
    "27B": ModelShape(5120, 64, 24, 4, 48, 17408),
    "35B-A3B": ModelShape(2048, 40, 16, 2, 32, 512, experts=256),
    "wide": ModelShape(8192, 16, 32, 4, 64, 28672, vocab=16384),
    "toy": ModelShape(1024, 4, 4, 2, 16, 2048),
    "four": ModelShape(256, 4, 8, 4, 16, 512, vocab=4096, state=32),
    # 36 of Flash-Next's 48 layers and 1 of its 51 billion values of n-grams, so that one GPU of 80 GB holds it.
    "Flash-Next": ModelShape(2560, 36, 24, 2, 48, 640, experts=512, per_token=10, ngram_rows=390_000),
    # 16 of GLM-5.3-Flash's 45 layers, for the same reason.
    "GLM-5.3-Flash": ModelShape(4096, 16, 64, 64, 64, 2048, experts=288, vocab=154_880, is_glm=True),
}


def write_dialled_model(
    path: Path,
    shape: ModelShape,
    noise: float = NOISE,
    *,
    live: float = 0.0,
    bits: int = BITS,
    cycle: list[int] | None = None,
) -> list[int]:
    """Write the checkpoint to `path`. Return the tokens that prompts may use, the words of the cycle.

    `cycle` None takes the words of the built-in tokenizer. `live` is the share of their random output that mixers and
    MLPs keep, so that rounding in them reaches the text.
    """
    config = shape.config(bits)
    parsed = ModelConfig.parse(Path("config.json"), config)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4095]}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint_dir() / name, path)
    cycle = cycle or words(Tokenizer.load(path))
    mx.random.seed(1)
    shards = _Shards(path)
    embedding: dict[str, mx.array] = {}
    for part in part_names(shape.layers):
        holder = nn.Module()
        holder.part = part_module(parsed, part)
        holder.set_dtype(mx.bfloat16)
        if part == "embed":
            drawn = mx.random.normal(holder.part.weight.shape)
            holder.part.weight = drawn.astype(mx.bfloat16)
        if shape.is_glm:
            _fill(holder.part)
        if part == "mtp":
            _dial(holder.part, noise * (shape.hidden / 5120) ** 0.5)
        if bits != FULL_BITS:
            nn.quantize(holder, GROUP_SIZE, bits, class_predicate=_is_quantized)
        if part == "embed":
            embedding = dict(_tensors(holder.part))
        if part == "lm_head":
            _follow_cycle(holder.part, embedding, cycle)
        if part == "mtp":
            _quiet(holder.part.layers[0], 0.0, bits)
        if part.startswith("layers."):
            _quiet(holder.part, live, bits)
            shards.add_tables(part, holder.part)
        shards.add(parsed.family, part, holder.part)
    shards.close()
    return cycle


def words(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that are a space and letters."""
    found = []
    for token in range(WORDS):
        text = tokenizer.token_bytes(token).decode(errors="replace")
        if text[0:1] == " " and text[1:].isascii() and text[1:].isalpha():
            found.append(token)
    return found


class _Shards:
    """Files of at most `SHARD_BYTES`, and their index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: dict[str, mx.array] = {}
        self._names: dict[str, str] = {}
        self._files = 0

    def add(self, family: Family, part: str, module: nn.Module) -> None:
        """Add the tensors of `part`, under the names that mlx-lm gives them."""
        for name, value in _tensors(module):
            local = family.path(part, name)
            inner = "" if local.startswith(("lm_head", "mtp.")) else "model."
            self._held[f"language_model.{inner}{local}"] = value
        mx.eval(self._held)
        if sum(value.nbytes for value in self._held.values()) > SHARD_BYTES:
            self._write()

    def add_tables(self, part: str, layer: Any) -> None:
        """Add the rows of n-grams of a layer that has them."""
        if "ple" in layer:
            ple = layer.ple
            rows = mx.random.normal((ple.hash.rows, ple.ngrams.row_dim), mx.bfloat16)
            self._held[f"language_model.model.{part}.{TABLE}"] = rows

    def close(self) -> None:
        """Write what is left, and the index."""
        self._write()
        index = {"metadata": {}, "weight_map": self._names}
        (self._path / "model.safetensors.index.json").write_text(json.dumps(index))

    def _write(self) -> None:
        file = f"model-{self._files:03d}.safetensors"
        mx.save_safetensors(str(self._path / file), self._held, {"format": "mlx"})
        self._names |= dict.fromkeys(self._held, file)
        self._files += 1
        self._held = {}
        mx.clear_cache()


def _tensors(module: nn.Module) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))


def _is_quantized(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and not re.search(r"fc(_\w+)?$|gate$", path)


def _fill(part: Any) -> None:
    """Draw the parameters that a module without weights has as zeros."""
    for name, value in _tensors(part):
        if not value.any():
            drawn = mx.random.normal(value.shape) * value.shape[-1] ** -0.5 + name.endswith("scale")
            part.update(tree_unflatten([(name, drawn.astype(value.dtype))]))


def _dial(head: Any, noise: float) -> None:
    """Let the head pass on the embedding of the newest token, plus noise."""
    hidden = head.pre_fc_norm_embedding.weight.shape[0]
    error = mx.random.normal((hidden, hidden)) * (noise / hidden**0.5)
    weight, other = mx.eye(hidden) + error, mx.zeros((hidden, hidden))
    if "fc" in head:
        head.fc.weight = mx.concatenate([weight, other], axis=1).astype(mx.bfloat16)
    else:
        head.fc_embedding.weight = weight.astype(mx.bfloat16)
        head.fc_hidden.weight = other.astype(mx.bfloat16)


def _follow_cycle(lm_head: Any, embedding: dict[str, mx.array], cycle: list[int]) -> None:
    """Let the logit of each word be highest after the word before it."""
    before = [cycle[-1], *cycle[:-1]]
    for name, rows in embedding.items():
        weight = mx.zeros_like(rows)
        weight[mx.array(cycle)] = rows[mx.array(before)]
        lm_head[name] = weight


def _quiet(layer: Any, live: float, bits: int) -> None:
    """Scale by `live` what a layer adds to its input."""
    mixer = layer.linear_attn.out_proj if "linear_attn" in layer else layer.self_attn.o_proj
    mlp = layer.mlp
    shared = [mlp[name].down_proj for name in ("shared_expert", "shared_experts") if name in mlp]
    downs = [mlp.down_proj] if "down_proj" in mlp else [mlp.switch_mlp.down_proj, *shared]
    values = [layer.ple.value_proj] if "ple" in layer else []
    for module in (mixer, *downs, *values):
        for name, value in list(module.items()):
            if isinstance(value, mx.array) and (name != "weight" or bits == FULL_BITS):
                module[name] = value * live
            elif isinstance(value, mx.array) and not live:
                module[name] = mx.zeros_like(value)
