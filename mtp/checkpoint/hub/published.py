"""The configs of published models in a compact form, and checkpoints that have their headers without their weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtp.checkpoint.convert.convert import SAFETENSORS
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.shard import TensorInfo
from mtp.checkpoint.hub.known_repos import DEFAULT_BITS, MlxLmModel, find_mlx_lm_model, known_repo, read_table
from proto.wire import STORED_BYTES

Choose = Callable[[str, nn.Module], bool | dict[str, Any]]

_GROUP = 64

INTERVAL = 4
"""Layers. Every published model has one attention layer in four, so that these four stand for all."""


FIELDS: dict[str, dict[str, Any]] = read_table()["fields"]
"""The fields of families with names of their own, by `model_type`. All others are transformers' defaults."""


@dataclass(frozen=True)
class Published:
    """A published model: the facts of its config.json that decide names, shapes and memory.

    `intermediate` is the size of a dense MLP or of an expert. `value_heads` are those of GatedDeltaNet.
    """

    name: str
    releases: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    value_heads: int
    experts: int = 0
    per_token: int = 0
    tied: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The config.json, with the fields at the places where the family has them."""
        if self.model_type == "glm5_next":
            return {
                "model_type": self.model_type,
                "text_config": FIELDS[self.model_type] | {"num_hidden_layers": self.layers},
            }
        text: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 256,
            "intermediate_size": self.intermediate,
            "linear_num_value_heads": self.value_heads,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": INTERVAL,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
        }
        if self.experts:
            text |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.per_token,
                "moe_intermediate_size": self.intermediate,
                "shared_expert_intermediate_size": self.intermediate,
            }
        if self.model_type == "qwen3_next":
            text |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": None}
            text |= {"intermediate_size": 5120, "norm_topk_prob": True, "decoder_sparse_step": 1}
            return {**text, "model_type": self.model_type, "vocab_size": 151936}
        text |= FIELDS.get(self.model_type, {})
        text |= {
            "model_type": f"{self.model_type}_text",
            "vocab_size": 248320,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        }
        return {"model_type": self.model_type, "text_config": text}

    def parsed(self, **fields: Any) -> ModelConfig:
        """Return the parsed config with other `fields` of the text part."""
        config = self.config
        config.get("text_config", config).update(fields)
        return ModelConfig.parse(Path(self.name) / "config.json", config)


MODELS = (
    Published("Qwen3.5-0.8B", "3.5", "qwen3_5", 1024, 24, 8, 2, 3584, 16, tied=True),
    Published("Qwen3.5-2B", "3.5", "qwen3_5", 2048, 24, 8, 2, 6144, 16, tied=True),
    Published("Qwen3.5-4B", "3.5", "qwen3_5", 2560, 32, 16, 4, 9216, 32, tied=True),
    Published("Qwen3.5-9B", "3.5", "qwen3_5", 4096, 32, 16, 4, 12288, 32),
    Published("Qwen3.5-27B", "3.5, 3.6, 3.8", "qwen3_5", 5120, 64, 24, 4, 17408, 48),
    Published("Qwen3.5-35B-A3B", "3.5, 3.6", "qwen3_5_moe", 2048, 40, 16, 2, 512, 32, 256, 8),
    Published("Qwen3-Next-80B-A3B", "Next", "qwen3_next", 2048, 48, 16, 2, 512, 32, 512, 10),
    Published("Qwen3.5-122B-A10B", "3.5", "qwen3_5_moe", 3072, 48, 32, 2, 1024, 64, 256, 8),
    Published("Qwen3.8-Flash-Next", "3.8", "qwen4_exp", 2560, 48, 24, 2, 640, 48, 512, 10),
    Published("GLM-5.3-Flash", "5.3", "glm5_next", 4096, 45, 64, 64, 2048, 64, 288, 8),
    Published("Qwen3.5-397B-A17B", "3.5", "qwen3_5_moe", 4096, 60, 32, 2, 1024, 64, 512, 10),
    Published("Qwen3.8-2.4T-A95B", "3.8", "qwen3_5_moe", 8192, 92, 64, 4, 2048, 128, 512, 10),
)


def find_published(text: str) -> Published | MlxLmModel | None:
    """Return the published model that a repo, its short name or its conversion names; None for any other text."""
    if found := find_mlx_lm_model(text.rpartition("/")[2]):
        return found
    known = known_repo(text.rpartition("/")[2])
    if known is None:
        plain = text.rpartition("/")[2].lower()
        return next((one for one in MODELS if plain.startswith(one.name.lower())), None)
    for one in MODELS:
        if one.name.lower().endswith(f"-{known.size}") and known.release in one.releases:
            return one
    return None


@lru_cache(maxsize=64)
def converted_headers(model: Published | MlxLmModel, bits: int | None) -> Checkpoint:
    """Return the checkpoint that `mtp-coord convert` makes of `model`: headers with the sizes of all tensors.

    `bits` None is an unquantized conversion in bfloat16.
    """
    if isinstance(model, MlxLmModel):
        return _headers_of_class(model, bits)
    # Layers without experts come first, and are among the first four.
    lead = INTERVAL if model.config.get("text_config", {}).get("first_k_dense_replace") else 0
    few = model.parsed(num_hidden_layers=lead + INTERVAL)
    module = few.backbone()
    module.mtp = few.head()
    module.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(module, _GROUP, bits, class_predicate=partial(_is_quantized, module.quant_predicate))
    mx.eval(mx.random.state)  # the random weights are never computed
    infos = {
        few.family.prefix + name: _info(weight) for name, weight in dict(tree_flatten(module.parameters())).items()
    }
    config = model.config | ({} if bits is None else {"quantization": {"group_size": _GROUP, "bits": bits}})
    parsed = ModelConfig.parse(Path(model.name) / "config.json", config)
    tensors: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        layer = re.search(r"model\.layers\.(\d+)\.", name)
        copies = range(int(layer[1]), model.layers, INTERVAL) if layer else [0]
        copies = copies[:1] if ".ple." in name or (layer and int(layer[1]) < lead) else copies
        for copy in copies:
            place = f"model.layers.{copy}."
            tensors[name.replace(layer[0], place) if layer else name] = info
    for name, (dtype, shape) in parsed.family.sizes_on_disk(parsed.text_config, bits).items():
        nbytes = math.prod(shape) * STORED_BYTES[dtype]
        tensors[few.family.prefix + name] = TensorInfo(Path("model.safetensors"), dtype, shape, 0, nbytes)
    return Checkpoint.assemble(Path(model.name), parsed, "mlx", tensors)


def _headers_of_class(model: MlxLmModel, bits: int | None) -> Checkpoint:
    """Return the headers of a model of mlx-lm, whose class has all layers and no head."""
    file = Path(model.name) / "config.json"
    parsed = ModelConfig.parse(file, model.config)
    module: Any = parsed.backbone()
    module.set_dtype(mx.bfloat16)
    routers = getattr(module, "quant_predicate", None)
    formats: dict[str, Any] = {}

    def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        is_expert = hasattr(layer, "to_quantized") and parsed.family.rule(path, "weight").routed
        found: bool | dict[str, Any] = bits is not None and _is_quantized(routers, path, layer)
        if model.experts_mode and is_expert:
            found = {"group_size": 32, "bits": 4, "mode": model.experts_mode}
        if isinstance(found, dict):
            formats[path] = found
        return found

    nn.quantize(module, _GROUP, bits or DEFAULT_BITS, class_predicate=choose)
    mx.eval(mx.random.state)  # the random weights are never computed
    tensors = {name: _info(weight) for name, weight in dict(tree_flatten(module.parameters())).items()}
    packed = {"quantization": {"group_size": _GROUP, "bits": bits or DEFAULT_BITS, **formats}}
    config = model.config | (packed if bits or formats else {})
    return Checkpoint.assemble(file.parent, ModelConfig.parse(file, config), "mlx", tensors)


def _is_quantized(routers: Choose | None, path: str, module: nn.Module) -> bool | dict[str, Any]:
    """Return the quantization of a module, or False for none: `mtp.fc` has none, and routers that of mlx-lm."""
    if not hasattr(module, "to_quantized") or path == "mtp.fc":
        return False
    return True if routers is None else routers(path, module)


def _info(weight: mx.array) -> TensorInfo:
    dtype = SAFETENSORS[weight.dtype]
    nbytes = math.prod(weight.shape) * STORED_BYTES.get(dtype, weight.dtype.size)
    return TensorInfo(Path("model.safetensors"), dtype, tuple(weight.shape), 0, nbytes)
