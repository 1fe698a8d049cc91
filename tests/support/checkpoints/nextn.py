"""Small random checkpoints of mlx-lm's model types with an MTP head, as their publishers store them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from mtp.mlx_models.skeleton import make_model
from tests.support.tiny_configs import tiny_config

Weights = dict[str, mx.array]

HEAD_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}
"""From the publishers' names of the modules around the head's layer to those of `mtp.`."""

OWN_OUTPUT = "shared_head.output.weight"
"""The lm_head that Step's head has of its own."""

LONGER: dict[str, dict[str, Any]] = {
    "exaone_moe": {"layer_types": ["full_attention"], "is_moe_layer": [False]},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1], "moe_layer_freq": [0]},
}
"""The entries for the head's layer in the lists of a config that have an entry for each layer."""

_STEP_KINDS = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention", "full_attention", "full_attention"]
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "bailing_moe": {
        "use_qk_norm": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "exaone_moe": {"mtp_layer_types": ["full_attention"]},
    "step3p5": {
        "num_nextn_predict_layers": 3,
        "layer_types": _STEP_KINDS,
        "partial_rotary_factors": [1.0 if kind == "sliding_attention" else 0.5 for kind in _STEP_KINDS],
        "rope_theta": [1e4 if kind == "sliding_attention" else 5e6 for kind in _STEP_KINDS],
        "yarn_only_types": ["full_attention"],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 64,
        },
        "swiglu_limits": [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0],
        "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.5, 0.25, 0.0, 0.0],
    },
}
"""The fields of the head that a type has of its own. Step's lists have the entries of three layers of the head."""

_LING = {".shared_head.norm.": ".final_layernorm.", ".mlp.gate.gate_proj.": ".mlp.gate."}
PUBLISHED: dict[str, dict[str, str]] = {
    "bailing_hybrid": _LING,
    "bailing_moe": _LING,
    "step3p5": {
        ".shared_head.": ".transformer.shared_head.",
        ".mlp.switch_mlp.": ".moe.",
        ".mlp.gate.gate.": ".moe.gate.",
        ".mlp.gate.router_bias": ".moe.router_bias",
        ".mlp.share_expert.": ".share_expert.",
    },
}
"""From parts of the names of mlx-lm to those of the publisher."""

RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "exaone_moe": ("mtp.", HEAD_NAMES),
    "mimo_v2_flash": (
        "model.mtp.layers.0.",
        {"shared_head.norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"},
    ),
}
"""The beginning of the names of a head, and its own names, where they are not those of DeepSeek."""


class NextN:
    """A tiny model of `model_type` whose layer after the last is the head, with its weights by mlx-lm's names."""

    def __init__(self, model_type: str, seed: int = 0, **fields: Any) -> None:
        own = {"eos_token_id": [], "num_nextn_predict_layers": 1, **OWN_FIELDS.get(model_type, {}), **fields}
        self.config = {**tiny_config(model_type), **own}
        self.layers: int = self.config["num_hidden_layers"]
        mx.random.seed(seed)
        longer = make_model(self.longer_config())
        parameters: Any = tree_flatten(longer.parameters())
        self.weights: Weights = {name: _spread(name, weight.shape) for name, weight in parameters}
        hidden = self.config["hidden_size"]
        for name in HEAD_NAMES:
            shape = (hidden, 2 * hidden) if name.startswith("eh_proj") else (hidden,)
            self.weights[self.prefix + name] = _spread(name, shape)
        if model_type == "step3p5":
            self.weights[self.prefix + OWN_OUTPUT] = _spread(OWN_OUTPUT, (self.config["vocab_size"], hidden))
        mx.eval(self.weights)

    def longer_config(self) -> dict[str, Any]:
        """Return the config of a model that has the head's layer as its last one."""
        more = {name: self.config[name] + last for name, last in LONGER.get(self.config["model_type"], {}).items()}
        return {**self.config, **more, "num_hidden_layers": self.layers + 1}

    @property
    def prefix(self) -> str:
        """The beginning of the publishers' names of the head."""
        return f"model.layers.{self.layers}."

    def trunk(self) -> Weights:
        """Return the weights of the model without its head."""
        return {name: weight for name, weight in self.weights.items() if not name.startswith(self.prefix)}

    def published(self) -> Weights:
        """Return all weights by the publishers' names: experts one by one, and the head's own copies of the ends."""
        found: Weights = {}
        model_type = self.config["model_type"]
        for name, weight in self.weights.items():
            if model_type == "step3p5":  # whose experts are together, and whose norms are offsets from 1
                found[name] = weight - 1 if "norm" in name else weight
            elif stack := re.fullmatch(r"(.*\.mlp)\.switch_mlp\.(.+)", name):
                found |= {f"{stack[1]}.experts.{e}.{stack[2]}": one for e, one in enumerate(weight)}
            elif name.endswith("embed_q.weight"):
                values = self.weights[name.replace("embed_q", "unembed_out")]
                both = mx.concatenate([weight.swapaxes(-1, -2), values], axis=1)
                found[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
            elif not name.endswith("unembed_out.weight"):
                found[name] = weight
        if (published := PUBLISHED.get(model_type)) is not None:
            for ours, theirs in published.items():
                found = {name.replace(ours, theirs): weight for name, weight in found.items()}
            return found
        if (renamed := RENAMED.get(model_type)) is None:
            found[f"{self.prefix}embed_tokens.weight"] = self.weights["model.embed_tokens.weight"]
            found[f"{self.prefix}shared_head.head.weight"] = self.weights["lm_head.weight"]
            return found
        return {self._renamed(name, *renamed): weight for name, weight in found.items()}

    def _renamed(self, name: str, prefix: str, names: dict[str, str]) -> str:
        if not name.startswith(self.prefix):
            return name
        within = name.removeprefix(self.prefix)
        if prefix == "mtp." and within not in names:
            within = f"layers.0.{within}"
        for theirs, own in names.items():
            within = within.replace(theirs, own)
        return prefix + within

    def converted(self, *, with_head: bool = True) -> Weights:
        """Return all weights by the names of a converted checkpoint."""
        found = self.trunk()
        for name, weight in self.weights.items():
            if with_head and name.startswith(self.prefix):
                within = name.removeprefix(self.prefix)
                names = HEAD_NAMES | {OWN_OUTPUT: "lm_head.weight"}
                found[f"mtp.{names.get(within, f'layers.0.{within}')}"] = weight
        return found

    def write(self, path: Path, weights: Weights) -> Path:
        """Write a checkpoint with these weights. Return `path`."""
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(self.config))
        mx.save_safetensors(str(path / "model.safetensors"), {n: mx.contiguous(w) for n, w in weights.items()})
        return path

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the greedy tokens of mlx-lm."""
        model: Any = make_model(self.config)
        model.load_weights([*self.trunk().items()])
        model.eval()
        steps = generate_step(mx.array(list(prompt)), model, max_tokens=count)
        return [int(token) for token, _ in steps]


def _spread(name: str, shape: Sequence[int]) -> mx.array:
    """Return normal values of a parameter so that every mechanism matters: norms are no ones."""
    drawn = mx.random.normal(shape)
    if name.endswith("bias"):  # of experts: mlx-lm's class takes one of another group where a sum is negative
        return 0.2 * mx.abs(drawn)
    if "embed_tokens" in name:
        return drawn
    return 1 + 0.2 * drawn if len(shape) == 1 else 1.5 * drawn * shape[-1] ** -0.5


WORDS = 48
"""Tokens of the text of a dialled model."""


def dialled(model_type: str, right: Sequence[bool]) -> NextN:
    """Return a model that counts from each token below WORDS to the next, in a cycle, with a head of known accuracy.

    Layers add nothing, and an embedding is a unit vector. `right[i]` says whether the head is right after token `i`.
    """
    model = NextN(model_type)
    hidden = mx.eye(model.config["hidden_size"])
    for name, weight in model.weights.items():
        if "norm" in name:
            model.weights[name] = mx.ones_like(weight)
        elif re.search(r"\.(o_proj|down_proj|dense)\.", name):
            model.weights[name] = mx.zeros_like(weight)
    words = mx.concatenate([hidden[:WORDS], mx.zeros((model.config["vocab_size"] - WORDS, hidden.shape[0]))])
    model.weights[next(name for name in model.weights if "embed" in name and "model.layers" not in name)] = words
    following = mx.array([(token - 1) % WORDS if token < WORDS else WORDS for token in range(words.shape[0])])
    model.weights["lm_head.weight"] = words[following]
    if model_type == "step3p5":
        model.weights[model.prefix + OWN_OUTPUT] = words[following]
    seen = mx.array([word if ok else (word + 7) % WORDS for word, ok in enumerate(right)])
    turned = mx.concatenate([hidden[seen], hidden[WORDS:]]).T
    model.weights[f"{model.prefix}eh_proj.weight"] = mx.concatenate([turned, mx.zeros_like(turned)], axis=1)
    return model
