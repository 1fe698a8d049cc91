"""The attention kernel for windows on Apple GPUs, run on a CPU, against fp64 and against MLX's own attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mtp.layers import kv_cache, window_attention
from mtp.layers.fused import fuse
from mtp.layers.kv_cache import KVRows, PairKV, new_kv
from mtp.layers.layer import KernelTrial, KVFormat
from tests.support.metal.metal_path import metal_path
from tests.support.metal.runner import Launch, count_launches, reason_not_to_run, runs

pytestmark = pytest.mark.skipif(reason_not_to_run() is not None, reason=reason_not_to_run() or "Metal kernels run")

WIDTHS = window_attention.WIDTHS
HALVES = (mx.bfloat16, mx.float16)


@pytest.fixture(autouse=True)
def a_mac() -> Iterator[None]:
    """Run the kernels that a Mac runs, at all widths."""
    with metal_path() as patch:
        patch.setattr(window_attention, "WIDTHS", WIDTHS)
        patch.setattr(window_attention, "FROM_KEYS", 0)
        yield


@dataclass
class Case:
    """A sequence of random queries, keys and values, which `gqa` query heads for each of two K/V heads read."""

    dim: int
    gqa: int
    dtype: mx.Dtype
    bits: int | None
    rows: int
    """Tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        keys = [mx.random.key(10 * self.seed + i) for i in range(3)]
        self.format = KVFormat.of(self.dim, self.bits)
        self.scale = self.dim**-0.5
        heads = 2 * self.gqa, 2, 2
        self.q, self.k, self.v = (
            mx.random.normal((1, count, self.rows, self.dim), key=key).astype(self.dtype)
            for count, key in zip(heads, keys, strict=True)
        )
        self.q = 2 * self.q  # so that some keys count far more than others

    def cache(self, tokens: int, kind: type[KVRows] | None = None) -> KVRows:
        """Return a cache of the first tokens, with room for more."""
        cache = kind() if kind else new_kv(self.format)
        cache.update_and_fetch(self.k[:, :, :tokens], self.v[:, :, :tokens])
        return cache

    def window(self, start: int, width: int, kind: type[KVRows] | None = None, *, kernel: bool = True) -> mx.array:
        """Return the attention of a window at `start`, with the kernel or without it."""
        own = slice(start, start + width)
        q, k, v = (x[:, :, own] for x in (self.q, self.k, self.v))
        cache, windows = self.cache(start, kind), WIDTHS if kernel else ()
        if kind is PairKV:
            return cache.attend_pair(q, mx.concatenate([k, v]), self.scale, windows)
        return cache.attend(q, k, v, self.scale, None, windows=windows)

    def exact(self, start: int, width: int) -> np.ndarray:
        """Return the attention of a window to the stored keys and values, in fp64."""
        q = numbers(self.q[:, :, start : start + width])
        k, v = (np.repeat(self.stored(x)[:, :, : start + width], self.gqa, axis=1) for x in (self.k, self.v))
        scores = q @ k.swapaxes(-1, -2) * self.scale
        visible = np.arange(start + width) <= np.arange(start, start + width)[:, None]
        weights = np.exp(np.where(visible, scores, -np.inf) - scores.max(-1, keepdims=True))
        found: np.ndarray = weights @ v / weights.sum(-1, keepdims=True)
        return found

    def stored(self, x: mx.array) -> np.ndarray:
        """Return keys or values as a cache stores them."""
        if self.bits is None:
            return numbers(x)
        size = self.format.group_size
        packed, scales, biases = mx.quantize(x, size, self.bits)
        wide = scales.astype(mx.float32), biases.astype(mx.float32)
        return numbers(mx.dequantize(packed, wide[0], wide[1], size, self.bits))

    def error(self, found: mx.array, start: int) -> float:
        """Return the relative error of the attention of a window."""
        exact = self.exact(start, found.shape[2])
        return float(np.linalg.norm(numbers(found) - exact) / np.linalg.norm(exact))


def numbers(x: mx.array) -> np.ndarray:
    """Return `x` as numpy's fp64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def counted(case: Case, start: int, width: int, kind: type[KVRows] | None = None) -> tuple[Launch, mx.array]:
    """Return the launch of the kernel for a window, and its result."""
    with count_launches() as launches:
        found = case.window(start, width, kind)
    (launch,) = (one for one in launches if not one.kernel.endswith("merge"))
    return launch, found


FORMS = [
    (64, 4, mx.bfloat16, 4),
    (96, 2, mx.float16, 8),
    (128, 2, mx.float16, None),
    (192, 2, mx.float32, 4),
    (256, 6, mx.bfloat16, None),
    (256, 2, mx.bfloat16, 4),
    (256, 2, mx.float32, 8),
]
"""Dimensions of a head, query heads for a K/V head, types and bits."""


def check_error(dim: int, gqa: int, dtype: mx.Dtype, bits: int | None) -> None:
    """Check the error of windows of ragged lengths against fp64 and against MLX's attention of the same type."""
    errors = []
    for seed, start in enumerate((0, 29, 253)):
        case = Case(dim, gqa, dtype, bits, start + 4, seed)
        errors.append([case.error(case.window(start, 4, kernel=kernel), start) for kernel in (True, False)])
    own, mlx = np.mean(errors, axis=0)
    # In fp32 MLX on the CPU adds in fewer steps than the kernels of a GPU do.
    assert own <= mlx if dtype in HALVES else own <= max(mlx, 8e-7)
    assert max(one for one, _ in errors) < {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 6e-3}[dtype]


@pytest.mark.parametrize(
    ("dim", "gqa", "dtype", "bits"),
    [pytest.param(*form, marks=() if form in (FORMS[0], FORMS[4]) else pytest.mark.slow) for form in FORMS],
)
def test_the_error_is_not_above_that_of_mlx(dim: int, gqa: int, dtype: mx.Dtype, bits: int | None) -> None:
    """The error against fp64 is at most that of MLX's attention of the same type."""
    check_error(dim, gqa, dtype, bits)


@pytest.mark.slow
@pytest.mark.parametrize("dim", window_attention.DIMS)
@pytest.mark.parametrize("dtype", [mx.float32, *HALVES])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_error_of_every_form_is_not_above_that_of_mlx(dim: int, dtype: mx.Dtype, bits: int | None) -> None:
    """Each size of a head has each format of keys and values in each type."""
    check_error(dim, 3, dtype, bits)


@pytest.mark.parametrize(("dim", "gqa", "dtype", "bits"), [FORMS[2], pytest.param(*FORMS[5], marks=pytest.mark.slow)])
def test_a_row_does_not_depend_on_the_window(dim: int, gqa: int, dtype: mx.Dtype, bits: int | None) -> None:
    """A row has the same bits in windows of 2 to 16 rows, wherever they begin and in either cache."""
    case = Case(dim, gqa, dtype, bits, 282)
    whole = case.window(250, 16)
    for start, width in ((250, 2), (252, 3), (253, 5), (255, 7), (249, 8), (256, 10), (254, 12)):
        found = case.window(start, width)
        first, end = max(start, 250), min(start + width, 266)
        assert mx.array_equal(found[:, :, first - start : end - start], whole[:, :, first - 250 : end - 250]), width
    if bits is None:
        assert mx.array_equal(case.window(250, 16, PairKV), whole)


def test_splits_depend_on_places_alone() -> None:
    """The splits of more keys begin where those of fewer do, and their number grows slowly."""
    counts = {}
    for seen in (1, 256, 257, 4096, 8192, 8193, 32768, 131072, 1_000_000):
        marks, longer = (np.array(window_attention._marks(keys)).tolist() for keys in (seen, 2**20))
        *starts, end = marks
        assert end == seen and starts == [at for at in longer[:-1] if at < seen]
        assert all(at % 256 == 0 for at in starts)
        counts[seen] = len(starts)
    assert counts[256] == 1 and counts[257] == 2 and counts[32768] == 64 and counts[1_000_000] < 150


@pytest.mark.parametrize(
    ("dim", "gqa", "dtype", "bits", "width"),
    [(*FORMS[0], 4), (*FORMS[4], 8), *(pytest.param(*FORMS[i], 8, marks=pytest.mark.slow) for i in (2, 5, 6))],
)
def test_keys_and_values_are_read_once_for_all_rows(
    dim: int, gqa: int, dtype: mx.Dtype, bits: int | None, width: int
) -> None:
    """A launch reads each key and value that a row sees once, whatever the number of rows and query heads."""
    case = Case(dim, gqa, dtype, bits, 300)
    launch, _ = counted(case, 300 - width, width)
    for name in ("k", "v"):
        once = 2 * 300 * dim * (bits or 8 * dtype.size) // 8
        assert launch.reads[name] == once
        if bits is not None:
            once = 2 * 300 * dim // case.format.group_size * dtype.size
            assert launch.distinct_reads[f"{name}_scales"] == launch.distinct_reads[f"{name}_biases"] == once
    assert launch.shared_bytes <= 9 * 2**10 and launch.threads == (256 if dim >= 128 else 128)


@pytest.mark.parametrize(("gqa", "width", "reads"), [(4, 16, 1), (6, 9, 2)])
def test_more_than_64_pairs_are_several_threadgroups(gqa: int, width: int, reads: int) -> None:
    """Rows and heads beyond eight tiles read the keys again, and no threadgroup has more tiles than was measured."""
    case = Case(64, gqa, mx.float32, None, 40)
    launch, found = counted(case, 40 - width, width, PairKV)
    assert launch.reads["k"] == launch.reads["v"] == reads * 2 * 40 * 64 * 4
    assert launch.shared_bytes <= 9 * 2**10
    assert case.error(found, 40 - width) < 1e-6


@pytest.mark.parametrize("bits", [None, 4])
def test_one_row_and_prompts_stay_with_mlx(monkeypatch: pytest.MonkeyPatch, bits: int | None) -> None:
    """The kernel computes windows of 2 to 16 rows of enough keys, at the widths that were won."""
    case = Case(64, 1, mx.float32, bits, 60)

    def launches(start: int, width: int, windows: Any = WIDTHS) -> int:
        before = runs.total()
        cache, own = case.cache(start), slice(start, start + width)
        mx.eval(cache.attend(case.q[:, :, own], case.k[:, :, own], case.v[:, :, own], 1.0, None, windows=windows))
        return runs.total() - before

    assert [launches(20, width) for width in (1, 2, 16, 17, 40)] == [0, 2, 2, 0, 0]
    assert [launches(20, width, [4]) for width in (2, 3, 4, 5)] == [0, 2, 2, 0]
    monkeypatch.setattr(window_attention, "FROM_KEYS", 30)
    assert [launches(start, 4) for start in (25, 26)] == [0, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "takes_window", lambda *_: True)
        q, k, v = (x[:, :, 40:44] for x in (case.q, case.k, case.v))
        before = runs.total()
        mx.eval(case.cache(40).attend(q, k, v, 1.0, 1, windows=WIDTHS))
        assert runs.total() == before, "a bound on the queries of a call is exact mode"


def test_each_width_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measured width has a trial at the stored format, and the won ones are used."""
    tried: list[str] = []

    def choose(kernel: str, shapes: str, source: str, run_trial: Any) -> bool:
        trial = run_trial()
        assert trial == KernelTrial(trial.own, trial.mlx) and min(trial.own, trial.mlx) > 0
        tried.append(f"{kernel}: {shapes}")
        return kernel.endswith(("_4", "_16"))

    fuser = fuse.Fuser(64, mx.bfloat16, choose, kv_format=KVFormat.of(64, 8))
    attention: Any = type("Attention", (), {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64})
    before = runs["window_attention_quantized"]
    assert fuser._windows(attention) == [4, 16]
    assert runs["window_attention_quantized"] > before
    shapes = "2 and 2 heads of 64 in mlx.core.bfloat16, keys in 8 bits"
    assert tried == [f"window_attention_{width}: {shapes}" for width in WIDTHS]
    attention.head_dim = 80
    assert fuser._windows(attention) == [] and len(tried) == len(WIDTHS)
