"""The served model as the API describes it, with the sampling defaults of its checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp.checkpoint.format.json_file import read_json_object
from proto.errors import CheckpointError, RequestError
from proto.params import SamplingParams

Json = dict[str, Any]

_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json with the same meaning in SamplingParams."""


@dataclass(frozen=True)
class ModelInfo:
    """The served model.

    `context_length` is the maximum number of tokens of prompt and answer together. Requests name the model by `id`
    or by one of `aliases`, which the user chose, or as mlx-lm's clients by `default_model`. `defaults` apply to
    sampling fields that a request omits. `fingerprint` identifies the checkpoint by its content. `family` is its
    `model_type`, and `quantization` a short text, or empty.
    """

    id: str
    context_length: int
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = ""
    family: str = ""
    quantization: str = ""

    def answers_to(self, name: str) -> bool:
        """Return whether `name` means this model."""
        return name in (*self.listed_names, "default_model")

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The id and the aliases, each once."""
        return tuple(dict.fromkeys((self.id, *self.aliases)))


def generation_defaults(checkpoint: Path) -> SamplingParams:
    """Return the sampling that generation_config.json recommends, or temperature 1 if the file is missing.

    vLLM uses the same defaults, and OpenAI the same temperature. Raises CheckpointError for a value out of range.
    """
    path = checkpoint / "generation_config.json"
    config = read_json_object(path) if path.exists() else {}
    chosen: Json = {"temperature": 1.0}
    chosen |= {name: config[name] for name in _RECOMMENDED if config.get(name) is not None}
    if config.get("do_sample") is False:
        chosen["temperature"] = 0.0
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error
