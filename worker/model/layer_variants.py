"""The choice of the variant that computes each part of a stage. It is made once, when the stage is built.

An optional kernel is chosen by measurement, which is kept on disk for the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.device import Arithmetic, this_device
from mtp.layers.cuda.dense_rows import DenseRows
from mtp.layers.cuda.pack import Packer
from mtp.layers.cuda.packed_linear import FEW_ROWS
from mtp.layers.exact import ExactProducts
from mtp.layers.fused.fuse import Fuser
from mtp.layers.fused.row_trials import RowTrials
from mtp.layers.layer import KernelTrial, KVFormat
from mtp.layers.linear import Fuse, FusedLinear
from mtp.layers.source_kernel import HALF_TYPES, CudaKernel, MetalKernel
from proto.errors import UsageError
from proto.kernels import Kernels
from proto.state_dir import read_text, state_dir, write_private
from worker.model.loader import StageModules

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variants:
    """The chosen variants of a stage, with a `summary` for people, such as `64 packed, exact`.

    Frames up to `split_rows` run windows and prompt chunks together; None is any number of rows. `arithmetic` names
    what decides the bits: the kinds of the layers, and the optional kernels in use.
    """

    summary: str
    split_rows: int | None
    arithmetic: str


WIDENED_BYTES = 512 * 10**6
"""Bytes. Largest checkpoint whose half-precision weights become fp32 on a CPU, which doubles their memory.

It is that of the whole checkpoint, so that all stages have one decision. The plan counts weights as stored, so a stage
may take this much more than planned.
"""


def choose_variants(
    modules: StageModules,
    kv_format: KVFormat,
    *,
    exact: bool,
    kernels: Kernels = Kernels.auto,
    state: Path | None = None,
) -> Variants:
    """Replace the parts of `modules` by the fastest variants of this device. A stage is built only once from them.

    CUDA kernels compute what they can on NVIDIA GPUs, but not layers in slices. On Apple GPUs and CPUs fused products
    do, unless the stage is exact: exact mode probes the products of single layers. All else stays with mlx-lm's
    modules. `kernels` decides over this project's kernels, whose trials the state directory `state` keeps. Raises
    UsageError if exact mode is impossible here.
    """
    device = this_device()
    dtype = modules.dtype
    split_rows = None
    choice = KernelChoice(kernels, state_dir(state) / FILE)
    if device.backend == "cuda" and kernels is not Kernels.mlx:
        split_rows = FEW_ROWS
        packer = Packer(dtype, kv_format, exact=exact)
        if modules.slices == 1 and packer.works():
            _pack(modules, packer)
    elif not exact:
        wide = modules.model_bytes <= WIDENED_BYTES
        columns = () if not device.stores_columns else (mx.float32, *HALF_TYPES) if wide else (mx.float32,)
        fuse = partial(FusedLinear.of, columns=columns)
        choose = rows = None
        if device.backend == "metal":
            choose, rows = choice.choose, RowTrials(partial(choice.choose, quiet=True), dtype)
            fuse = partial(FusedLinear.of, choose_few=rows.choose_few)
        fuser = Fuser(modules.config.hidden_size, dtype, choose, fuse, kv_format)
        modules.replace_layers(fuser.layer, fuser.mixer)
        modules.take_kernels(MetalKernel, fuser.picks)
        if rows is not None:
            for module in _plain_products(modules):
                rows.replace(module)
        if columns:
            _store_columns(modules, fuse, columns if wide else ())
    if exact:
        _pin(modules, ExactProducts(dtype, DenseRows if device.backend == "cuda" else None))
    # A member alone chooses its kernels: a trial with collectives would wait for members that try others.
    modules.share()
    mx.clear_cache()
    kinds = Counter(layer.kind for layer in modules.layers)
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    how = ", exact" if exact else ""
    how += f" in {modules.slices} slices" if modules.slices > 1 else ""
    # Without the numbers of layers, so that another cut of the model has the same.
    arithmetic = ", ".join([*sorted(kinds), *choice.used]) + how
    summary += how
    summary += f"; {choice.summary}" if choice.summary else ""
    log.info("layers", extra={"span": str(modules.span), "backend": device.backend, "layers": summary})
    return Variants(summary, split_rows, arithmetic)


def _pack(modules: StageModules, packer: Packer) -> None:
    modules.replace_layers(packer.layer, packer.mixer)
    modules.take_kernels(CudaKernel, packer.picks)
    if modules.lm_head is not None:
        modules.lm_head = packer.projection(modules.lm_head)
    elif modules.norm is not None and modules.embed_tokens is not None:
        modules.embed_tokens = packer.embedding(modules.embed_tokens)
    if (rows := modules.draft_rows) is not None:
        is_tied = hasattr(rows.module, "as_linear")
        rows.module = packer.embedding(rows.module) if is_tied else packer.projection(rows.module)
    head: Any = modules.head
    if head is not None and "fc" in head:
        head.fc = packer.projection(head.fc)


def _plain_products(modules: StageModules) -> Iterator[nn.Module]:
    """Yield the modules of mlx-lm in layers, heads and the unembedding, replaced ones too."""
    rows, last = modules.draft_rows, modules.norm is not None
    ends = [modules.lm_head, modules.embed_tokens if last else None, modules.head, rows.module if rows else None]
    for part in (*modules.layers, *ends):
        root = getattr(part, "module", part)
        yield from root.modules() if isinstance(root, nn.Module) else ()


def _store_columns(modules: StageModules, fuse: Fuse, tied: Collection[mx.Dtype]) -> None:
    """Fuse lm_head, the rows of drafts and the first product of the MTP head. `tied` are the types of an embedding."""

    def unembedding(module: Any) -> Any:
        is_tied = type(module) is nn.Embedding and module.weight.dtype in tied
        return FusedLinear.by_columns(module.weight) if is_tied else fuse([module])

    if modules.lm_head is not None:
        modules.lm_head = unembedding(modules.lm_head) or modules.lm_head
    elif modules.norm is not None:
        modules.lm_head = unembedding(modules.embed_tokens)
    if (rows := modules.draft_rows) is not None:
        rows.module = unembedding(rows.module) or rows.module
    head: Any = modules.head
    if head is not None and "fc" in head:
        head.fc = fuse([head.fc]) or head.fc


def _pin(modules: StageModules, products: ExactProducts) -> None:
    """Make the layers and the unembedding exact. The MTP head stays: drafts do not change the answer."""
    for layer in modules.layers:
        layer.pin_exact(products)
    if modules.lm_head is not None:
        modules.lm_head = products.replaced(modules.lm_head)
    elif modules.norm is not None and modules.embed_tokens is not None:
        modules.lm_head = products.tied_unembedding(modules.embed_tokens)
    products.log_ranges()


FILE = "kernels.json"
"""The file of the state directory with all trials of this machine."""

MOST_TRIALS = 1024
"""Trials that are kept, the newest ones: up to a hundred for each model and version."""


class KernelChoice:
    """The trials of one stage."""

    def __init__(self, mode: Kernels, file: Path) -> None:
        self.mode = mode
        self.file = file
        """The trials of this machine."""
        self.used: list[str] = []
        """The kernels in use, in the order in which they were chosen."""
        self._chosen: dict[str, bool] = {}
        self._texts: list[str] = []

    @property
    def summary(self) -> str:
        """The trials for people, empty without a trial."""
        return "; ".join(self._texts)

    def choose(
        self,
        kernel: str,
        shapes: str,
        source: str,
        run_trial: Callable[[], KernelTrial | None],
        *,
        quiet: bool = False,
    ) -> bool:
        """Return whether to use `kernel` of text `source` at `shapes`. With `--kernels own` its times do not count.

        A trial that returns None is made by another load. A `quiet` choice that has no problem is not reported.
        """
        if self.mode is Kernels.mlx:
            return False
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        # After an update of this program or of MLX, a kernel that failed or lost is tried again.
        key = f"{kernel} {digest} of {version('mtp-cluster')}, {shapes}, {Arithmetic.here()}"
        if key not in self._chosen:
            self._chosen[key] = self._decide(kernel, key, run_trial, quiet)
        return self._chosen[key]

    def _decide(self, kernel: str, key: str, run_trial: Callable[[], KernelTrial | None], quiet: bool) -> bool:
        trials = read_trials(self.file)
        trial = trials.get(key) or run_trial()
        if trial is None:
            return False
        if key not in trials:
            write_trials(self.file, {**trials, key: trial})
        own = trial.is_won or (self.mode is Kernels.own and not trial.problem)
        text = f"{kernel}: {describe(trial)}, {'own' if own else 'MLX'} used"
        self.used += [kernel] if own and kernel not in self.used else []
        if trial.problem or not quiet:
            self._texts.append(text)
            level = logging.WARNING if trial.problem else logging.INFO
            log.log(level, "kernel chosen", extra={"kernel": kernel, "choice": text})
        return own


def describe(trial: KernelTrial) -> str:
    """Return the result of a trial for people."""
    if trial.problem:
        return trial.problem
    return f"{trial.own * 1e6:.0f} us a step, MLX's operations {trial.mlx * 1e6:.0f} us"


def read_trials(file: Path) -> dict[str, KernelTrial]:
    """Return the trials of this machine, by kernel, shapes and arithmetic. A file that is damaged has none."""
    try:
        found: dict[str, Any] = json.loads(read_text(file) or "{}")
        return {str(key): KernelTrial(**trial) for key, trial in found.items()}
    except (UsageError, ValueError, TypeError, AttributeError) as error:
        log.warning("trials of kernels not read", extra={"error": str(error)[:200]})
        return {}


def write_trials(file: Path, trials: dict[str, KernelTrial]) -> None:
    """Keep the newest of `trials` in place of all earlier ones. A machine without any tries every kernel again."""
    newest = dict(list(trials.items())[-MOST_TRIALS:])
    text = json.dumps({key: asdict(trial) for key, trial in newest.items()}, indent=1)
    try:
        write_private(file, text)
    except UsageError as error:  # the next start tries again
        log.warning("trial of a kernel not kept", extra={"error": str(error)})
