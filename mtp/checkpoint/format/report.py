"""The report on a checkpoint, as plain data for people and for JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mlx.utils import tree_flatten

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import local_name, module_path
from mtp.checkpoint.format.parts import missing_from_backbone


def report(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the object that `mtp-coord inspect --json` prints, with sizes in bytes on disk.

    `norms` is "raw" when RMSNorm weights are stored as offsets from 1. `missing_tensors` are those without which the
    model cannot be loaded; those that the head lacks are under `mtp`.
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
        "packed": _packed(checkpoint),
        "norms": "raw" if checkpoint.layout == "raw" else "shifted",
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_positions": config.max_positions,
        "mtp": {
            "announced": checkpoint.mtp.announced,
            "present": checkpoint.mtp.present,
            "complete": checkpoint.mtp.complete,
            "missing": list(checkpoint.mtp.missing),
        },
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


def _packed(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """By part, all layers as one: how many of its matrices are packed in how many bits. Empty when none is."""
    quantization = _quantization(checkpoint)
    if quantization is None:
        return {}
    counts: dict[str, Counter[str]] = {}
    for part, plan in checkpoint.plans.items():
        for name, source in plan.items():
            info = checkpoint.tensors.get(source.stored[0])
            if (
                not name.endswith("weight")
                or info is None
                or len(info.shape) + (source.transform == "stack") != 2 + ("switch" in name)
            ):
                continue
            path = module_path(part, name).removesuffix(".weight")
            found = quantization["overrides"].get(path)
            packed = f"{name.removesuffix('weight')}scales" in plan
            bits = f"{(found or quantization)['bits']} bit" if packed else "unquantized"
            counts.setdefault(part.partition(".")[0], Counter())[bits] += 1
    return {part: dict(count.most_common()) for part, count in counts.items()}
