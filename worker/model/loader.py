"""The loader of a stage: it builds the modules of the stage's parts and reads their weights."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import infer_quant_config

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.lazy_weights import read_part
from mtp.checkpoint.format.names import Source, module_path
from mtp.checkpoint.format.parts import check_types, missing_tensors, part_module
from mtp.exact.ranged_rows import RangedRows
from mtp.head.mtp_head import MTPHead
from mtp.kernels.column_linear import ColumnLinear
from mtp.kernels.dense_rows import DenseRows
from mtp.kernels.packed_linear import PackedEmbedding, PackedLinear
from mtp.packing.repacked_linear import add_extras
from proto.dtype import DTYPE_BYTES
from proto.errors import CheckpointError, UsageError
from proto.progress import OnProgress
from proto.span import Span

DTYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in DTYPE_BYTES}
"""The values of `--dtype`."""

T = TypeVar("T")


@dataclass
class StageModules:
    """The modules of one stage. A part that the stage does not own is None.

    The first stage has `embed_tokens`. The last stage has it if a tied lm_head or the MTP head needs it. `lm_head` is
    None on a last stage with tied embeddings, unless exact mode calls the embedding through it. `layers` have the
    order of `span`.
    """

    config: ModelConfig
    span: Span
    layers: list[DecoderLayer]
    embed_tokens: nn.Embedding | nn.QuantizedEmbedding | PackedEmbedding | None = None
    norm: nn.RMSNorm | None = None
    lm_head: (
        nn.Linear | nn.QuantizedLinear | ColumnLinear | PackedLinear | RangedRows | DenseRows | None
    ) = None
    head: MTPHead | None = None
    model_bytes: int = 0
    """Bytes of the weights of the whole checkpoint."""


@dataclass(frozen=True)
class StageSpec:
    """A stage to load: its layers, and whether it is the first and the last of its plan.

    `dtype` None keeps the stored types. `with_head` says whether a last stage has the MTP head.
    """

    span: Span
    first: bool
    last: bool
    dtype: mx.Dtype | None = None
    with_head: bool = True


def load_stage(
    checkpoint: Checkpoint,
    span: Span,
    *,
    first: bool,
    last: bool,
    dtype: mx.Dtype | None,
    with_head: bool = True,
    on_progress: OnProgress | None = None,
) -> StageModules:
    """Load the stage of a StageSpec with these fields.

    Names, shapes and types of the whole stage are checked before the first weight is read. Then the parts are read one
    after another, so the peak memory stays close to that of the stage. Without the head's tensors the head is None, and
    `checkpoint.mtp` lists the missing ones.

    Raises SpanError, CheckpointError with tensor and file, and UsageError for a dtype that cannot run here.
    """
    return run_steps(
        load_steps(checkpoint, StageSpec(span, first, last, dtype, with_head), on_progress)
    )


def load_steps(
    checkpoint: Checkpoint, spec: StageSpec, on_progress: OnProgress | None = None
) -> Generator[str, None, StageModules]:
    """Load a stage like `load_stage`, one weight a step. Yield the part that the next step reads."""
    parts = checkpoint.stage_parts(
        spec.span, first=spec.first, last=spec.last, with_head=spec.with_head
    )
    if checkpoint.unknown:
        raise CheckpointError(
            f"{checkpoint.tensors[checkpoint.unknown[0]].file}: tensor {checkpoint.unknown[0]} belongs to "
            f"no part of this model ({len(checkpoint.unknown)} in total): config.json may belong to another "
            "checkpoint. Download both again."
        )
    if missing := missing_tensors(checkpoint, parts):
        raise checkpoint.missing_tensors_error(missing)
    for part in parts:
        check_types(checkpoint, part)
    modules: dict[str, Any] = {part: _build(checkpoint, part, spec.dtype) for part in parts}
    yield from _read(checkpoint, modules, on_progress)
    return StageModules(
        config=checkpoint.config,
        span=spec.span,
        layers=[modules[f"layers.{layer}"] for layer in spec.span],
        embed_tokens=modules.get("embed"),
        norm=modules.get("norm"),
        lm_head=modules.get("lm_head"),
        head=modules.get("mtp"),
        model_bytes=sum(checkpoint.part_bytes().values()),
    )


def run_steps(steps: Generator[object, None, T]) -> T:
    """Run all steps of a generator and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _read(
    checkpoint: Checkpoint, modules: dict[str, Any], on_progress: OnProgress | None
) -> Generator[str]:
    """Evaluate the modules' lazy weights, one after another. Yield the part of the next one."""
    sizes = checkpoint.part_bytes()
    total = sum(sizes[part] for part in modules)
    done = 0
    for part, module in modules.items():
        if on_progress:
            on_progress(done, total)
        for weight in dict(tree_flatten(module.parameters())).values():
            yield part
            # One at a time, so that the source of one weight is released before the next is read.
            mx.eval(weight)
            mx.clear_cache()
        done += sizes[part]
    if on_progress:
        on_progress(done, total)


def _build(checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None) -> nn.Module:
    """Return the module of a part with lazy weights, quantized like its tensors."""
    weights = read_part(checkpoint, part, dtype)
    module = _quantize(checkpoint, part, part_module(checkpoint.config, part), weights)
    _check(checkpoint, part, module, weights)
    _check_experts(part, module, weights)
    module.load_weights(list(weights.items()))
    if part.startswith("layers."):
        module = checkpoint.config.engine_layer(module)
    return module.eval()


def _quantize(
    checkpoint: Checkpoint, part: str, module: nn.Module, weights: dict[str, mx.array]
) -> nn.Module:
    """Replace every module whose weight is stored with scales by a quantized one.

    Bits, group size and mode follow from the shapes, by mlx-lm's own rule. So the exceptions that config.json lists by
    path are not needed.
    """
    config = checkpoint.config
    if config.quantization is None and config.foreign is None:
        return module
    # nn.quantize replaces the leaves of a module. The holder makes a part that is itself a leaf replaceable.
    holder = nn.Module()
    holder.part = module
    stored = {f"part.{name}": weight for name, weight in weights.items()}

    def parameters(path: str, leaf: nn.Module) -> bool | dict[str, Any]:
        """Return the quantization of a leaf that is stored with scales, or False."""
        if not {f"{path}.weight", f"{path}.scales"} <= stored.keys():
            return False
        found: dict[str, Any] = infer_quant_config(path, leaf, stored)
        if f"{path}.global_scale" in stored:
            found["global_scale"] = True
        return found

    try:
        nn.quantize(holder, class_predicate=parameters)
        add_extras(holder, stored)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: the quantization of {part} is not supported: {error}"
        ) from error
    quantized: nn.Module = holder.part
    return quantized


def _check(
    checkpoint: Checkpoint, part: str, module: nn.Module, weights: dict[str, mx.array]
) -> None:
    """Raise unless the names and shapes of `weights` are those of the module. Reads no weight."""
    expected = dict(tree_flatten(module.parameters()))
    plan = checkpoint.plans[part]
    for name in weights.keys() - expected.keys():
        stored = _stored_name(plan, name)
        hint = (
            "it is quantized, but config.json has no quantization. Convert the checkpoint again."
            if name.endswith("scales")
            else "config.json may belong to another checkpoint. Download both again."
        )
        raise CheckpointError(
            f"{checkpoint.tensors[stored].file}: tensor {stored} is not part of this model: {hint}"
        )
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            stored = _stored_name(plan, name)
            raise CheckpointError(
                f"{checkpoint.tensors[stored].file}: tensor {stored} gives {module_path(part, name)} the "
                f"shape {weight.shape}, but config.json requires {expected[name].shape}. Download both again."
            )


def _stored_name(plan: dict[str, Source], name: str) -> str:
    """Return the stored name of a parameter. All parameters of a packed weight come from the weight's tensors."""
    source = plan.get(name) or plan[f"{name.rpartition('.')[0]}.weight".removeprefix(".")]
    return source.stored[0]


def _check_experts(part: str, module: nn.Module, weights: dict[str, mx.array]) -> None:
    """Raise for unquantized experts in another type than float32 on the CPU, which MLX cannot multiply."""
    if mx.default_device().type != mx.cpu:
        return
    for path, leaf in module.named_modules():
        if isinstance(leaf, SwitchLinear) and weights[f"{path}.weight"].dtype != mx.float32:
            dtype = str(weights[f"{path}.weight"].dtype).removeprefix("mlx.core.")
            raise UsageError(
                f"{module_path(part, path)} is {dtype}, but the CPU backend runs unquantized experts in float32 "
                "only. Use --dtype float32, or a quantized checkpoint."
            )
