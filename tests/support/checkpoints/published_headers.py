"""Checkpoints with the headers that others publish, and zeros in place of weights.

Each file of `tests/published` has the names, types and shapes of one published kind, its config and its sources. A name
stands for all layers, experts, blocks or parts in braces. A row that ends with "derived" was not found published: it
follows from the rest, or from the convention of the program that wrote it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proto.wire import STORED_BYTES

FOLDER = Path(__file__).resolve().parents[2] / "published"

LAYERS = 4
"""Layers of the written checkpoints. They have all kinds of layers."""

_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
"""Fields of a config with one value for each layer."""


@dataclass(frozen=True)
class PublishedHeaders:
    """One published kind: its config and its tensors by name pattern: type, shape, layers, and whether derived."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, list[Any]]
    tensor_count: int | None

    @property
    def text(self) -> dict[str, Any]:
        """The fields of the language model."""
        found: dict[str, Any] = self.config.get("text_config", self.config)
        return found

    @property
    def is_packed(self) -> bool:
        """True if only `convert` reads it."""
        return "quantization_config" in self.config and "quantization" not in self.config

    @property
    def has_head(self) -> bool:
        """True if an MTP head is part of it."""
        return any("mtp." in name or "{head}" in name for name in self.tensors)

    def names(self, layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield name, type and shape of all tensors of a model of `layers` layers.

        `{linear}` is a layer of linear attention, whose tensor has another shape in other layers. `{head}` is the layer
        after the last one.
        """
        dense = self.text.get("first_k_dense_replace", 0)
        layers_of = {
            "linear": [layer for layer in range(layers) if layer % 4 != 3],
            "full": [layer for layer in range(layers) if layer % 4 == 3],
            "dense": range(min(dense, layers)),
            "sparse": range(dense, layers),
        }
        for pattern, (dtype, shape, where, *_) in self.tensors.items():
            ranges: dict[str, Any] = {
                "layer": layers_of.get(where, range(layers)),
                "linear": layers_of["linear"],
                "head": [layers],
                "expert": range(self.text.get("num_experts", self.text.get("n_routed_experts", 0))),
                "block": range(self.config.get("vision_config", {}).get("depth", 0)),
                "part": range(self.text.get("split_ngram_parts", 0)),
            }
            holes = re.findall(r"\{(\w+)\}", pattern)
            for numbers in itertools.product(*(ranges[hole] for hole in holes)):
                name = pattern.format(**dict(zip(holes, numbers, strict=True)))
                yield name, dtype, tuple(shape)

    def write(self, path: Path, layers: int = LAYERS) -> Path:
        """Write config.json and one sparse file of `layers` layers. Return `path`."""
        header: dict[str, Any] = {"__metadata__": {"format": "mlx" if "mlx" in self.kind else "pt"}}
        end = 0
        for name, dtype, shape in self.names(layers):
            nbytes = math.prod(shape) * STORED_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        encoded = json.dumps(header).encode()
        path.mkdir(parents=True, exist_ok=True)
        with (path / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            file.truncate(8 + len(encoded) + end)
        kinds = {name: kinds[:layers] for name, kinds in self.text.items() if name in _PER_LAYER}
        text = {**self.text, **kinds, "num_hidden_layers": layers}
        config = {**self.config, "text_config": text} if "text_config" in self.config else text
        (path / "config.json").write_text(json.dumps(config))
        return path


def read_published() -> dict[str, PublishedHeaders]:
    """Return all published kinds by name."""
    found = {}
    for file in sorted(FOLDER.glob("*.json")):
        facts = json.loads(file.read_text())
        count = facts["published_tensors"]
        found[file.stem] = PublishedHeaders(file.stem, facts["config"], facts["tensors"], count)
    return found
