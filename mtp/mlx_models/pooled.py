"""A decoder of mlx-lm as an encoder: the rows after its final norm, pooled to one vector of unit length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from proto.errors import CheckpointError

CHUNK = 512
"""Tokens. Rows that are computed at once. This bounds the memory of activations for inputs of any length."""


def pooling_of(path: Path) -> str:
    """Return `lasttoken`, the default, or `mean`, as sentence-transformers' files in `path` say.

    Raises CheckpointError for another way of pooling and for other modules, such as the Dense ones of EmbeddingGemma.
    """
    file, folder = path / "modules.json", "1_Pooling"
    for module in json.loads(file.read_text()) if file.is_file() else ():
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):  # every vector is normalized
            raise CheckpointError(f"{file}: the module {kind!r:.60} is not supported. Use a model without it.")
        folder = module["path"] if kind == "Pooling" else folder
    file = path / folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    names: set[str] = {name for name, value in config.items() if value is True} | {config.get("pooling_mode", "")}
    modes = {name.removeprefix("pooling_mode_").removesuffix("_tokens") for name in names - {"include_prompt", ""}}
    modes = modes or {"lasttoken"}
    if modes not in ({"lasttoken"}, {"mean"}):
        raise CheckpointError(f"{file}: pooling by {', '.join(sorted(modes))} is not supported. Use lasttoken or mean.")
    return modes.pop()


class PooledDecoder:
    """The decoder in the folder `path`. The constructor raises CheckpointError and mlx-lm's errors."""

    def __init__(self, path: Path) -> None:
        self.pooling = pooling_of(path)
        config = json.loads((path / "config.json").read_text())
        if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
            raise CheckpointError(f"{path}: its tokens attend to later ones, which mlx-lm does not compute. Use Qwen3.")
        # The lm_head is not used: some checkpoints lack it, and in others it is as large as several layers.
        tied = {"tie_word_embeddings": True}
        self.model: Any = load_model(path, model_config=tied, get_model_classes=_classes)[0]
        self._backbone = getattr(self.model, "model", None)
        if not hasattr(self._backbone, "embed_tokens") or not hasattr(self._backbone, "norm"):
            raise CheckpointError(f"{path}: {config['model_type']} has no plain decoder. Use a model such as Qwen3.")

    def vector(self, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the vector of `tokens`, of which there is one at least."""
        caches, pooled = make_prompt_cache(self.model), mx.zeros(())
        for start in range(0, len(tokens), CHUNK):
            chunk = mx.array([tokens[start : start + CHUNK]])
            rows = self._backbone(chunk, cache=caches)[0].astype(mx.float32)  # type: ignore[misc]
            pooled = pooled + rows.sum(0) if self.pooling == "mean" else rows[-1]
            mx.eval(pooled, [cache.state for cache in caches])
        return np.array(pooled / mx.linalg.norm(pooled))


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's classes of `config`, with a model that reads Qwen's names, which lack the prefix `model.`."""
    kind, args = _get_classes(config)

    def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        prefix = "model." if "embed_tokens.weight" in weights else ""
        weights = {prefix + name: w for name, w in weights.items() if "lm_head" in model or "lm_head." not in name}
        return kind.sanitize(model, weights) if hasattr(kind, "sanitize") else weights

    return type(kind.__name__, (kind,), {"sanitize": sanitize}), args
