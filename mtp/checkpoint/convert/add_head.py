"""The addition of an MTP head to a converted checkpoint: a head of another checkpoint, converted to match.

The head gets a file of its own. Then the index and config.json are updated. No other file changes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtp.checkpoint.convert import convert
from mtp.checkpoint.convert.convert import SAFETENSORS, Group, group_parameters
from mtp.checkpoint.convert.foreign import read_source_part
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import is_head
from mtp.checkpoint.format.parts import part_module, read_part
from mtp.checkpoint.format.shard import check_free_space
from mtp.layers.linear import Format
from proto.errors import CheckpointError, UsageError
from proto.terminal.progress import OnProgress

_COMPARED = (
    "hidden_size vocab_size num_attention_heads num_key_value_heads head_dim intermediate_size "
    "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size"
).split()
"""The fields that must be equal in the configs of head and backbone, by mlx-lm's names."""


@dataclass(frozen=True)
class HeadAddition:
    """The plan to add the head of `source` to `target`. No tensor has been read or written.

    `quantization` maps the quantized modules of the head to their settings.
    """

    target: Checkpoint
    source: Checkpoint
    dtype: mx.Dtype
    quantization: dict[str, dict[str, Any]]

    @property
    def needed(self) -> list[str]:
        """The stored names of the source's head."""
        plan = self.source.plans["mtp"]
        return sorted({name for source in plan.values() for name in source.tensors})

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(array.nbytes for group in self._groups(None) for array in group.values())

    def write(self, source: Checkpoint, on_progress: OnProgress = lambda done, total: None) -> None:
        """Add the head from `source`, the planned source with its tensors on this machine. Raises CheckpointError."""
        weights, _ = read_source_part(source, "mtp", self.dtype)
        groups = self._groups(weights)
        writer = convert.shard_writer(self.target.path / convert.HEAD_FILE, groups)
        total = writer.nbytes
        check_free_space(self.target.path, total)
        convert.write_shard(writer, groups, lambda _: on_progress(writer.written, total))
        convert.save_config(self.target.path, self._config())
        stays = {name: info for name, info in self.target.tensors.items() if not is_head(name)}
        weight_map = {name: self.target.file_name(info) for name, info in stays.items()}
        weight_map |= dict.fromkeys((entry.name for entry in writer.entries), convert.HEAD_FILE)
        nbytes = total + sum(info.nbytes for info in stays.values())
        convert.save_index(self.target.path, nbytes, weight_map)

    def _groups(self, weights: dict[str, mx.array] | None) -> list[Group]:
        """Return the head's tensors as they are written; without `weights`, only their names and shapes."""
        model = nn.Module()
        model.mtp = part_module(self.target.config, "mtp")
        model.set_dtype(self.dtype)
        packed = weights is not None and any(name.endswith(".scales") for name in weights)
        if not packed:
            self._load(model, weights)
        if self.quantization:
            chosen = {f"mtp.{path}": how for path, how in self.quantization.items()}
            nn.quantize(model, class_predicate=lambda path, _: chosen.get(path, False))
        if packed:
            self._load(model, weights)
        parameters = dict(tree_flatten(model.parameters()))
        prefix = self.target.config.family.prefix
        return group_parameters({prefix + name: weight for name, weight in parameters.items()})

    def _load(self, model: nn.Module, weights: dict[str, mx.array] | None) -> None:
        try:
            model.load_weights([(f"mtp.{n}", w) for n, w in (weights or {}).items()], strict=weights is not None)
        except ValueError as error:
            raise CheckpointError(f"{self.source.path}: {error}") from error

    def _config(self) -> dict[str, Any]:
        file = self.target.path / "config.json"
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        config.get("text_config", config)["mtp_num_hidden_layers"] = 1
        found = config.get("quantization") or next(iter(self.quantization.values()), None)
        if found is not None:
            usual = {key: found.get(key, "affine") for key in ("group_size", "bits", "mode")}
            found = usual | found
            others = {name: value for name, value in found.items() if not is_head(name)}
            head = f"{self.target.config.family.prefix}mtp"
            mine = {f"{head}.{n}": v for n, v in self.quantization.items() if v != usual}
            if config.get("quantization") != others | mine:  # the same settings keep their order
                config["quantization"] = config["quantization_config"] = others | mine
        return config


def plan_head_addition(target: Checkpoint, source: Checkpoint, *, replace: bool = False) -> HeadAddition:
    """Check by headers that the head of `source` fits `target`, and choose its quantization and type.

    A head that is not quantized gets the bits of the target's last attention layer. Raises UsageError when the target
    needs no head, and CheckpointError, naming the difference, when the head does not fit.
    """
    if target.layout == "raw":
        raise UsageError(
            f"{target.path}: is a raw checkpoint. Convert it with mtp-coord convert, which keeps its head."
        )
    if target.config.shape.head is None:
        raise UsageError(
            f"{target.path}: models of type {target.config.model_type} have no MTP head. Serve it as it is."
        )
    if target.mtp.present and not replace:
        state = "has an MTP head" if target.mtp.complete else "has a part of an MTP head"
        raise UsageError(f"{target.path}: {state} already. Use --replace to replace it.")
    if not all(map(is_head, target.tensors_of("mtp"))):
        raise UsageError(
            f"{target.path}: its MTP head is one of its layers, which stay. Download the checkpoint again."
        )
    if not source.mtp.complete:
        missing = source.mtp.missing[0] if source.mtp.missing else "all of it"
        raise CheckpointError(
            f"{source.path}: no complete MTP head: {missing} is missing. Give a checkpoint that has its head."
        )
    for name in _COMPARED:
        mine, theirs = (getattr(c, name, c.text_config.get(name)) for c in (target.config, source.config))
        if mine != theirs:
            raise CheckpointError(
                f"the head of {source.path} does not fit {target.path}: {name} is {theirs} there "
                f"and {mine} here. Use the checkpoint that this one was converted from."
            )
    quantization = _packed(source) or _like_backbone(target)
    dtype = next(dtype for dtype, known in SAFETENSORS.items() if known == target.norm_type)
    return HeadAddition(target, source, dtype, quantization)


# ---- the choice of quantization


def _packed(source: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the quantization of the source's head by module; empty when the head is not quantized."""
    if source.config.quantization is None:
        return {}
    types = {name: dtype for dtype, name in SAFETENSORS.items()}
    infos = {n: source.tensors[made.stored[0]] for n, made in source.plans["mtp"].items()}
    shapes = {n: SimpleNamespace(shape=i.shape, dtype=types.get(i.dtype)) for n, i in infos.items()}
    return _inferred(part_module(source.config, "mtp"), shapes)


def _inferred(module: nn.Module, stored: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the quantization of every module of `module` that is stored with scales, by path."""
    return {
        path: asdict(Format.stored(stored[f"{path}.weight"], stored[f"{path}.scales"], leaf.weight.shape[-1]))
        for path, leaf in module.named_modules()
        if hasattr(leaf, "to_quantized") and f"{path}.scales" in stored
    }


def _like_backbone(target: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the quantization of the target's last attention layer, for the head's layer."""
    twin = target.config.shape.twin
    if target.config.quantization is None or twin is None:
        return {}
    stored = read_part(target, f"layers.{twin}", None)
    layer = part_module(target.config, "mtp").layers[0]
    return {f"layers.0.{path}": how for path, how in _inferred(layer, stored).items()}
