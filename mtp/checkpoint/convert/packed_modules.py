"""The modules of a conversion whose weights another program packed: repacked, or dequantized and quantized anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mtp.checkpoint.convert.settings import Settings
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.lazy_weights import read_part, read_values
from mtp.checkpoint.format.names import Source
from mtp.packing.repack import repacked_values

Parameters = dict[str, mx.array]
Format = dict[str, Any]
"""The `bits`, `group_size` and `mode` of a quantized weight."""

_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""The mode of weights without biases, by bits and group size."""

_MEASURED = 2
"""Layers at each end of the model whose error is measured. Measuring decodes a weight twice, which takes time."""


@dataclass
class PackedModule:
    """A module with `inputs` whose weight `source` another program packed.

    `kept` are its parameters in a format of MLX with the same bits, and `format` that format. Both are empty when the
    weight is dequantized. `values` are the source's values in float32, None where the error is not measured.
    """

    source: Source
    inputs: int
    kept: Parameters = field(default_factory=dict)
    format: Format = field(default_factory=dict)
    values: mx.array | None = None

    def squares(self, written: Parameters, written_format: Format) -> mx.array | None:
        """Return two lazy sums of squares: the error of the parameters `written`, and the source's values.

        `written_format` is empty for an unquantized weight. Returns None where the error is not measured.
        """
        if self.values is None:
            return None
        found = (
            repacked_values(written, written_format)
            if written_format
            else written["weight"].astype(mx.float32)
        )
        if self.source.transform == "stack":
            found = found[0]
        return mx.stack([mx.square(found - self.values).sum(), mx.square(self.values).sum()])


def packed_modules(
    checkpoint: Checkpoint,
    part: str,
    weights: Parameters,
    dtype: mx.Dtype | None,
    settings: Settings,
) -> Iterator[tuple[str, PackedModule]]:
    """Yield the packed modules of a part by their name within it. `weights` has their dequantized weights.

    A module keeps its bits if MLX has its format, unless `settings` ask for another one.
    """
    plan = checkpoint.plans[part]
    names = [name for name, source in plan.items() if source.packing is not None]
    repacked = read_part(checkpoint, part, dtype) if names else {}
    for name in names:
        source, prefix = plan[name], name.removesuffix("weight")
        module = PackedModule(source, weights[name].shape[-1])
        leaves = [f"{prefix}{leaf}" for leaf in _LEAVES]
        kept = {n.removeprefix(prefix): repacked[n] for n in leaves if n in repacked}
        found = format_of(kept, module.inputs)
        if found and _keeps(found, settings, in_head=part == "mtp"):
            module.kept, module.format = kept, found
        if _is_measured(part, checkpoint.config.num_layers):
            module.values = read_values(checkpoint, _one(source))
        yield prefix.removesuffix("."), module


_LEAVES = ("weight", "scales", "biases", "output_scale", "input_order")


def format_of(parameters: Parameters, inputs: int) -> Format:
    """Return the format of a weight with `inputs` from its shapes; empty for an unquantized one."""
    if "scales" not in parameters:
        return {}
    bits = parameters["weight"].shape[-1] * 32 // inputs
    group = inputs // parameters["scales"].shape[-1]
    mode = "affine" if "biases" in parameters else _MODES[bits, group]
    return {"group_size": group, "bits": bits, "mode": mode}


def _keeps(found: Format, settings: Settings, *, in_head: bool) -> bool:
    """Return whether the settings of the conversion leave a weight of the format `found` as it is."""
    if in_head and settings.head_bits is not None:
        wanted = settings.head_quantization
        return wanted is not None and wanted.to_json() == found
    if settings.quantization is None:
        return True
    return settings.recipe is None and settings.quantization.to_json() == found


def _is_measured(part: str, layers: int) -> bool:
    kind, _, number = part.partition(".")
    return kind != "layers" or not _MEASURED <= int(number) < layers - _MEASURED


def _one(source: Source) -> Source:
    """Return the Source of the first expert of a stack, or any other Source itself."""
    if source.transform != "stack":
        return source
    members = {member: names[:1] for member, names in source.members.items()}
    return replace(source, stored=source.stored[:1], transform="as stored", members=members)
