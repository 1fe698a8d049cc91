"""Small random checkpoints like those of users: raw with MTP tensors, or converted by mlx-lm itself.

The weights are scaled so that mistakes show. Norms are far from 0 and 1, decays span short and long memory, and logits
differ by several units.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_5 import TextModelArgs
from mlx_lm.utils import load_model, quantize_model, save_config

from mtp.checkpoint.format.checkpoint import INDEX, Checkpoint
from mtp.checkpoint.format.names import is_head
from mtp.checkpoint.format.parts import read_part
from mtp.head.drafter import MTPHead
from tests.support.checkpoints.qwen3_next import next_config, next_weights

Weights = dict[str, mx.array]
Choose = Callable[[str, nn.Module], bool | dict[str, Any]]

_LM = "model.language_model."
HEAD_DIM = 32
"""Dimension of the heads of attention layers, small for speed. Kernels for GPUs require 256."""
_HEADS, _KV_HEADS = 4, 2
_GDN_VALUE_HEADS, _GDN_KEY_HEADS = 4, 2
GDN_DIM = 32
"""Dimension of the heads of GDN layers, small for speed. Kernels for GPUs require 128."""
_KERNEL = 4
_EXPERTS, _TOP_K = 4, 2
_GROUP = 64


def write_checkpoint(
    path: Path,
    *,
    moe: bool = False,
    qwen3_next: bool = False,
    fields: tuple[tuple[str, Any], ...] = (),
    layers: int = 8,
    hidden: int = 64,
    vocab: int = 256,
    tie: bool = True,
    fused_experts: bool = True,
    mtp: bool = True,
    announce_mtp: bool = True,
    fused_mtp_experts: bool = False,
    shards: int = 1,
    layout: Literal["raw", "mlx"] = "raw",
    quantize: Literal[4, 8] | None = None,
    overrides: bool = False,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
) -> Path:
    """Write a checkpoint into `path` and return `path`.

    `qwen3_next` writes a Qwen3-Next model, which needs `moe`. `fields` are further fields of the text config.
    `mtp` False leaves out the head's tensors. config.json announces the head anyway unless `announce_mtp` is False.
    Fused and unfused experts of one seed are equal. `quantize` (with layout "mlx") also quantizes the head, except
    `fc`. `overrides` gives down_proj of every odd layer 8 bits of group 32 and leaves v_proj unquantized.
    """
    assert layout == "mlx" or quantize is None
    path.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    config = config_of(moe=moe, layers=layers, hidden=hidden, vocab=vocab, tie=tie, dtype=dtype)
    if not announce_mtp:
        config["text_config"]["mtp_num_hidden_layers"] = 0
    config["text_config"] |= dict(fields)
    text = config["text_config"]
    weights = _backbone(text) | (_head(text) if mtp else {})
    raw = {n: w if n.endswith("A_log") else w.astype(dtype) for n, w in weights.items()}
    if qwen3_next:
        assert moe, "the fixture has no dense Qwen3-Next"
        config, raw = next_config(config, **dict(fields)), next_weights(text, raw)
        fused_experts, fused_mtp_experts = False, fused_mtp_experts or layout == "mlx"
    if layout == "raw" or qwen3_next:
        raw = _with_layout(raw, fused_experts, fused_mtp_experts)
    if layout == "raw":
        _save_shards(path, raw, shards, "pt")
        (path / "config.json").write_text(json.dumps(config, indent=2))
    else:
        _convert(path, config, raw, shards, quantize, overrides)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [vocab - 1]}))
    return path


def convert_checkpoint(source: Path, path: Path, quantize: Literal[4, 8] | None = None) -> Path:
    """Convert the raw checkpoint in `source`, one file with a head, as `write_checkpoint` does, with its tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    raw = cast(Weights, mx.load(str(source / "model.safetensors")))
    _convert(path, json.loads((source / "config.json").read_text()), raw, 1, quantize, False)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and not (path / file.name).exists():
            shutil.copy(file, path)
    return path


def config_of(*, moe: bool, layers: int, hidden: int, vocab: int, tie: bool, dtype: mx.Dtype) -> dict[str, Any]:
    """Return a config.json that both transformers and mlx-lm accept."""
    suffix = "_moe" if moe else ""
    text: dict[str, Any] = {
        "model_type": f"qwen3_5{suffix}_text",
        "dtype": str(dtype).removeprefix("mlx.core."),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": tie,
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
        "linear_num_value_heads": _GDN_VALUE_HEADS,
        "linear_num_key_heads": _GDN_KEY_HEADS,
        "linear_key_head_dim": GDN_DIM,
        "linear_value_head_dim": GDN_DIM,
        "linear_conv_kernel_dim": _KERNEL,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "eos_token_id": vocab - 1,
    }
    if moe:
        text["num_experts"] = _EXPERTS
        text["num_experts_per_tok"] = _TOP_K
        text["moe_intermediate_size"] = hidden
        text["shared_expert_intermediate_size"] = hidden
    else:
        text["intermediate_size"] = 2 * hidden
    return {
        "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"],
        "model_type": f"qwen3_5{suffix}",
        "tie_word_embeddings": tie,
        "text_config": text,
    }


def read_tensors(path: Path) -> Weights:
    """Return all tensors of a checkpoint under their stored names."""
    weights: Weights = {}
    for file in path.glob("*.safetensors"):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        weights |= loaded
    mx.eval(weights)
    return weights


def edit_tensors(path: Path, change: Callable[[Weights], object], form: str = "pt") -> None:
    """Apply `change` to all tensors of a checkpoint, and write them into one file without an index."""
    weights = read_tensors(path)
    for file in path.glob("model*"):
        file.unlink()
    change(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": form})


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to config.json of a checkpoint."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def move_head(path: Path, source: Path, place: str, prefix: str, *, index: bool = False) -> Path:
    """Copy `source`, with its head in the file `place` under names that begin with `prefix`.

    An `index` names the other tensors only.
    """
    shutil.copytree(source, path)
    heads = {name: weight for name, weight in read_tensors(path).items() if is_head(name)}
    edit_tensors(path, lambda weights: [weights.pop(name) for name in heads])
    rest = read_tensors(path)
    (path / place).parent.mkdir(exist_ok=True)
    moved = {prefix + name.partition("mtp.")[2]: weight for name, weight in heads.items()}
    mx.save_safetensors(str(path / place), moved, {"format": "pt"})
    if index:
        names = dict.fromkeys(rest, "model.safetensors")
        (path / INDEX).write_text(json.dumps({"weight_map": names}))
    return path


def head_of(checkpoint: Checkpoint) -> Weights:
    """Return the tensors of the MTP head, as a stage loads them."""
    weights = read_part(checkpoint, "mtp", None)
    mx.eval(weights)
    return weights


def assert_same_tensors(found: Weights, expected: Weights) -> None:
    """Assert that names, types and bits are equal."""
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype, name
        assert mx.array_equal(found[name], weight), name


def without(path: Path, *names: str) -> Path:
    """Remove the tensors `names` from the only file of the raw checkpoint in `path`. Return `path`."""
    weights = read_tensors(path)
    remaining = {name: weight for name, weight in weights.items() if name not in names}
    assert len(remaining) == len(weights) - len(names), "there were no such tensors"
    mx.save_safetensors(str(path / "model.safetensors"), remaining, {"format": "pt"})
    return path


# ---- raw weights


def _linear(rows: int, columns: int, *stack: int) -> mx.array:
    return mx.random.normal((*stack, rows, columns), scale=columns**-0.5)


def _norm(size: int) -> mx.array:
    """Return a raw RMSNorm weight: an offset from 1."""
    return mx.random.uniform(-0.3, 0.8, (size,))


def _backbone(text: dict[str, Any]) -> Weights:
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    weights = {
        f"{_LM}embed_tokens.weight": 0.4 * mx.random.normal((vocab, hidden)),
        f"{_LM}norm.weight": _norm(hidden),
        "model.visual.patch_embed.proj.weight": mx.zeros((8, 3, 2, 2, 2)),
    }
    if not text["tie_word_embeddings"]:
        weights["lm_head.weight"] = 0.4 * mx.random.normal((vocab, hidden))
    for layer, kind in enumerate(text["layer_types"]):
        prefix = f"{_LM}layers.{layer}."
        if kind == "full_attention":
            weights |= _attention(f"{prefix}self_attn.", text)
        else:
            weights |= _gdn(f"{prefix}linear_attn.", text)
        weights |= _mlp_and_norms(prefix, text)
    return weights


def _attention(prefix: str, text: dict[str, Any]) -> Weights:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    kv_heads = text["num_key_value_heads"]
    return {
        f"{prefix}q_proj.weight": _linear(2 * heads * HEAD_DIM, hidden),
        f"{prefix}k_proj.weight": _linear(kv_heads * HEAD_DIM, hidden),
        f"{prefix}v_proj.weight": _linear(kv_heads * HEAD_DIM, hidden),
        f"{prefix}o_proj.weight": _linear(hidden, heads * HEAD_DIM),
        f"{prefix}q_norm.weight": _norm(HEAD_DIM),
        f"{prefix}k_norm.weight": _norm(HEAD_DIM),
    }


def _gdn(prefix: str, text: dict[str, Any]) -> Weights:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys, values = text["linear_num_key_heads"] * GDN_DIM, heads * GDN_DIM
    channels = 2 * keys + values
    # Time steps from 1e-3 to 1e-1 through the inverse of softplus, as in the initialization of these models.
    step = mx.exp(mx.random.uniform(math.log(1e-3), math.log(1e-1), (heads,)))
    return {
        f"{prefix}in_proj_qkv.weight": _linear(channels, hidden),
        f"{prefix}in_proj_z.weight": _linear(values, hidden),
        f"{prefix}in_proj_b.weight": _linear(heads, hidden),
        f"{prefix}in_proj_a.weight": _linear(heads, hidden),
        f"{prefix}conv1d.weight": _linear(1, _KERNEL, channels),
        f"{prefix}A_log": mx.log(mx.random.uniform(1.0, 16.0, (heads,))),
        f"{prefix}dt_bias": step + mx.log(-mx.expm1(-step)),
        f"{prefix}norm.weight": mx.random.uniform(0.5, 1.5, (GDN_DIM,)),
        f"{prefix}out_proj.weight": _linear(hidden, values),
    }


def _mlp_and_norms(prefix: str, text: dict[str, Any]) -> Weights:
    hidden = text["hidden_size"]
    weights = {
        f"{prefix}input_layernorm.weight": _norm(hidden),
        f"{prefix}post_attention_layernorm.weight": _norm(hidden),
    }
    mlp = f"{prefix}mlp."
    if "num_experts" not in text:
        return weights | _glu(mlp, hidden, text["intermediate_size"])
    weights[f"{mlp}gate.weight"] = 3 * _linear(_EXPERTS, hidden)
    weights[f"{mlp}shared_expert_gate.weight"] = _linear(1, hidden)
    weights |= _glu(f"{mlp}shared_expert.", hidden, text["shared_expert_intermediate_size"])
    size = text["moe_intermediate_size"]
    weights[f"{mlp}experts.gate_up_proj"] = _linear(2 * size, hidden, _EXPERTS)
    weights[f"{mlp}experts.down_proj"] = _linear(hidden, size, _EXPERTS)
    return weights


def _glu(prefix: str, hidden: int, size: int) -> Weights:
    return {
        f"{prefix}gate_proj.weight": _linear(size, hidden),
        f"{prefix}up_proj.weight": _linear(size, hidden),
        f"{prefix}down_proj.weight": _linear(hidden, size),
    }


def _head(text: dict[str, Any]) -> Weights:
    hidden = text["hidden_size"]
    return {
        "mtp.fc.weight": _linear(hidden, 2 * hidden),
        "mtp.norm.weight": _norm(hidden),
        "mtp.pre_fc_norm_embedding.weight": _norm(hidden),
        "mtp.pre_fc_norm_hidden.weight": _norm(hidden),
        **_attention("mtp.layers.0.self_attn.", text),
        **_mlp_and_norms("mtp.layers.0.", text),
    }


def _with_layout(raw: Weights, fused: bool, fused_mtp: bool) -> Weights:
    """Return the same weights with unfused experts in the backbone or the head."""
    weights: Weights = {}
    for name, weight in raw.items():
        if ".experts." not in name or (fused_mtp if name.startswith("mtp.") else fused):
            weights[name] = weight
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert in range(_EXPERTS):
            if kind == "down_proj":
                weights[f"{prefix}.{expert}.down_proj.weight"] = weight[expert]
            else:
                gate, up = mx.split(weight[expert], 2)
                weights[f"{prefix}.{expert}.gate_proj.weight"] = gate
                weights[f"{prefix}.{expert}.up_proj.weight"] = up
    return weights


def _save_shards(path: Path, weights: Weights, shards: int, form: str) -> None:
    """Save the tensors in order of name over `shards` files, and an index if there are several."""
    names = sorted(weights)
    size = math.ceil(len(names) / shards)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * size : (shard + 1) * size]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        mx.save_safetensors(str(path / file), {n: weights[n] for n in part}, {"format": form})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


# ---- converted by mlx-lm


def _convert(path: Path, config: dict[str, Any], raw: Weights, shards: int, bits: int | None, overrides: bool) -> None:
    """Write the output of `mlx_lm.convert` with the head added under `mtp.`, converted the same way."""
    source = path / "raw"
    source.mkdir()
    _save_shards(source, {n: w for n, w in raw.items() if not n.startswith("mtp.")}, 1, "pt")
    (source / "config.json").write_text(json.dumps(config))
    model, loaded = load_model(source)
    head = _converted_head(config.get("text_config", config), raw)
    if bits is not None:
        choose = _predicate(model.quant_predicate, overrides)
        model, loaded = quantize_model(model, loaded, _GROUP, bits, quant_predicate=choose)
        if head is not None:
            head, settings = quantize_model(head, {}, _GROUP, bits, quant_predicate=choose)
            paths = {p: v for p, v in settings["quantization"].items() if isinstance(v, dict)}
            loaded["quantization"] |= {f"mtp.{path}": value for path, value in paths.items()}
    weights = dict(tree_flatten(model.parameters()))
    found = dict(tree_flatten(head.parameters())) if head is not None else {}
    heads = {f"mtp.{name}": weight for name, weight in found.items()}
    mx.eval(weights, heads)
    if heads and config["model_type"] == "qwen3_next":
        # mlx-lm skips the head of a converted Qwen3.5 only.
        mx.save_safetensors(str(path / "mtp.safetensors"), heads, {"format": "mlx"})
    else:
        weights |= heads
    _save_shards(path, weights, shards, "mlx")
    save_config(loaded, path / "config.json")
    shutil.rmtree(source)


def _converted_head(text: dict[str, Any], raw: Weights) -> nn.Module | None:
    """Return the head's modules with +1 on every norm (its only vectors) and its fused experts split."""
    weights: Weights = {}
    for name, weight in raw.items():
        within = name.removeprefix("mtp.")
        if within == name:
            continue
        if within.endswith("experts.gate_up_proj"):
            switch = within.replace("experts.gate_up_proj", "switch_mlp")
            gate, up = mx.split(weight, 2, axis=1)
            weights |= {f"{switch}.gate_proj.weight": gate, f"{switch}.up_proj.weight": up}
        elif within.endswith("experts.down_proj"):
            weights[within.replace("experts", "switch_mlp") + ".weight"] = weight
        else:
            weights[within] = weight + 1 if weight.ndim == 1 else weight
    if not weights:
        return None
    head = MTPHead(TextModelArgs.from_dict(copy.deepcopy(text)))
    head.load_weights(list(weights.items()))
    return head


def _predicate(router: Choose | None, overrides: bool) -> Choose:
    """Return mlx-lm's own predicate without `fc`, plus exceptions by path if `overrides` is set."""

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        """Return the quantization of `module`, or False for none."""
        if path == "fc" or (overrides and path.endswith("v_proj")):
            return False
        if overrides and re.search(r"layers\.\d*[13579]\.mlp\.(switch_mlp\.)?down_proj", path):
            return {"group_size": 32, "bits": 8}
        return True if router is None else router(path, module)

    return choose
