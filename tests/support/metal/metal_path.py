"""The Metal path of this project and of mlx-lm, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta

from mtp.device import DEVICES
from mtp.layers import kv_cache, window_attention
from mtp.layers.fused import fuse, row_trials
from mtp.layers.source_kernel import MetalKernel
from proto.kernels import Kernels
from tests.support.metal import runner
from worker.model import layer_variants
from worker.model.layer_variants import KernelChoice

KERNELS = {
    "_gated_delta_kernel": lambda: gated_delta._make_gated_delta_kernel(False, False),
    "_gated_delta_kernel_vec": lambda: gated_delta._make_gated_delta_kernel(False, True),
    "_gated_delta_kernel_packed": gated_delta._make_gated_delta_packed_kernel,
}
"""mlx-lm's kernels, which it makes when it is imported on a Mac."""


class _KeptKernel:
    """The attribute `_kernel` of all Metal kernels, empty at first."""

    def __init__(self) -> None:
        self._kept: dict[MetalKernel, Any] = {}

    def __get__(self, kernel: MetalKernel, _: object) -> Any:
        return self._kept.get(kernel)

    def __set__(self, kernel: MetalKernel, value: Any) -> None:
        self._kept[kernel] = value
        vars(kernel).setdefault("_kernel", None)


@contextmanager
def metal_choices(metal_kernel: Callable[..., Any]) -> Iterator[pytest.MonkeyPatch]:
    """Choose what a Mac would inside the block, with `metal_kernel` for `mx.fast.metal_kernel`."""
    with pytest.MonkeyPatch.context() as patch:
        # Without frames to warm up, which are many for kernels that a CPU runs.
        mac = replace(DEVICES["metal"], wires_memory=False, warm_up_batches=())
        patch.setitem(DEVICES, "cpu", mac)
        patch.setattr(mx.fast, "metal_kernel", metal_kernel)
        # A kernel keeps what `metal_kernel` returned. Another block has another function.
        patch.setattr(MetalKernel, "_kernel", _KeptKernel(), raising=False)
        # What mlx-lm asks MLX for in this module, answered as on a Mac.
        on_mac = {
            "metal": SimpleNamespace(is_available=lambda: True),
            "default_device": lambda: mx.gpu,
        }
        patch.setattr(gated_delta, "mx", SimpleNamespace(**vars(mx) | on_mac))
        for name, make in KERNELS.items():
            patch.setattr(gated_delta, name, make())
        # The runner's times say nothing, so a kernel is used if it is right.
        patch.setattr(fuse, "STEPS", 1)
        # Products of few rows are tried where a test asks for it: the runner takes seconds for those of a model.
        patch.setattr(row_trials, "TRIED_ROWS", ())
        patch.setattr(row_trials, "TRIED_PAIRS", ())
        patch.setattr(row_trials, "LOAD_SECONDS", 600.0)
        for name in ("STEPS", "ROUNDS", "MOST_COPIES"):
            patch.setattr(row_trials, name, 1)
        patch.setattr(fuse, "TRIAL_SECONDS", 0.0)
        patch.setattr(fuse, "WINDOW_SECONDS", 0.0)
        # One width and few keys, because the runner is slow.
        patch.setattr(window_attention, "WIDTHS", (8,))
        patch.setattr(kv_cache, "TRIAL_KEYS", 64)
        patch.setattr(layer_variants, "KernelChoice", lambda _, file: KernelChoice(Kernels.own, file))
        yield patch


@contextmanager
def metal_path() -> Iterator[pytest.MonkeyPatch]:
    """Choose and run what a Mac would inside the block.

    Compiled functions run uncompiled, because the runner reads the arrays of a kernel.
    """
    with metal_choices(runner.metal_kernel) as patch:
        mx.disable_compile()
        try:
            yield patch
        finally:
            mx.enable_compile()
