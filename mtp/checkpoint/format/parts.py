"""The parts of a checkpoint: their names in mlx-lm, their weights read one tensor at a time, and a report on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.cut import Share, share_of
from mtp.checkpoint.format.names import Source, Transform, is_shifted_norm, join_names, local_name, module_path
from mtp.flash_next.ngrams import ROW_TYPES, NgramTable
from proto.errors import CheckpointError
from proto.span import Span
from proto.wire import STORED_NAMES

_FLOATS = tuple(STORED_NAMES.values())
_PACKED = ("U32",)
_SCALES = (*_FLOATS, "U8")
"""Types of quantization scales. The modes other than affine store them as bytes."""


def part_module(config: ModelConfig, part: str) -> nn.Module:
    """Return the unquantized module of a part. Its random weights are lazy and never computed."""
    args = config.text_args()
    module: nn.Module
    match part.partition("."):
        case "embed", _, _:
            module = nn.Embedding(args.vocab_size, args.hidden_size)
        case "norm", _, _:
            module = config.family.norm(config.text())
        case "lm_head", _, _:
            outputs = args.vocab_size // (config.cut.size if config.cuts_vocabulary else 1)
            module = nn.Linear(args.hidden_size, outputs, bias=False)
        case "mtp", _, _:
            module = config.head()
        case _, _, layer:
            module = config.family.layer(config.text(), int(layer))
    # Each random weight adds a lazy split to the generator's key. They would accumulate over the loads of a worker.
    mx.eval(mx.random.state)
    return module


def missing_tensors(checkpoint: Checkpoint, parts: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the tensors that `parts` need and the checkpoint lacks."""
    found: dict[str, None] = {}
    for part in parts:
        plan = checkpoint.plans[part]
        needed = list(dict(tree_flatten(part_module(checkpoint.config, part).parameters())))
        if checkpoint.config.quantization is not None:
            needed += [n for name in plan for n in _beside(checkpoint, part, name)]
        lacking = [module_path(part, name) for name in needed if name not in plan]
        found |= dict.fromkeys((*lacking, *checkpoint.missing_sources(part)))
    return tuple(found)


def missing_from_backbone(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the missing tensors of the whole model without its MTP head."""
    whole = Span(0, checkpoint.config.num_layers)
    parts = checkpoint.stage_parts(whole, first=True, last=True, with_head=False)
    return missing_tensors(checkpoint, parts)


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
    """Raise CheckpointError for a tensor of `part` of an invalid type, which would load with wrong values."""
    plan = checkpoint.plans[part]
    quantized = checkpoint.config.quantization is not None
    for name, source in plan.items():
        wanted = _FLOATS
        if name.endswith("scales"):
            wanted = _SCALES
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


_NEVER_CAST = (
    "A_log", "global_scale", "self_attn.dt_bias", "e_score_correction_bias",
    "hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale",
)  # fmt: skip
"""Endings of the parameters that stay in fp32, whatever the model's dtype."""

_UNREAD = ("F64", "F8_E5M2")
"""Types that MLX does not support. MLX reads no tensor of a file that contains one of them."""

Files = dict[Path, dict[str, mx.array]]
"""The lazy tensors of opened files."""


def read_part(
    checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None, *, shares: bool = False
) -> dict[str, mx.array]:
    """Return the lazy parameters of `part` by their name within it. Raises CheckpointError.

    With `shares` a member of a group reads only the bytes of its share, at once. Floating parameters and scales are
    cast to `dtype` (None: as stored); A_log is not.
    """
    if missing := checkpoint.missing_sources(part):
        raise checkpoint.missing_tensors_error(missing)
    check_types(checkpoint, part)
    config = checkpoint.config
    key_dim = config.gdn_key_heads * config.gdn_key_dim
    files: Files = {}
    weights: dict[str, mx.array] = {}
    for name, source in checkpoint.plans[part].items():
        stored = [load_tensor(checkpoint, tensor, files) for tensor in source.stored]
        stacks = source.transform == "stack"
        made = mx.stack(stored) if stacks else _make(checkpoint, source, stored[0])
        share = share_of(part, name, made.shape, config.cut, key_dim, config.head_dim)
        if share is not None:
            if shares and source.transform == "as stored":
                pieces = _read_share(checkpoint, source.stored[0], share)
            else:
                pieces = share.slice_parameter(made)
            # Contiguous, since kernels would copy a view at each call.
            made = mx.contiguous(mx.concatenate(pieces, axis=share.axis))
        weights[name] = made.astype(_dtype(name, stored[0].dtype, dtype))
    return weights


def check_rows(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for rows on disk in a type that neither a stage nor the conversion reads."""
    for kinds in checkpoint.tables.values():
        wanted = [*ROW_TYPES, *(["F8_E4M3"] if "weight_scale" in kinds else [])]
        for name in (name for names in kinds.values() for name in names):
            info = checkpoint.tensors[name]
            if info.dtype not in wanted:
                raise CheckpointError(
                    f"{info.file}: rows of n-grams are stored as {info.dtype}; {' or '.join(wanted)} is needed. Use "
                    "the checkpoint in BF16, or one that mtp-coord convert made."
                )


def check_derived(checkpoint: Checkpoint, part: str) -> None:
    """Raise CheckpointError for a stored tensor that has other values than config.json gives it."""
    config = checkpoint.config
    for name in checkpoint.ignored:
        local = local_name(name) or ""
        wanted = config.family.derived_values(config.text_config, local)
        if wanted is None or not local.startswith(f"{part}."):
            continue
        info = checkpoint.tensors[name]
        checkpoint.check_file(info.file)
        kind = np.dtype({"I64": "<i8", "I32": "<i4"}.get(info.dtype, "V1"))
        held = np.fromfile(info.file, kind, math.prod(info.shape), offset=info.start).tolist()
        if held != wanted:
            raise CheckpointError(
                f"{info.file}: tensor {name} has {held!s:.60}, and config.json gives {wanted!s:.60}. The n-grams "
                "of this checkpoint are hashed in another way, which is not supported."
            )


def open_table(checkpoint: Checkpoint, part: str, rows: int) -> NgramTable:
    """Map the rows of a part that stay on disk. Raises CheckpointError unless there are `rows` of them."""
    tables = {
        kind: [info for info in map(checkpoint.tensors.get, names) if info]
        for kind, names in checkpoint.tables[part].items()
    }
    check_rows(checkpoint)
    check_derived(checkpoint, part)
    for info in (piece for pieces in tables.values() for piece in pieces):
        checkpoint.check_file(info.file)
    # Beside rows of MLX, which others have converted from FP8, stands the factor of all values.
    factors = [load_tensor(checkpoint, n, {}) for n in checkpoint.tables[part].get("weight_scale", [])]
    tables.pop("weight_scale", None)
    factor = float(np.array(factors[0].astype(mx.float32))[0]) if factors else 1.0
    found = {kind: sum(piece.shape[0] for piece in pieces) for kind, pieces in tables.items()}
    if set(found.values()) != {rows} or "weight" not in found:
        raise CheckpointError(
            f"{checkpoint.path}: the table of {part}.ple has {found} rows, and config.json requires {rows} of its "
            "weight. Download the checkpoint again."
        )
    if unread := {i.dtype for pieces in tables.values() for i in pieces} - ROW_TYPES.keys():
        raise CheckpointError(
            f"{checkpoint.path}: the table of {part}.ple is stored as {min(unread)}, which is not served. Convert the "
            "checkpoint with mtp-coord convert."
        )
    mapped = {
        kind: [np.memmap(i.file, ROW_TYPES[i.dtype], "r", i.start, i.shape) for i in pieces]
        for kind, pieces in tables.items()
    }
    return NgramTable(factor=factor, **mapped)


_NUMPY = {"F32": "f4", "F16": "f2", "BF16": "u2", "U32": "u4", "U8": "u1"}
"""The types in which numpy reads stored tensors. It has no bfloat16."""


def _read_share(checkpoint: Checkpoint, name: str, share: Share) -> list[mx.array]:
    """Return the pieces of a share of the stored tensor `name`. Reads the pages of the file that have them."""
    info = checkpoint.tensors[name]
    checkpoint.check_file(info.file)
    kind = np.dtype(_NUMPY[info.dtype]).newbyteorder("<")
    whole = np.memmap(info.file, kind, "r", offset=info.start, shape=info.shape)
    pieces = [mx.array(np.ascontiguousarray(piece)) for piece in share.slice_parameter(whole)]
    return [piece.view(mx.bfloat16) for piece in pieces] if info.dtype == "BF16" else pieces


def _make(checkpoint: Checkpoint, source: Source, stored: mx.array) -> mx.array:
    try:
        return TRANSFORMS[source.transform](stored)
    except (ValueError, IndexError) as error:
        name = source.stored[0]
        raise CheckpointError(
            f"{checkpoint.tensors[name].file}: tensor {name} has shape {stored.shape}: {error}"
        ) from error


def load_tensor(checkpoint: Checkpoint, name: str, files: Files) -> mx.array:
    """Return the stored tensor `name`. `files` has the tensors of the files that were opened before."""
    file = checkpoint.tensors[name].file
    if file not in files:
        checkpoint.check_file(file)
        try:
            loaded = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            tensors = checkpoint.tensors.items()
            others = [name for name, i in tensors if i.file == file and i.dtype in _UNREAD]
            raise CheckpointError(
                f"{file}: MLX cannot read {join_names(others) or 'it'}: {error}. Use the checkpoint that Qwen "
                "publishes, or convert it again."
            ) from error
        assert isinstance(loaded, dict)
        files[file] = loaded
    return files[file][checkpoint.tensors[name].stored or name]


def _half(which: int) -> Callable[[mx.array], mx.array]:
    """Return the transform that takes a contiguous half of axis -2, for the kernels: 0 is the gate, 1 is up."""
    return lambda fused: mx.contiguous(mx.split(fused, 2, axis=-2)[which])


TRANSFORMS: dict[Transform, Callable[[mx.array], mx.array]] = {
    "as stored": lambda weight: weight,
    "conv1d": lambda weight: mx.contiguous(weight.moveaxis(2, 1)),
    "taps": lambda weight: weight.reshape(weight.shape[0], -1),
    # In fp32, so that the later cast rounds only once.
    "norm + 1": lambda weight: weight.astype(mx.float32) + 1.0,
    "gate half": _half(0),
    "up half": _half(1),
}


def _dtype(name: str, stored: mx.Dtype, asked: mx.Dtype | None) -> mx.Dtype:
    """Return the dtype of a loaded parameter; packed integers and the names of _NEVER_CAST keep `stored`."""
    if asked is None or name.endswith(_NEVER_CAST) or not mx.issubdtype(stored, mx.floating):
        return stored
    return asked


Norms = Literal["as they should be", "not shifted", "shifted twice"]

_OFF = 0.6
"""Difference of the means above which a shift is missing or doubled. A fault gives 1, a correct head up to .3."""


def head_norms(checkpoint: Checkpoint) -> Norms:
    """Return the verdict on the norms of a complete head. Reads a few vectors."""
    if not checkpoint.config.family.offset_norms:
        return "as they should be"
    head = _norm_means(checkpoint, "mtp", "layers.0.")
    kinds = checkpoint.config.layer_kinds
    attention = [layer for layer, kind in enumerate(kinds) if kind == "attention"]
    if not attention:
        return "as they should be"
    twin = _norm_means(checkpoint, f"layers.{attention[-1]}", "")
    if not twin:  # a worker may have fetched the last layers only
        return "as they should be"
    difference = median(head[name] - twin[name] for name in head)
    # The raw offsets of the 27B's embedding norm are all negative, and would invert the sign of its input.
    embedding = read_part(checkpoint, "mtp", mx.float32)["pre_fc_norm_embedding.weight"]
    if difference < -_OFF or float(mx.max(embedding)) < 0:
        return "not shifted"
    return "shifted twice" if difference > _OFF else "as they should be"


def settle_norms(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with the norms of its head read as weights, where the head has another layout than the model.

    A raw head beside a converted model gets the 1 that its norms lack, and a converted one beside a raw model none.
    """
    changes: dict[Norms, dict[Transform, Transform]] = {
        "not shifted": {"as stored": "norm + 1"},
        "shifted twice": {"norm + 1": "as stored"},
    }
    change = changes.get(head_norms(checkpoint), {})
    plan = {
        name: replace(source, transform=change.get(source.transform, source.transform))
        if is_shifted_norm("mtp", name)
        else source
        for name, source in checkpoint.plans["mtp"].items()
    }
    if plan == checkpoint.plans["mtp"]:
        return checkpoint
    return replace(checkpoint, plans={**checkpoint.plans, "mtp": plan})


def _norm_means(checkpoint: Checkpoint, part: str, prefix: str) -> dict[str, float]:
    """Return the mean of each norm of a layer, as the layer uses it, by its name within the layer."""
    weights = read_part(checkpoint, part, mx.float32)
    return {
        name.removeprefix(prefix): float(mx.mean(weight))
        for name, weight in weights.items()
        if name.startswith(prefix) and is_shifted_norm(part, name)
    }


def report(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the object that `mtp-coord inspect --json` prints, with sizes in bytes on disk.

    `norms` is "raw" when RMSNorm weights are stored as offsets from 1. The tensors that the head lacks are under `mtp`.
    """
    config = checkpoint.config
    return {
        "model_type": config.model_type,
        "num_layers": config.num_layers,
        "layer_kinds": list(config.layer_kinds),
        "parameters": _parameters(checkpoint),
        "bytes": _bytes(checkpoint),
        "dtypes": _dtypes(checkpoint),
        "quantization": _quantization(checkpoint),
        "norms": "raw" if checkpoint.layout == "raw" else "shifted",
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_positions": config.max_positions,
        "mtp": {**asdict(checkpoint.mtp), "complete": checkpoint.mtp.complete},
        "unknown_tensors": list(checkpoint.unknown),
        "ignored_tensors": list(checkpoint.ignored),
        "missing_tensors": list(missing_from_backbone(checkpoint)),
    }


def _parameters(checkpoint: Checkpoint) -> int:
    """Count the weights of backbone and head in memory, before quantization. A tied lm_head counts once."""
    config = checkpoint.config
    heads = [config.head()] if checkpoint.mtp.complete else []
    modules = [config.backbone(), *heads]
    return sum(w.size for m in modules for w in dict(tree_flatten(m.parameters())).values())


def _bytes(checkpoint: Checkpoint) -> dict[str, Any]:
    sizes = checkpoint.part_bytes()
    vision = sum(i.nbytes for name, i in checkpoint.tensors.items() if local_name(name) is None)
    ends = {part: sizes[part] for part in ("embed", "norm", "lm_head", "mtp")}
    layers = [sizes[f"layers.{layer}"] for layer in range(checkpoint.config.num_layers)]
    rows = checkpoint.table_bytes
    total = sum(sizes.values())
    return {**ends, "layers": layers, "rows_on_disk": rows, "vision": vision, "total": total}


def _dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes by stored dtype, largest first, without the vision part."""
    count: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        if local_name(name) is not None:
            count[info.dtype] += info.nbytes
    return dict(count.most_common())


def _quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the default bits and group size, and the overrides by module path; False is unquantized."""
    found = checkpoint.config.quantization
    if found is None:
        return None
    default = {"bits": found["bits"], "group_size": found["group_size"]}
    overrides = {
        local: value
        for path, value in found.items()
        if (value is False or isinstance(value, dict)) and (local := local_name(path))
    }
    return {**default, "mode": found.get("mode", "affine"), "overrides": overrides}
