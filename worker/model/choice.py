"""The choice of the variant that computes each part of a stage. It is made once, when the stage is built."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.device import this_device
from mtp.layers.cuda.dense_rows import DenseRows
from mtp.layers.cuda.pack import Packer
from mtp.layers.cuda.packed_linear import FEW_ROWS
from mtp.layers.exact import ExactProducts
from mtp.layers.joined.join import Joiner
from mtp.layers.layer import KVFormat, Mixer
from mtp.layers.metal.join import MetalJoiner
from proto.kernels import Kernels
from worker.model.kernel_choice import KernelChoice
from worker.model.loader import StageModules

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variants:
    """The chosen variants of a stage, with a `summary` for people, such as `64 packed, exact`.

    Frames up to `split_rows` run windows and prompt chunks together; None is any number of rows.
    """

    summary: str
    split_rows: int | None


def choose_variants(
    modules: StageModules, kv_format: KVFormat, *, exact: bool, kernels: Kernels = Kernels.auto
) -> Variants:
    """Replace the parts of `modules` by the fastest variants of this device. A stage is built only once from them.

    CUDA kernels compute what they can on NVIDIA GPUs, but not layers in slices. On Apple GPUs and on Linux' CPUs joined
    products do, unless the stage is exact: exact mode probes the products of single layers. All else stays with
    mlx-lm's modules. `kernels` decides over this project's kernels. Raises UsageError if exact mode is impossible here.
    """
    device = this_device()
    dtype = modules.dtype
    split_rows = None
    choice = KernelChoice(kernels)
    if device.variant == "cuda" and kernels is not Kernels.mlx:
        split_rows = FEW_ROWS
        packer = Packer(dtype, kv_format, exact=exact)
        if packer.works and modules.slices == 1:
            _pack(modules, packer)
    elif device.variant == "joined" and not exact:
        _join(modules, Joiner(dtype, modules.model_bytes))
    elif device.variant == "metal" and not exact:
        joiner = MetalJoiner(modules.config.hidden_size, dtype, choice.choose)
        modules.replace_layers(joiner.layer)
        _mix(modules, joiner.mixer)
    if exact:
        _pin(modules, ExactProducts(dtype, DenseRows if device.variant == "cuda" else None))
    # A member alone chooses its kernels: a trial with collectives would wait for members that try others.
    modules.share()
    mx.clear_cache()
    kinds = Counter(layer.kind for layer in modules.layers)
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    summary += ", exact" if exact else ""
    summary += f" in {modules.slices} slices" if modules.slices > 1 else ""
    summary += f"; {choice.summary}" if choice.summary else ""
    log.info(
        "layers", extra={"span": str(modules.span), "backend": device.backend, "layers": summary}
    )
    return Variants(summary, split_rows)


def _pack(modules: StageModules, packer: Packer) -> None:
    modules.replace_layers(packer.layer)
    _mix(modules, packer.mixer)
    if modules.lm_head is not None:
        modules.lm_head = packer.projection(modules.lm_head)
    elif modules.norm is not None and modules.embed_tokens is not None:
        modules.embed_tokens = packer.embedding(modules.embed_tokens)


def _mix(modules: StageModules, replaced: Callable[[Any], Mixer]) -> None:
    """Replace the GatedDeltaNets of layers that compute the rest themselves."""
    for layer in modules.layers:
        if layer.mixer is not None:
            layer.mixer = replaced(layer.mixer)


def _join(modules: StageModules, joiner: Joiner) -> None:
    modules.replace_layers(joiner.layer)
    if modules.head is not None and not modules.head.reads_streams:
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            modules.head[name] = joiner.norm(modules.head[name])
        modules.head.fc = joiner.projection(modules.head.fc)
    if isinstance(modules.norm, nn.RMSNorm):
        modules.norm = joiner.norm(modules.norm)
    if modules.lm_head is not None:
        modules.lm_head = joiner.projection(modules.lm_head)


def _pin(modules: StageModules, products: ExactProducts) -> None:
    """Make the layers and the unembedding exact. The MTP head stays: drafts do not change the answer."""
    for layer in modules.layers:
        layer.pin_exact(products)
    if modules.lm_head is not None:
        modules.lm_head = products.replaced(modules.lm_head)
    elif modules.norm is not None and modules.embed_tokens is not None:
        modules.lm_head = products.tied_unembedding(modules.embed_tokens)
    products.log_ranges()
