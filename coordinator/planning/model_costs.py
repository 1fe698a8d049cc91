"""The costs of a checkpoint, computed from its headers: the planner's input before any measurement.

Decoding one token reads every active weight once and little else. So the time of a part is its active bytes
over the memory bandwidth (the memory side of the roofline model). In a
mixture of experts, top-k of the experts are active.
"""

from __future__ import annotations

import re

from coordinator.planning.plan import LayerCost, ModelCosts, NodeSpec, make_plan
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.shard import TensorInfo
from mtp.head.drafter import MOST_WAITING
from mtp.layers.layer import KVFormat
from proto.errors import SpanError
from proto.span import Span
from proto.wire import DTYPE_BYTES, STORED_BYTES, STORED_NAMES

REFERENCE_BANDWIDTH = 100e9
"""Bytes per second. Memory bandwidth of a node of speed 1, as an M1 or M2 has it; an M4 has 1.2 times as much."""

_FLOATS = {"F64", *STORED_NAMES.values()}
_EXPERT = re.compile(r"\.mlp\.(switch_mlp|experts)\.")


def model_costs(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    kv_bits: int | None = None,
    with_head: bool = True,
) -> ModelCosts:
    """Return the costs of `checkpoint` loaded as `dtype` (None: as stored), at REFERENCE_BANDWIDTH.

    With `with_head` they include the MTP head, if the checkpoint has a complete one.
    """
    config = checkpoint.config
    sizes = {part: _part_bytes(checkpoint, part, dtype) for part in checkpoint.plans}
    tied = config.tie_word_embeddings
    head = with_head and checkpoint.mtp.complete
    lm_head, lm_head_active = sizes["embed" if tied else "lm_head"]
    itemsize = DTYPE_BYTES[dtype] if dtype else _stored_itemsize(checkpoint)
    kv_format = KVFormat.of(config.head_dim, kv_bits)
    kv_bytes = _kv_bytes(config.kv_bytes_per_token(1), kv_format, itemsize)
    layers = []
    for layer, kind in enumerate(config.layer_kinds):
        total, active = sizes[f"layers.{layer}"]
        gdn = kind == "gdn"
        layers.append(
            LayerCost(
                weight_bytes=total,
                seconds=active / REFERENCE_BANDWIDTH,
                kv_bytes=0 if gdn else kv_bytes,
                state_bytes=config.gdn_bytes_per_sequence(itemsize) if gdn else 0,
            )
        )
    return ModelCosts(
        layers=tuple(layers),
        embed_bytes=sizes["embed"][0],
        last_stage_bytes=sizes["norm"][0]
        + (0 if tied else lm_head)
        + (sizes["mtp"][0] if head else 0),
        lm_head_seconds=lm_head_active / REFERENCE_BANDWIDTH,
        draft_seconds=(sizes["mtp"][1] + lm_head_active) / REFERENCE_BANDWIDTH if head else 0.0,
        head_kv_bytes=kv_bytes if head else 0,
        head_state_bytes=MOST_WAITING * config.hidden_size * itemsize if head else 0,
        last_stage_needs_embed=head or tied,
    )


def _part_bytes(checkpoint: Checkpoint, part: str, dtype: str | None) -> tuple[int, int]:
    """Return the bytes of a part in memory and the bytes that one token reads."""
    config = checkpoint.config
    share = 1.0
    if config.num_experts:
        share = min(1.0, config.text_config["num_experts_per_tok"] / config.num_experts)
    sizes: dict[str, int] = {}
    for source in checkpoint.plans[part].values():
        for name in source.tensors:
            if name in checkpoint.tensors:
                sizes[name] = _loaded_bytes(checkpoint.tensors[name], dtype)
    active = sum(size * share if _EXPERT.search(name) else size for name, size in sizes.items())
    return sum(sizes.values()), int(active)


def _loaded_bytes(tensor: TensorInfo, dtype: str | None) -> int:
    """Return the bytes of `tensor` after the cast to `dtype`, which does not change packed integers."""
    if dtype is None or tensor.dtype not in _FLOATS:
        return tensor.nbytes
    return tensor.nbytes // STORED_BYTES[tensor.dtype] * DTYPE_BYTES[dtype]


def _stored_itemsize(checkpoint: Checkpoint) -> int:
    """Return the bytes of an activation in the checkpoint's own dtype, which is the dtype of the final norm."""
    stored = (name for source in checkpoint.plans["norm"].values() for name in source.stored)
    found = (checkpoint.tensors[name].dtype for name in stored if name in checkpoint.tensors)
    return next((STORED_BYTES[dtype] for dtype in found if dtype in _FLOATS), 4)


def _kv_bytes(elements: int, form: KVFormat, itemsize: int) -> int:
    """Return the bytes of `elements` of K/V; in quantized K/V each group adds a scale and a bias."""
    if not form.bits:
        return elements * itemsize
    return elements * form.bits // 8 + elements // form.group_size * 2 * itemsize


_UNLIMITED_BYTES = 2**60


def even_spans(checkpoint: Checkpoint, count: int, flag: str) -> tuple[Span, ...]:
    """Return the spans of `count` equal machines. Raises SpanError, naming `flag`, for more machines than layers."""
    layers = checkpoint.config.num_layers
    if count > layers:
        raise SpanError(f"{flag} {count}: the model has {layers} layers. Use {layers} or fewer.")
    nodes = [NodeSpec(f"node {number}", _UNLIMITED_BYTES) for number in range(count)]
    return tuple(stage.span for stage in make_plan(model_costs(checkpoint), nodes).stages)
