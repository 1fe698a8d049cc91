"""The MTP head written down once more, in numpy and float64, from its formula and the raw checkpoint's tensors.

    x = fc([norm(embed(token t+1)), norm(hidden t)]);  x = decoder layer(x);  out = norm(x);  logits = lm_head(out)

Every norm's weight is an offset from 1. Nothing here is shared with the code it checks.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class HeadReference:
    """`draft` gives the logits of a chain; `hidden` is whatever the caller holds the backbone's to be."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        self.text = config.get("text_config", config)
        loaded = mx.load(str(path / "model.safetensors"))
        assert isinstance(loaded, dict)
        self.weights: dict[str, Array] = {
            name: np.array(w.astype(mx.float32)).astype(np.float64) for name, w in loaded.items()
        }
        (embedding,) = [name for name in self.weights if name.endswith("embed_tokens.weight")]
        self.embedding = self.weights[embedding]
        self.lm_head = self.weights.get("lm_head.weight", self.embedding)

    def draft(self, hidden: Array, following: list[int], tokens: list[int]) -> Array:
        """Return the logits `[len(tokens) + 1, vocab]` after the pairs, and then after each of the drafted `tokens`.

        The pairs are `hidden [n, H]` and the n tokens of `following`.
        """
        pairs, following = hidden, list(following)
        logits = []
        for token in (*tokens, None):
            out = self._advance(pairs, following)
            logits.append(out[-1] @ self.lm_head.T)
            if token is not None:
                pairs = np.concatenate([pairs, out[-1:]])
                following.append(token)
        return np.stack(logits)

    def _advance(self, hidden: Array, following: list[int]) -> Array:
        e = self._norm(self.embedding[following], "pre_fc_norm_embedding")
        h = self._norm(hidden, "pre_fc_norm_hidden")
        x = np.concatenate([e, h], axis=-1) @ self._weight("fc").T
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        x = x + self._mlp(self._norm(x, "layers.0.post_attention_layernorm"))
        return self._norm(x, "norm")

    def _weight(self, name: str) -> Array:
        return self.weights[f"mtp.{name}.weight"]

    def _norm(self, x: Array, name: str) -> Array:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        scaled: Array = x / np.sqrt(mean + self.text["rms_norm_eps"]) * (1 + self._weight(name))
        return scaled

    def _attention(self, x: Array) -> Array:
        prefix = "layers.0.self_attn"
        n, heads, size = len(x), self.text["num_attention_heads"], self.text["head_dim"]
        q, gate = np.split(
            (x @ self._weight(f"{prefix}.q_proj").T).reshape(n, heads, 2 * size), 2, axis=-1
        )
        kv_heads = self.text["num_key_value_heads"]
        k, v = ((x @ self._weight(f"{prefix}.{p}_proj").T).reshape(n, kv_heads, size) for p in "kv")
        q = self._rope(self._norm(q, f"{prefix}.q_norm"))
        k = self._rope(self._norm(k, f"{prefix}.k_norm"))
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        out = np.einsum("hqk,khd->qhd", _softmax(scores), v) / (1 + np.exp(-gate))
        projected: Array = out.reshape(n, -1) @ self._weight(f"{prefix}.o_proj").T
        return projected

    def _rope(self, x: Array) -> Array:
        """Rotate the first quarter of each head, its first half against its second."""
        rope = self.text.get("rope_parameters", self.text)
        rotated = int(self.text["head_dim"] * rope["partial_rotary_factor"])
        frequency = rope["rope_theta"] ** (-np.arange(0, rotated, 2) / rotated)
        angle = np.arange(len(x))[:, None, None] * frequency
        a, b, rest = np.split(x, [rotated // 2, rotated], axis=-1)
        sin, cos = np.sin(angle), np.cos(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def _mlp(self, x: Array) -> Array:
        prefix = "layers.0.mlp"
        if "num_experts" not in self.text:
            return self._glu(
                x, *(self._weight(f"{prefix}.{p}_proj") for p in ("gate", "up", "down"))
            )
        shared = (self._weight(f"{prefix}.shared_expert.{p}_proj") for p in ("gate", "up", "down"))
        gate = 1 / (1 + np.exp(-x @ self._weight(f"{prefix}.shared_expert_gate").T))
        out = gate * self._glu(x, *shared)
        chances = _softmax(x @ self._weight(f"{prefix}.gate").T)
        for row, chance in enumerate(chances):
            best = np.argsort(-chance)[: self.text["num_experts_per_tok"]]
            for expert in best:
                share = chance[expert] / chance[best].sum()
                out[row] += share * self._glu(x[row], *self._expert(f"{prefix}.experts", expert))
        return out

    def _expert(self, prefix: str, expert: int) -> tuple[Array, Array, Array]:
        if f"mtp.{prefix}.gate_up_proj" not in self.weights:
            gate, up, down = (
                self._weight(f"{prefix}.{expert}.{p}_proj") for p in ("gate", "up", "down")
            )
            return gate, up, down
        gate, up = np.split(self.weights[f"mtp.{prefix}.gate_up_proj"][expert], 2)
        return gate, up, self.weights[f"mtp.{prefix}.down_proj"][expert]

    @staticmethod
    def _glu(x: Array, gate: Array, up: Array, down: Array) -> Array:
        g = x @ gate.T
        out: Array = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
        return out


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Array = e / e.sum(axis=-1, keepdims=True)
    return out
