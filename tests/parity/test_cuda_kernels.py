"""The CUDA kernels compute what MLX's own operations compute, and a row's result does not depend on other rows.

They run where `MTP_TEST_GPU=1` is set and MLX computes on an NVIDIA GPU.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest

from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import part_module
from mtp.layers.cuda import pack as packing
from mtp.layers.cuda import packed_linear
from mtp.layers.cuda.attention import PackedAttentionLayer
from mtp.layers.cuda.dense_rows import DenseRows
from mtp.layers.cuda.pack import Packer, packed_windows
from mtp.layers.cuda.packed_linear import PackedLinear, multiply_rows, pack, unpack
from mtp.layers.gdn_windows import (
    GatedDeltaShape,
    SnapshotGDNCache,
    Window,
    WindowMixer,
    record_windows,
    run_windows,
)
from mtp.layers.kernel_files import PLACE
from mtp.layers.kv_cache import tiled_attention
from mtp.layers.layer import KVFormat, Layer, Mixer
from mtp.layers.linear import Format
from mtp.layers.mlx_modules import Product, compile_missing
from mtp.layers.reference import reference_layer
from mtp.layers.reference.gdn import GatedDelta, GDNLayer, SigmoidGatedNorm
from mtp.layers.source_kernel import CudaKernel
from proto.frame import Admit, Segment
from proto.span import Span
from tests.parity.test_gpu import GPU
from tests.support.checkpoints.checkpoints import config_of
from tests.support.stages import row_kernels
from tests.support.stages.rows_behind_a_hole import rows_behind_a_hole
from worker.cache.sequence_cache import SequenceCache
from worker.model.loader import StageModules
from worker.model.stage import StageForward


def wide_config(eighths: int, layers: int) -> ModelConfig:
    """Return layers of `eighths` eighths of the width of Qwen3.5-27B."""
    config = config_of(moe=False, layers=layers, hidden=640 * eighths, vocab=4096, tie=False, dtype=mx.bfloat16)
    config["text_config"] |= {
        "intermediate_size": 2176 * eighths,
        "num_attention_heads": 3 * eighths,
        "num_key_value_heads": max(eighths // 2, 1),
        "head_dim": 256,
        "linear_num_value_heads": 6 * eighths,
        "linear_num_key_heads": 2 * eighths,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    return ModelConfig.parse(Path("config.json"), config)


def random_stage(config: ModelConfig) -> StageModules:
    """Return all layers and the embedding."""

    def part(name: str) -> Any:
        holder = nn.Module()
        holder.part = part_module(config, name)
        holder.set_dtype(mx.bfloat16)
        nn.quantize(holder, group_size=64, bits=4)
        mx.eval(holder.parameters())
        return holder.part.eval()

    layers: list[Layer] = [reference_layer(part(f"layers.{i}")) for i in range(config.num_layers)]
    span = Span(0, config.num_layers)
    return StageModules(config, span, layers, mx.bfloat16, part("embed"))


LAYERS = 4
EIGHTHS = 2
"""Eighths of the width of Qwen3.5-27B."""

TOLERANCE = 0.02
"""Bound of the error's norm over the norm of the result in bf16. The kernels round less often than the operations."""


@pytest.fixture(scope="module", autouse=True)
def _cuda_required() -> Iterator[None]:
    if os.environ.get(GPU) != "1":
        pytest.skip(f"{GPU}=1 is not set")
    if mx.device_count(mx.gpu) == 0 or mx.metal.is_available():
        pytest.skip("MLX has no NVIDIA GPU here")
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.gpu))
    yield
    mx.set_default_device(before)


def error_of(found: mx.array, expected: mx.array) -> float:
    """Return the norm of the difference over the norm of `expected`."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    difference = mx.linalg.norm((found - expected).reshape(-1))
    ratio = difference / mx.linalg.norm(expected.reshape(-1))
    return cast(float, ratio.item())


def same(found: mx.array, expected: mx.array) -> bool:
    return bool(mx.array_equal(found, expected).item())


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_experts_and_streams_agree(dtype: mx.Dtype, rows: int) -> None:
    """The sources that Macs share compute the same here."""
    row_kernels.check_experts(CudaKernel, dtype, rows)
    row_kernels.check_streams(CudaKernel, dtype, rows)
    row_kernels.check_hyper_connections(CudaKernel, dtype, rows + 8)


@pytest.mark.parametrize(("columns", "count"), [(512, 512), (7500, 512), (32_768, 128), (70_000, 512)])
def test_the_choice_of_blocks_agrees(columns: int, count: int) -> None:
    """The lowest ranks are those of two sorts, also where many are equal."""
    row_kernels.check_choice(CudaKernel, columns, count)


@pytest.mark.parametrize(("weighted", "rejected"), [(False, None), (True, None), (True, 0), (False, 2)])
def test_queries_read_the_tokens_of_chosen_blocks(weighted: bool, rejected: int | None) -> None:
    """They are those that MLX's operations choose."""
    row_kernels.check_reads(CudaKernel, weighted=weighted, rejected=rejected)


# ---- products


@pytest.mark.parametrize("outputs", [48, 1048, 9216])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 17, 32, 33, 100])
def test_dense_rows_agree_and_ignore_other_rows(outputs: int, rows: int) -> None:
    w = mx.random.normal((outputs, 640), key=mx.random.key(1)).astype(mx.bfloat16)
    x = mx.random.normal((rows, 640), key=mx.random.key(2)).astype(mx.bfloat16)
    product = DenseRows(w)
    found = product(x)
    assert error_of(found, x.astype(mx.float32) @ w.astype(mx.float32).T) < TOLERANCE
    assert same(found, mx.concatenate([product(x[i : i + 1]) for i in range(rows)]))


@pytest.mark.parametrize("keys", [300, 512])
def test_attention_of_one_query_does_not_depend_on_its_buffer(keys: int) -> None:
    """MLX takes another kernel for a slice of a buffer of 256 n tokens than for keys that a restored cache holds."""
    heads, dim, buffer = 2, 64, 768
    held = [mx.random.normal((1, heads, buffer, dim)).astype(mx.bfloat16) for _ in range(2)]
    slices = [one[:, :, :keys] for one in held]
    copies = [mx.contiguous(one) for one in slices]
    q = mx.random.normal((1, 4, 1, dim)).astype(mx.bfloat16)
    mx.eval(held, copies, q)
    found = [
        tiled_attention(q, kv[0], kv[1], keys - 1, dim**-0.5, queries=1)
        for kv in (slices, copies, [one[:, :, :keys] for one in copies])
    ]
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.fixture(scope="module")
def quantized() -> tuple[mx.array, ...]:
    """Weights, scales and biases of a 4-bit matrix of 1040 outputs and 640 inputs."""
    weights = mx.random.normal((1040, 640), key=mx.random.key(1)).astype(mx.bfloat16)
    return tuple(mx.quantize(weights, group_size=64, bits=4))


def dequantized(w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    return mx.dequantize(w, scales, biases, group_size=64, bits=4)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 96, 97])
def test_products_agree_and_ignore_other_rows(quantized: tuple[mx.array, ...], rows: int) -> None:
    """A product is near the exact one, and up to FEW_ROWS rows it is that of each row alone, bit for bit."""
    x = mx.random.normal((rows, 640)).astype(mx.bfloat16)
    q, scales, biases = quantized
    weights = pack(q, scales, biases)
    found = PackedLinear(*weights)(x)
    exact_weights = dequantized(q, scales.astype(mx.float32), biases.astype(mx.float32))
    exact = x.astype(mx.float32) @ exact_weights.T
    assert error_of(found, exact) < TOLERANCE
    if rows <= packed_linear.FEW_ROWS:
        alone = mx.concatenate([multiply_rows(x[i : i + 1], *weights) for i in range(rows)])
        assert same(found, alone)


def test_weights_come_back_as_they_were(quantized: tuple[mx.array, ...]) -> None:
    """Unpacked weights are MLX's own dequantized ones, whole and by row."""
    q, scales, biases = quantized
    w, factors = pack(q, scales, biases)
    expected = dequantized(q, scales, biases)
    assert same(unpack(w, factors, mx.bfloat16), expected)
    picked = mx.array([3, 1039, 17], dtype=mx.int32)
    assert same(unpack(w, factors, mx.bfloat16, picked), expected[picked])


# ---- GatedDeltaNet


class Recurrence:
    """A layer of random weights, and a text of projected rows."""

    def __init__(self) -> None:
        mx.random.seed(2)
        modules = random_stage(wide_config(EIGHTHS, 1))
        reference = cast(GDNLayer, modules.layers[0])
        self.layer = packed_windows(reference.module, mx.bfloat16, None)
        self.shape: GatedDeltaShape = self.layer.recurrence.shape
        self.rows = mx.random.normal((16, self.shape.row)).astype(mx.bfloat16)

    def run(self, cache: SnapshotGDNCache, start: int, count: int, *, stays_open: bool = False) -> mx.array:
        """Run rows `start … start + count` from where `cache` stands. Return their outputs."""
        window = Window(cache.point, start, count, stays_open)
        out, saved = run_windows(cache.recurrence, self.rows, [window])
        record_windows([cache], [window], self.rows, saved)
        return out[start : start + count]

    def new_cache(self) -> SnapshotGDNCache:
        return self.layer.new_cache(KVFormat())

    def state_of(self, cache: SnapshotGDNCache) -> Sequence[mx.array]:
        return cache.copy().arrays()


@pytest.fixture(scope="module")
def recurrence() -> Recurrence:
    return Recurrence()


@pytest.mark.parametrize("width", range(1, 17))
def test_tokens_at_once_are_tokens_one_by_one(recurrence: Recurrence, width: int) -> None:
    """Outputs and state of T tokens at once are those of T single steps, bit for bit."""
    at_once, one_by_one = recurrence.new_cache(), recurrence.new_cache()
    found = recurrence.run(at_once, 0, width)
    steps = [recurrence.run(one_by_one, i, 1) for i in range(width)]
    assert same(found, mx.concatenate(steps))
    for a, b in zip(recurrence.state_of(at_once), recurrence.state_of(one_by_one), strict=True):
        assert same(a, b)


@pytest.mark.parametrize("silu", [True, False])
def test_a_mixer_agrees_with_its_modules(silu: bool) -> None:
    """A GatedDeltaNet in a layer of Flash-Next has the kernel, with either gate, for prompts and for steps."""
    mx.random.seed(3)
    net = cast(GDNLayer, random_stage(wide_config(EIGHTHS, 1)).layers[0]).mixer.net
    if not silu:
        net.norm = SigmoidGatedNorm(128, 1e-6)
    _check_mixer(GatedDelta(net, mx.bfloat16, silu=silu), net.hidden_size)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_mixer_of_channels_agrees_with_its_modules(bound: float | None) -> None:
    """Kimi Delta Attention has the kernel, with either form of its decays."""
    _check_mixer(row_kernels.delta_mixer(mx.bfloat16, bound), row_kernels.DELTA_HIDDEN)


def _check_mixer(modules: GatedDelta, hidden: int) -> None:
    """Check the kernels of `modules` against their operations, for a prompt and for steps."""
    x = mx.random.normal((40, hidden)).astype(mx.bfloat16)

    def outputs(mixer: Mixer) -> mx.array:
        """Return the outputs of a prompt and of five steps."""
        cache = mixer.new_cache(KVFormat())
        ends = [0, 35, 36, 37, 38, 39, 40]
        parts = [mixer.mix(x[a:b], [cache], [b - a], [False]) for a, b in pairwise(ends)]
        mx.eval(parts)
        return mx.concatenate(parts)

    expected = outputs(modules)
    kernels = Packer(mx.bfloat16, KVFormat()).mixer(modules)
    assert isinstance(kernels, WindowMixer)
    assert error_of(outputs(kernels), expected) < TOLERANCE


@pytest.mark.parametrize("accepted", range(6))
def test_a_cut_window_leaves_the_state_of_its_accepted_tokens(recurrence: Recurrence, accepted: int) -> None:
    """After a cut, state and further outputs are those of a sequence that only ever saw the accepted tokens."""
    cut, plain = recurrence.new_cache(), recurrence.new_cache()
    for cache in (cut, plain):
        recurrence.run(cache, 0, 3)
    recurrence.run(cut, 3, 5, stays_open=True)
    recurrence.run(cut, 8, 2, stays_open=True)
    cut.apply_commit(0, accepted, 0) if accepted < 5 else cut.apply_commit(1, 0, 0)
    if accepted:
        recurrence.run(plain, 3, accepted)
    for a, b in zip(recurrence.state_of(cut), recurrence.state_of(plain), strict=True):
        assert same(a, b)
    assert same(recurrence.run(cut, 10, 4), recurrence.run(plain, 10, 4))


# ---- a whole stage


def loaded(seed: int = 3) -> StageModules:
    mx.random.seed(seed)
    return random_stage(wide_config(EIGHTHS, LAYERS))


class Text:
    """A sequence on a stage, fed with random rows."""

    def __init__(self, stage: StageForward, seq_id: int) -> None:
        self.sequence: SequenceCache = stage.new_sequence(Admit(seq_id, 32_768, 1))
        self.seq_id = seq_id
        self.window = 0

    def segment(self, width: int, *, stays_open: bool = False) -> Segment:
        position = self.sequence.stack.length
        self.window += 1
        return Segment(self.seq_id, self.window, position, (1,) * width, open=stays_open)


def rows_of(width: int, seed: int) -> mx.array:
    hidden = wide_config(EIGHTHS, LAYERS).hidden_size
    return mx.random.normal((width, hidden), key=mx.random.key(seed)).astype(mx.bfloat16)


@pytest.fixture(scope="module")
def stage() -> StageForward:
    return StageForward(loaded(), KVFormat())


def test_the_stage_agrees_with_its_reference(stage: StageForward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed layers compute what mlx-lm's do: a long prompt, then windows of 1 to 5 rows."""
    monkeypatch.setattr(packing.Packer, "works", lambda packer: False)
    reference = StageForward(loaded(), KVFormat())
    assert stage.variants.summary == f"{LAYERS} packed"
    packed, plain = Text(stage, 0), Text(reference, 0)
    for width in (130, 1, 2, 5, 1):
        x = rows_of(width, width)
        found = stage.forward(x, [(packed.sequence, packed.segment(width))])
        expected = reference.forward(x, [(plain.sequence, plain.segment(width))])
        assert error_of(found, expected) < TOLERANCE, width


def test_company_changes_no_bit(stage: StageForward) -> None:
    """Windows of ten sequences at once, of mixed widths, beside a long prompt: each row is what it is alone."""
    widths = (1, 3, 1, 1, 5, 2, 1, 1, 4, 1)
    together = [Text(stage, i) for i in range(10)]
    alone = [Text(stage, i) for i in range(10)]
    for i, (a, b) in enumerate(zip(together, alone, strict=True)):
        for text in (a, b):
            stage.forward(rows_of(20, i), [(text.sequence, text.segment(20))])
    for turn in range(3):
        x = [rows_of(width, 100 * turn + i) for i, width in enumerate(widths)]
        runs = [(t.sequence, t.segment(w, stays_open=True)) for t, w in zip(together, widths, strict=True)]
        prompt = Text(stage, 99)
        chunk = (prompt.sequence, prompt.segment(120))
        found = stage.forward(mx.concatenate([*x, rows_of(120, 7)]), [*runs, chunk])
        start = 0
        for i, (text, width) in enumerate(zip(alone, widths, strict=True)):
            run = (text.sequence, text.segment(width, stays_open=True))
            expected = stage.forward(x[i], [run])
            assert same(found[start : start + width], expected), (turn, i)
            start += width
        for texts in (together, alone):
            for text, width in zip(texts, widths, strict=True):
                kept = 1 + (text.seq_id + turn) % width
                text.sequence.commit_window(text.window, kept, in_header=True)


def test_a_window_is_its_tokens_one_by_one(stage: StageForward) -> None:
    """A window of 5 rows gives, bit for bit, the rows of 5 windows of one."""
    wide, narrow = Text(stage, 0), Text(stage, 1)
    for text in (wide, narrow):
        stage.forward(rows_of(10, 1), [(text.sequence, text.segment(10))])
    x = rows_of(5, 2)
    found = stage.forward(x, [(wide.sequence, wide.segment(5, stays_open=True))])
    steps = []
    for i in range(5):
        run = (narrow.sequence, narrow.segment(1, stays_open=True))
        steps.append(stage.forward(x[i : i + 1], [run]))
    assert same(found, mx.concatenate(steps))


@pytest.fixture
def attention() -> PackedAttentionLayer:
    """Return a layer of random weights."""
    mx.random.seed(5)
    layer = StageForward(random_stage(wide_config(EIGHTHS, 4)), KVFormat()).modules.layers[3]
    assert isinstance(layer, PackedAttentionLayer)
    return layer


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 5000])
def test_few_rows_attend_as_many_do(attention: PackedAttentionLayer, length: int) -> None:
    """Rows of windows give what MLX's own attention gives, at any length."""
    x = mx.random.normal((length + 4, attention.norm.weight.shape[0])).astype(mx.bfloat16)
    cache, whole = (attention.new_cache(KVFormat()) for _ in range(2))
    attention.forward(x[:length], [cache], [length])
    found = attention.forward(x[length:], [cache], [4])
    rows = mx.concatenate([x, mx.zeros((200, x.shape[1]), x.dtype)])  # more than the kernels take
    expected = attention.forward(rows, [whole], [rows.shape[0]])[length : length + 4]
    assert error_of(found - x[length:], expected - x[length:]) < TOLERANCE


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("sequences", [1, 9])
def test_a_row_does_not_see_a_hole(attention: PackedAttentionLayer, count: int, sequences: int) -> None:
    """A row behind rejected rows has the place and the result of one behind the accepted rows."""
    for found, expected in rows_behind_a_hole(attention, count, sequences):
        assert error_of(found, expected) < TOLERANCE / 4


def test_steps_of_one_graph_are_steps_one_by_one(attention: PackedAttentionLayer) -> None:
    """Steps see the rows before them within one graph, also where the cache grows between them."""
    x = mx.random.normal((262, attention.norm.weight.shape[0])).astype(mx.bfloat16)
    together, alone = (attention.new_cache(KVFormat()) for _ in range(2))
    outputs = [attention.forward(x[:250], [cache], [250]) for cache in (together, alone)]
    mx.eval(outputs)
    found = [attention.forward(x[i : i + 1], [together], [1]) for i in range(250, 262)]
    expected = []
    for i in range(250, 262):
        expected.append(attention.forward(x[i : i + 1], [alone], [1]))
        mx.eval(expected[-1])
    assert same(found[-1], expected[-1])  # alone, so that nothing else asks for the rows before it
    assert same(mx.concatenate(found), mx.concatenate(expected))


@pytest.mark.parametrize("kind", ["plain", "open", "prefix", "unfinished"])
def test_a_step_copies_no_cache(attention: PackedAttentionLayer, kind: str) -> None:
    """The memory of a step stays far below that of the cache, whatever refers to the cache."""
    length, turns, width = 16_200, 8, 3 if kind == "open" else 1
    x = mx.random.normal((length, attention.norm.weight.shape[0])).astype(mx.bfloat16)
    cache = attention.new_cache(KVFormat())
    mx.eval(attention.forward(x, [cache], [length]), cache.arrays())
    held = [cache.copy()] if kind == "prefix" else []
    mx.eval([copied.arrays() for copied in held], x)
    peaks = []
    for _ in range(turns):
        read = cache.keys if kind == "unfinished" else None
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(attention.forward(x[:width], [cache], [width]))
        peaks.append(mx.get_peak_memory() - before)
        if kind == "open":
            cache.trim(2)
        del read
    # A copy of the keys alone has half of these bytes. Three rows need .3 of them for partial sums.
    assert statistics.median(peaks) < cache.nbytes / 2.5, (peaks, cache.nbytes)


def test_a_step_after_a_long_text_takes_as_long(stage: StageForward) -> None:
    """A step reads the cache of a long text and does not copy it, which would take 20 times as long as reading it."""
    medians = []
    for length in (2_048, 30_208):
        text, times = Text(stage, length), list[float]()
        for _ in range(0, length, 1_024):
            mx.eval(stage.forward(rows_of(1_024, 1), [(text.sequence, text.segment(1_024))]))
        for _ in range(40):
            x = rows_of(1, 2)
            mx.eval(x)
            started = time.perf_counter()
            mx.eval(stage.forward(x, [(text.sequence, text.segment(1))]))
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times[10:]))
    assert medians[1] < 1.3 * medians[0]


def test_a_kernel_that_does_not_compile_leaves_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stage on a machine that compiles no kernels keeps mlx-lm's layers, and says so once."""
    broken = CudaKernel("broken", ["rows"], ["out"], "this is no CUDA;")

    def run(x: mx.array, *_: object) -> mx.array:
        return broken([x], blocks=(1, 1, 1), template=[], shapes=[(1,)], dtypes=[mx.float32])[0]

    monkeypatch.setattr(packing, "multiply_rows", run)
    stage = StageForward(loaded(), KVFormat())
    assert stage.modules.layers[0].kind == "reference"
    text = Text(stage, 0)
    mx.eval(stage.forward(rows_of(2, 1), [(text.sequence, text.segment(2))]))
    assert len([r for r in caplog.records if "kernel unavailable" in r.message]) == 1


PROCESS = """
import hashlib, sys, time
from pathlib import Path
import mlx.core as mx
import numpy as np
from mtp.layers.cuda.dense_rows import multiply_dense_rows
from mtp.layers.kernel_files import FILES

if sys.argv[1]:
    FILES.open(Path(sys.argv[1]))
x, w = (mx.random.normal((rows, 1024), key=mx.random.key(rows)).astype(mx.bfloat16) for rows in (5, 512))
mx.eval(x, w)
started = time.monotonic()
y = multiply_dense_rows(x, w)
mx.eval(y)
seconds = time.monotonic() - started
print(hashlib.sha256(np.array(y.view(mx.uint16)).tobytes()).hexdigest(), FILES.compiled, FILES.found, seconds)
"""


def test_a_process_finds_the_kernels_of_another_one(tmp_path: Path) -> None:
    """MLX loads the stored kernel, which has the bits of the kernel that MLX compiles, and compiles nothing."""

    def run(folder: str) -> tuple[str, str, str, float]:
        command = [sys.executable, "-c", PROCESS, folder]
        environment = {**os.environ, PLACE: "" if folder else str(tmp_path / "mlx")}
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
        bits, compiled, stored, seconds = found.stdout.split()
        return bits, compiled, stored, float(seconds)

    by_mlx, first, second = run(""), run(str(tmp_path)), run(str(tmp_path))
    assert first[:3] == (by_mlx[0], "1", "0")
    assert second[:3] == (by_mlx[0], "0", "1")
    assert second[3] < 0.3 < by_mlx[3], "MLX compiles for more than a second"
    (file,) = tmp_path.rglob("custom_kernel_*.ptx")
    assert file.with_suffix(".txt").exists()


@pytest.mark.slow
def test_a_process_compiles_a_module_that_mlx_finds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The product that stands for a module needs this one alone, and MLX keeps it under the name that is expected."""
    caplog.set_level(logging.INFO)
    form = Format(4, 64, "affine")
    products = [Product("qmm_sm80_tn", "bfloat16", 16, form), Product("qmm_naive_tt_aligned", "bfloat16", 64, form)]
    compile_missing(tmp_path, products)
    assert [r.levelname for r in caplog.records] == ["INFO"] * 2, caplog.text
    assert {file.stem for file in tmp_path.glob("*.ptx")} == {product.module for product in products}
    assert len(list(tmp_path.glob("*.cu"))) == len(list(tmp_path.glob("*.txt"))) == 2
