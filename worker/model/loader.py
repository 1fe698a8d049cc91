"""The loader of a stage: it builds the modules of the stage's parts and reads their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.cut import Cut
from mtp.checkpoint.format.parts import check_types, missing_tensors, part_module, read_part, settle_norms
from mtp.device import this_device
from mtp.head.draft_vocabulary import DraftRows, drafted_tokens
from mtp.head.drafter import MTPHead
from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.experts import OrderedExperts
from mtp.layers.layer import Layer, Mixer, Picks
from mtp.layers.linear import Format
from mtp.layers.reference import REFERENCE
from mtp.layers.reference.slices import SlicedOutputs, SlicedSums, join_layer
from mtp.layers.source_kernel import SourceKernel
from proto.errors import CheckpointError, SpanError, UsageError
from proto.span import Span
from proto.terminal.progress import OnProgress
from proto.wire import DTYPE_BYTES

log = logging.getLogger(__name__)

DTYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in DTYPE_BYTES}
"""The values of `--dtype`."""


@dataclass
class StageModules:
    """The modules of one stage, whose activations have `dtype`. A part that the stage does not own is None.

    The first stage has `embed_tokens`. The last stage has it if a tied lm_head or the MTP head needs it. `lm_head` is
    None on a last stage with tied embeddings, unless exact mode calls the embedding through it. `layers` have the
    order of `span`.
    """

    config: ModelConfig
    span: Span
    layers: list[Layer]
    dtype: mx.Dtype
    embed_tokens: Any = None
    norm: Any = None
    lm_head: Any = None
    head: MTPHead | None = None
    draft_rows: DraftRows | None = None
    """The rows of lm_head that drafts are drawn from; None for all."""
    model_bytes: int = 0
    """Bytes of the weights of the whole checkpoint."""
    communicator: Communicator = ALONE
    """The members of the group that holds these layers together."""
    slices: int = 1
    """Slices of each layer on all members, for exact mode: `mtp.layers.reference.slices`."""

    @classmethod
    def of(cls, config: ModelConfig, span: Span, parts: Mapping[str, Any]) -> StageModules:
        """Return the loaded `parts`, by name, as the modules of a stage with reference layers."""
        layers, *rest = config.family.stage_parts(config.text(), span, parts)
        return cls(config, span, list(layers), layers[0].dtype, *rest)

    def replace_layers(self, replaced: Callable[[Any], Layer], mixed: Callable[[Any], Mixer]) -> None:
        """Replace the reference layers, that of the MTP head included, and the mixers of other layers that have one."""

        def once(layer: Layer) -> Layer:
            if layer.kind == REFERENCE:
                return replaced(layer)
            if layer.mixer is not None:
                layer.mixer = mixed(layer.mixer)
            return layer

        self.layers = [once(layer) for layer in self.layers]
        if self.head is not None:
            self.head.block = once(self.head.block)

    def take_kernels(self, language: type[SourceKernel], picks: Picks) -> None:
        for layer in [*self.layers, *([self.head.block] if self.head else [])]:
            layer.take_kernels(language, picks)

    def share(self) -> None:
        """Let the layers, that of the MTP head included, add the partial results of all members."""
        is_stacked = self.slices > self.communicator.size
        sums = SlicedSums(self.communicator) if is_stacked else self.communicator
        for layer in self.layers:
            layer.share(sums)
        if self.head is not None:
            block = self.head.block
            block.share(self.communicator)
            self.head.block = block  # a reference block is made anew by each read


def load_stage(
    checkpoint: Checkpoint,
    span: Span,
    *,
    first: bool,
    last: bool,
    dtype: mx.Dtype | None,
    with_head: bool = True,
    on_progress: OnProgress | None = None,
    communicator: Communicator = ALONE,
    slices: int = 1,
    draft_vocab: bytes = b"",
) -> StageModules:
    """Load a stage of the whole `checkpoint`: its layers, and whether it is the first and the last of its plan.

    All members of the group of `communicator` together have `slices` slices of each layer, if these are more. `dtype`
    None keeps the stored types. `with_head` says whether a last stage has the MTP head, which is None if tensors are
    missing, and `draft_vocab` is the bitmap of the tokens that it drafts. The whole stage is checked before the first
    weight is read. Parts are read one after another, to bound the peak memory. Raises SpanError, CheckpointError, and
    UsageError for a dtype that cannot run here.
    """
    own, whole = _own_slices(checkpoint, communicator, slices), checkpoint
    kv_sharers = max(1, own[0].config.cut.size // checkpoint.config.num_kv_heads)
    checkpoint = checkpoint.cut_for(Cut(communicator.rank, communicator.size))
    parts = checkpoint.stage_parts(span, first=first, last=last, with_head=with_head)
    checkpoint.check_names()
    if missing := missing_tensors(checkpoint, parts):
        raise checkpoint.missing_tensors_error(missing)
    checkpoint.check_readable()
    for part in parts:
        check_types(checkpoint, part)
    if "mtp" in parts:
        settled = settle_norms(checkpoint)
        if settled is not checkpoint:
            log.warning("the MTP head has another layout than the model; its norms are corrected")
        checkpoint = settled
        if (layers := checkpoint.config.mtp_layers) > 1:
            log.warning("the MTP head drafts with its first layer", extra={"layers": layers})
    late = [] if first else [layer for layer in checkpoint.config.shape.token_layers if layer in span]
    if late:
        field = checkpoint.config.shape.layers[late[0]].reads_tokens
        raise SpanError(
            f"layer {late[0]} reads the tokens ({field}), so it has to be on the first machine. Give that one the "
            f"layers up to {late[0]}."
        )
    modules: dict[str, Any] = {part: _build(checkpoint, part, dtype) for part in parts}
    _read(checkpoint, own, modules, dtype, on_progress, kv_sharers)
    stage = StageModules.of(checkpoint.config, span, modules)
    stage.communicator, stage.slices = communicator, slices
    stage.model_bytes = sum(whole.part_bytes().values())
    if draft_vocab and stage.head is not None:
        part = "embed" if whole.config.tie_word_embeddings else "lm_head"
        # A member of a group, or a process with slices, has the rows in other pieces.
        is_cut = own[0].config.cuts_vocabulary and own[0].config.cut.size > 1
        module = (
            _build(whole, part, dtype)
            if is_cut and part == "lm_head"
            else getattr(stage.head, "lm_head", getattr(stage.lm_head, "module", modules[part]))
        )
        stage.draft_rows = DraftRows(module, drafted_tokens(draft_vocab, whole.config.vocab_size))
        del module
        mx.clear_cache()
    return stage


def _own_slices(checkpoint: Checkpoint, communicator: Communicator, slices: int) -> list[Checkpoint]:
    """Return the checkpoint as each slice of this member reads it. Raises SpanError if it cannot be cut."""
    count, rest = divmod(max(slices, communicator.size), communicator.size)
    if rest:
        raise SpanError(
            f"{slices} slices cannot be shared by {communicator.size} machines. Use a multiple for --slices."
        )
    if slices > 1:
        checkpoint.check_slices(slices)
    first = communicator.rank * count
    return [checkpoint.cut_for(Cut(first + i, count * communicator.size)) for i in range(count)]


def _read(
    checkpoint: Checkpoint,
    slices: Sequence[Checkpoint],
    modules: dict[str, Any],
    dtype: mx.Dtype | None,
    on_progress: OnProgress | None,
    kv_sharers: int,
) -> None:
    """Evaluate the lazy weights one after another. `kv_sharers` neighbouring slices hold the same heads of K/V."""
    sizes = checkpoint.part_bytes()
    total = sum(sizes[part] for part in modules)
    done = 0
    for part, checked in modules.items():
        if on_progress:
            on_progress(done, total)
        # The MTP head is not sliced: drafts do not change the answer.
        cuts_vocabulary = part == "lm_head" and slices[0].config.cuts_vocabulary
        sources = slices if part.startswith("layers.") or cuts_vocabulary else [checkpoint]
        whole = sources[0].config.cut.size == 1
        built: list[Any] = [checked] if whole else [_build(one, part, dtype, shares=True) for one in sources]
        for module in built:
            for weight in dict(tree_flatten(module.parameters())).values():
                # One at a time, so that the source of one weight is released before the next is read.
                mx.eval(weight)
                mx.clear_cache()
        if len(built) == 1:
            modules[part] = built[0]
        else:
            is_head = part == "lm_head"
            modules[part] = SlicedOutputs(built) if is_head else join_layer(built, kv_sharers)
        done += sizes[part]
    if on_progress:
        on_progress(done, total)


def _build(checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None, *, shares: bool = False) -> nn.Module:
    """Return the module of a part with lazy weights, quantized like its tensors. `shares` is that of `read_part`."""
    weights = read_part(checkpoint, part, dtype, shares=shares)
    module = _quantize(checkpoint, part, part_module(checkpoint.config, part), weights)
    _check(checkpoint, part, module, weights)
    _check_experts(part, module, weights)
    module.load_weights(list(weights.items()))
    for layer in module.layers if part == "mtp" else [module]:
        if "mlp" in layer:
            layer.mlp = OrderedExperts.of(layer.mlp)
    if part.startswith("layers."):
        config = checkpoint.config
        module = config.family.engine_layer(config.text(), module)
        config.family.open_on_disk(checkpoint, part, module)
    return module.eval()


def _quantize(checkpoint: Checkpoint, part: str, module: nn.Module, weights: dict[str, mx.array]) -> nn.Module:
    """Replace every module whose weight is stored with scales by a quantized one.

    Bits, group size and mode follow from the shapes, and not from the paths in config.json.
    """
    config = checkpoint.config
    if config.quantization is None:
        return module
    # nn.quantize replaces the leaves of a module. The holder makes a part that is itself a leaf replaceable.
    holder = nn.Module()
    holder.part = module
    stored = {f"part.{name}": weight for name, weight in weights.items()}

    def parameters(path: str, leaf: nn.Module) -> bool | dict[str, Any]:
        """Return the quantization of a leaf that is stored with scales, or False."""
        if not {f"{path}.weight", f"{path}.scales"} <= stored.keys():
            return False
        weight, scales = (stored[f"{path}.{name}"] for name in ("weight", "scales"))
        found = asdict(Format.stored(weight, scales, leaf.weight.shape[-1]))
        if f"{path}.global_scale" in stored:
            found["global_scale"] = True
        return found

    try:
        nn.quantize(holder, class_predicate=parameters)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{checkpoint.path}: the quantization of {part} is not supported: {error}") from error
    quantized: nn.Module = holder.part
    return quantized


def _check(checkpoint: Checkpoint, part: str, module: nn.Module, weights: dict[str, mx.array]) -> None:
    """Raise unless the names and shapes of `weights` are those of the module. Reads no weight."""
    expected = dict(tree_flatten(module.parameters()))
    plan = checkpoint.plans[part]
    for name in weights.keys() - expected.keys():
        stored = plan[name].stored[0]
        hint = (
            "it is quantized, but config.json has no quantization. Convert the checkpoint again."
            if name.endswith("scales")
            else "config.json may belong to another checkpoint. Download both again."
        )
        raise CheckpointError(f"{checkpoint.tensors[stored].file}: tensor {stored} is not part of this model: {hint}")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            stored = plan[name].stored[0]
            raise CheckpointError(
                f"{checkpoint.tensors[stored].file}: tensor {stored} gives "
                f"{checkpoint.config.family.path(part, name)} the shape {weight.shape}, but config.json requires "
                f"{expected[name].shape}. Download both again."
            )


def _check_experts(part: str, module: nn.Module, weights: dict[str, mx.array]) -> None:
    """Raise for unquantized experts in another type than float32 on the CPU, which MLX cannot multiply."""
    if not this_device().computes_on_host:
        return
    for path, leaf in module.named_modules():
        if isinstance(leaf, SwitchLinear) and weights[f"{path}.weight"].dtype != mx.float32:
            dtype = str(weights[f"{path}.weight"].dtype).removeprefix("mlx.core.")
            raise UsageError(
                f"{part}.{path} is {dtype}, but the CPU backend runs unquantized experts in float32 "
                "only. Use --dtype float32, or a quantized checkpoint."
            )
