"""The modules of each part of a model, and the tensors that a checkpoint lacks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.names import module_path
from mtp.head.mtp_head import MTPHead
from proto.dtype import STORED_NAMES
from proto.errors import CheckpointError
from proto.span import Span

_FLOATS = tuple(STORED_NAMES.values())
_PACKED = ("U32",)
_SCALES = (*_FLOATS, "U8")
"""Types of quantization scales. The modes other than affine store them as bytes."""


def part_module(config: ModelConfig, part: str) -> nn.Module:
    """Return the unquantized module of a part. Its random weights are lazy and never computed."""
    module = _part_module(config, part)
    # Every lazy random weight adds a lazy split to the key of the generator. Without this evaluation the splits
    # accumulate over the loads of a worker.
    mx.eval(mx.random.state)
    return module


def _part_module(config: ModelConfig, part: str) -> nn.Module:
    args = config.text_args()
    match part.partition("."):
        case "embed", _, _:
            return nn.Embedding(args.vocab_size, args.hidden_size)
        case "norm", _, _:
            return nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        case "lm_head", _, _:
            return nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        case "mtp", _, _:
            return MTPHead(args)
        case _, _, layer:
            return config.layer(int(layer))


def missing_tensors(checkpoint: Checkpoint, parts: Iterable[str]) -> tuple[str, ...]:
    """Return the stored names that `parts` need and the checkpoint lacks."""
    return tuple(dict.fromkeys(name for part in parts for name in _missing(checkpoint, part)))


def missing_from_backbone(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the missing tensors of the whole model without its MTP head."""
    whole = Span(0, checkpoint.config.num_layers)
    parts = checkpoint.stage_parts(whole, first=True, last=True, with_head=False)
    return missing_tensors(checkpoint, parts)


def _missing(checkpoint: Checkpoint, part: str) -> Iterator[str]:
    plan = checkpoint.plans[part]
    needed = list(dict(tree_flatten(part_module(checkpoint.config, part).parameters())))
    if checkpoint.config.quantization is not None:
        needed += [n for name in plan for n in _beside(checkpoint, part, name)]
    for name in needed:
        if name not in plan:
            yield checkpoint.stored_name(module_path(part, name))
    yield from checkpoint.missing_sources(part)


def _beside(checkpoint: Checkpoint, part: str, name: str) -> tuple[str, ...]:
    """Return the parameters that `name` requires: a packed weight needs scales, and float scales need biases."""
    module, _, kind = name.rpartition(".")
    stored = checkpoint.tensors.get(checkpoint.plans[part][name].stored[0])
    if stored is None:
        return ()
    if kind == "weight" and stored.dtype in _PACKED:
        return (f"{module}.scales".removeprefix("."),)
    if kind == "scales" and stored.dtype in _FLOATS:
        return (f"{module}.biases".removeprefix("."),)
    return ()


def check_types(checkpoint: Checkpoint, part: str) -> None:
    """Raise CheckpointError for a tensor of `part` whose type is invalid for its parameter.

    Without this check a float stored as integers would load, with wrong values.
    """
    plan = checkpoint.plans[part]
    quantized = checkpoint.config.quantization is not None
    for name, source in plan.items():
        if source.packing is not None:
            continue  # the types have decided the packing
        wanted = _FLOATS
        if name.endswith("scales"):
            wanted = _SCALES
        elif name.endswith("input_order"):
            wanted = _PACKED
        elif name.endswith("weight") and f"{name.removesuffix('weight')}scales" in plan:
            # Scales without quantization in config.json are refused elsewhere, with an error of their own.
            wanted = _PACKED if quantized else (*_FLOATS, *_PACKED)
        for stored in source.tensors:
            info = checkpoint.tensors[stored]
            if info.dtype not in wanted:
                raise CheckpointError(
                    f"{info.file}: tensor {stored} is stored as {info.dtype}; "
                    f"{' or '.join(wanted)} is needed. Use the checkpoint that Qwen publishes in BF16, or one "
                    "that mtp-coord convert made."
                )
