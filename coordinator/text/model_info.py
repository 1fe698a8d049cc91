"""What clients are told about the served model, and what its checkpoint recommends."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proto.errors import CheckpointError, RequestError
from proto.params import SamplingParams

Json = dict[str, Any]

_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json that mean what SamplingParams means by them."""


@dataclass(frozen=True)
class ModelInfo:
    """The served model. `context_length` is the most tokens prompt and answer may have together.

    A request may name the model by `id` or an alias; mlx-lm's clients say `default_model`.
    `defaults` hold for what a request leaves out.
    """

    id: str
    context_length: int
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    aliases: tuple[str, ...] = ("default_model",)
    created: int = field(default_factory=lambda: int(time.time()))

    def answers_to(self, name: str) -> bool:
        return name == self.id or name in self.aliases


def generation_defaults(checkpoint: Path) -> SamplingParams:
    """Sampling as generation_config.json recommends it (vLLM's default too); without it temperature 1, OpenAI's.

    Raises CheckpointError when a value is out of range.
    """
    path = checkpoint / "generation_config.json"
    config = read_json(path)
    chosen: Json = {"temperature": 1.0}
    chosen |= {name: config[name] for name in _RECOMMENDED if config.get(name) is not None}
    if config.get("do_sample") is False:
        chosen["temperature"] = 0.0
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error


def eos_ids(checkpoint: Path) -> frozenset[int]:
    """Tokens that end a text: generation_config.json's, or else config.json's. May be none.

    Raises CheckpointError when they are not token ids.
    """
    for name in ("generation_config.json", "config.json"):
        config = read_json(checkpoint / name)
        text_config = config.get("text_config")
        nested = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
        found = config.get("eos_token_id", nested)
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(token, int) for token in ids):
            raise CheckpointError(f"{checkpoint / name}: eos_token_id {found!r} is no token id")
        return frozenset(ids)
    return frozenset()


def read_json(path: Path) -> Json:
    """The object in a JSON file; empty when there is no such file. Raises CheckpointError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {error}", public=f"the checkpoint's {path.name} is unreadable"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: an object is expected", public=f"the checkpoint's {path.name} is unreadable"
        )
    return content
