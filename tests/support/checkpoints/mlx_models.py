"""Tiny random checkpoints of mlx-lm's model types, as mlx-lm writes them, and mlx-lm's own greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mtp.mlx_models.skeleton import make_model
from tests.support.tiny_configs import tiny_config

VOCABULARY = 12
"""Few words, so that texts repeat themselves and make drafts."""


def write_mlx_model(model_type: str, path: Path, *, scale: float = 3.0, **fields: Any) -> Path:
    """Write a model in fp32 whose greedy text is not one word again and again."""
    config = tiny_config(model_type, VOCABULARY) | fields
    mx.random.seed(7)
    model = make_model(config)

    def wide(weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        return (weight * (scale if weight.ndim > 1 else 1.0)).astype(mx.float32)

    weights: Any = dict(tree_flatten(tree_map(wide, model.parameters())))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": []}))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def greedy_tokens(path: Path, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Return mlx-lm's own answer to a prompt."""
    model, _ = load_model(path)
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count)
    return tuple(int(token) for token, _ in zip((token for token, _ in steps), range(count), strict=False))
