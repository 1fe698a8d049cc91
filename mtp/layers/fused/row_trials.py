"""The choice between MLX's product of few rows and `multiply_few`, by trials for each shape and number of rows."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mtp.layers.experts import FusedExperts
from mtp.layers.few_rows import HEADER, SOURCE, Step, Weights, can_multiply, multiply_few, time_chain
from mtp.layers.layer import TOLERANCE, KernelTrial, difference
from mtp.layers.linear import FewRowsFormat, Format, FusedLinear

log = logging.getLogger(__name__)

TRIED_ROWS = (2, 3, 4, 5, 8, 12, 16, 32)
"""Rows of the trials. Rows between two of them take what won at both."""

TRIED_PAIRS = (64, 128, 256)
"""The same for pairs of a row and an expert, whose experts are drawn at random."""

LOAD_SECONDS = 3.0
"""Seconds of all trials of one load. MLX multiplies where they did not suffice, until another load tries."""

STEPS, ROUNDS = 6, 3
"""Products of one evaluation, each of which waits for the one before, and evaluations of each side, in turns."""

ROTATED_BYTES, MOST_COPIES = 2**27, 8
"""Weights that take turns, so that caches do not hold them: bytes of all, and their number."""

Choose = Callable[[str, str, str, Callable[[], KernelTrial | None]], bool]
"""See `KernelChoice.choose`."""


class RowTrials:
    """The trials of the products of one stage, whose rows have `dtype`."""

    def __init__(self, choose: Choose, dtype: mx.Dtype) -> None:
        self._choose, self._dtype = choose, dtype
        self._left = LOAD_SECONDS
        self._known: dict[tuple[Format, tuple[int, ...]], Format] = {}

    def choose_few(self, kind: Format, weights: Weights) -> Format:
        """Return `kind` with the numbers of rows at which `multiply_few` is right and not slower than MLX."""
        if not can_multiply(kind, weights, self._dtype):
            return kind
        key = kind, weights[0].shape
        if key not in self._known:
            tried = TRIED_ROWS if weights[0].ndim == 2 else TRIED_PAIRS
            # Time may end: the rows in the middle of the range are tried first.
            order = sorted(tried, key=lambda rows: abs(tried.index(rows) - len(tried) // 2))
            won = [rows for rows in order if self._wins(kind, weights, rows)]
            self._known[key] = FewRowsFormat(kind.bits, kind.group_size, kind.mode, longest_run(tried, won))
            log.info(
                "products of few rows",
                extra={"shape": str(weights[0].shape), "own at": str(sorted(won)), "tried": str(tried)},
            )
        return self._known[key]

    def replace(self, module: nn.Module) -> None:
        """Let a quantized layer or embedding of mlx-lm, or fused experts, multiply few rows so where that wins."""
        if isinstance(module, FusedExperts):
            module.choose_few(self.choose_few)
        if (
            (kind := _KINDS.get(type(module))) is None
            or "weight" not in module
            or module.get("global_scale") is not None
        ):
            return
        found = self.choose_few(Format(module.bits, module.group_size, module.mode), _weights_of(module))
        if isinstance(found, FewRowsFormat) and found.few[1]:
            module.__class__ = kind
            vars(module)["format"] = found

    def _wins(self, kind: Format, weights: Weights, rows: int) -> bool:
        outputs, groups = weights[1].shape[-2:]
        shape = f"{outputs} x {groups * kind.group_size} of {kind.bits} bits in groups of {kind.group_size}"
        shape += f" ({kind.mode}), {rows} rows of {self._dtype}"
        shape += f" of {weights[0].shape[0]} experts" if weights[0].ndim == 3 else ""
        return self._choose("few_rows", shape, HEADER + SOURCE, partial(self._trial, kind, weights, rows))

    def _trial(self, kind: Format, weights: Weights, rows: int) -> KernelTrial | None:
        """Return the trial, None without time for it."""
        if self._left <= 0:
            log.info("no time for a trial of few rows", extra={"shape": str(weights[0].shape), "rows": rows})
            return None
        began = time.monotonic()
        try:
            return try_product(kind, weights, rows, self._dtype)
        except Exception as error:  # whatever the compiler of a machine finds wrong
            return KernelTrial(problem=str(error)[:300])
        finally:
            self._left -= time.monotonic() - began


class FewRowsLinear(nn.QuantizedLinear):
    """A quantized linear layer with its `format`."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = vars(self)["format"].multiply(x, _weights_of(self))
        return y + self["bias"] if "bias" in self else y


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """A quantized embedding with its `format`."""

    def as_linear(self, x: mx.array) -> mx.array:
        found: mx.array = vars(self)["format"].multiply(x, _weights_of(self))
        return found


class FewRowsExperts(QuantizedSwitchLinear):
    """The quantized linear layers of experts with their `format`."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        product = FusedLinear(vars(self)["format"], _weights_of(self))
        y = product.gather(x, indices, is_sorted=sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


_KINDS: dict[type, type] = {
    nn.QuantizedLinear: FewRowsLinear,
    nn.QuantizedEmbedding: FewRowsEmbedding,
    QuantizedSwitchLinear: FewRowsExperts,
}


def _weights_of(module: nn.Module) -> Weights:
    return tuple(module[name] for name in ("weight", "scales", "biases") if name in module)


def longest_run(tried: Sequence[int], won: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last of the longest run of `tried` in `won`, zeros if there is none."""
    best: list[int] = []
    run: list[int] = []
    for rows in tried:
        run = [*run, rows] if rows in won else []
        best = max(best, run, key=len)
    return (best[0], best[-1]) if best else (0, 0)


def try_product(kind: Format, weights: Weights, rows: int, dtype: mx.Dtype) -> KernelTrial:
    """Return the trial of `multiply_few` against MLX's product, for `rows` random rows."""
    inputs = weights[1].shape[-1] * kind.group_size
    x = mx.random.normal((rows, inputs), key=mx.random.key(5)).astype(dtype)
    experts = None
    if weights[0].ndim == 3:
        experts = mx.sort(mx.random.randint(0, weights[0].shape[0], (rows,), key=mx.random.key(6)).astype(mx.uint32))

    def theirs(x: mx.array, weights: Weights) -> mx.array:
        if experts is None:
            return kind.multiply(x, weights)
        return FusedLinear(kind, weights).gather(x[:, None], experts, is_sorted=True)[:, 0]

    def own(x: mx.array, weights: Weights) -> mx.array:
        return multiply_few(kind, x, weights, experts)

    if problem := difference(own(x, weights), theirs(x, weights), TOLERANCE[dtype]):
        return KernelTrial(problem=problem)
    size = sum(array.nbytes for array in weights)
    copies = [weights, *(tuple(map(mx.array, weights)) for _ in range(min(MOST_COPIES, ROTATED_BYTES // size) - 1))]
    mx.eval(x, copies)
    sides = [partial(_chained, side) for side in (own, theirs)]
    rounds = [[time_chain(side, x, copies, STEPS) for side in sides] for _ in range(ROUNDS)]
    return KernelTrial(*(statistics.median(times) for times in zip(*rounds, strict=True)))


def _chained(product: Step, x: mx.array, weights: Weights) -> mx.array:
    """Return `x`, for which the next product waits until this one is computed."""
    return x + 0 * product(x, weights)[:, :1]
