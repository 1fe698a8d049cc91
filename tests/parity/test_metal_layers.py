"""The layers for Apple GPUs on a CPU, against those of mlx-lm's modules."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.flash_next.layers import SparseMixer
from mtp.layers import gdn_windows, kv_cache, linear, window_attention
from mtp.layers.fused import attention, fuse
from mtp.layers.gdn_windows import WindowMixer
from mtp.layers.layer import KernelTrial, KVFormat, Mixer
from mtp.layers.prepare_rows import AttentionShape
from mtp.layers.reference.gdn import GatedDelta
from mtp.layers.source_kernel import MetalKernel
from proto.frame import Admit, Segment
from proto.images import ImageSpan
from proto.kernels import Kernels
from proto.span import Span
from tests.bench.dialled_model import ModelShape, write_dialled_model
from tests.conftest import Checkpoints
from tests.support.checkpoints import checkpoints as written
from tests.support.checkpoints.flash_next import reference_model, text_config, write_flash_next
from tests.support.metal.metal_path import metal_choices, metal_path
from tests.support.metal.runner import reason_not_to_run, runs
from tests.support.stages import reference_kernels, row_kernels
from tests.support.stages.doubled import Doubled
from worker.cache.sequence_cache import SequenceCache
from worker.model import layer_variants
from worker.model.layer_variants import KernelChoice, read_trials
from worker.model.loader import load_stage
from worker.model.stage import StageForward

pytestmark = pytest.mark.skipif(reason_not_to_run() is not None, reason=reason_not_to_run() or "Metal kernels run")


@pytest.fixture(autouse=True)
def heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write checkpoints with heads of 128 and 256, as published models have."""
    monkeypatch.setattr(written, "GDN_DIM", 128)
    monkeypatch.setattr(written, "HEAD_DIM", 256)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Run what a Mac would, with real choices of kernels, and yield the folder that keeps them."""
    monkeypatch.setenv("MTP_STATE_DIR", str(tmp_path))
    with metal_path() as patch:
        patch.setattr(layer_variants, "KernelChoice", KernelChoice)
        yield tmp_path


FOUR_BITS = {"layout": "mlx", "quantize": 4, "hidden": 128}
EVERY = {"prepared": 1, "window": 3}
FORMS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "4 bits": (FOUR_BITS, EVERY),
    "4 bits in bfloat16": (FOUR_BITS | {"dtype": mx.bfloat16}, EVERY),
    "8 bits": (FOUR_BITS | {"quantize": 8}, EVERY),
    "bfloat16": ({"dtype": mx.bfloat16}, EVERY),
    "float16": ({"dtype": mx.float16}, EVERY),
    "float32": ({}, EVERY),
    "a part unquantized": (FOUR_BITS | {"overrides": True}, {"reference": 1, "window": 3}),
    "experts": (FOUR_BITS | {"moe": True}, EVERY),
    "Qwen3-Next": ({"moe": True, "qwen3_next": True}, EVERY),
    "small heads": ({"GDN_DIM": 32, "HEAD_DIM": 32}, {"fused": 4}),
}
"""Checkpoints of four layers, and the number of layers of each kind on a Mac."""

WIDTHS = (6, 3, 1, 4)
"""Tokens of a prompt and of windows."""


def stage_of(path: Path, kernels: Kernels = Kernels.own, state: Path | None = None) -> StageForward:
    modules = load_stage(Checkpoint.open(path), Span(0, 4), first=True, last=True, dtype=None, with_head=False)
    return StageForward(modules, KVFormat(), kernels=kernels, state=state)


def written_as(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, form: str) -> Path:
    """Write the checkpoint of a form."""
    options = dict(FORMS[form][0])
    for name in {"GDN_DIM", "HEAD_DIM"} & set(options):
        monkeypatch.setattr(written, name, options.pop(name))
    return checkpoints(layers=4, seed=len(form), **options)


def outputs(stage: StageForward, widths: Sequence[int] = WIDTHS, images: int = 1) -> mx.array:
    """Return the hidden vectors of two sequences that run together, one token apart, with a rejection in each.

    The second one has the rows of `images` images in its prompt.
    """
    sequences: list[SequenceCache] = [
        stage.new_sequence(Admit(i, 64, 6, images=(ImageSpan(1, 2, 2),) * images * i)) for i in range(2)
    ]
    found = []
    for number, width in enumerate(widths):
        runs = []
        for i, sequence in enumerate(sequences):
            own = tuple(range(10 * number + i, 10 * number + i + width))
            place = sequence.stack.length
            runs.append((sequence, Segment(i, number, place, own, open=number > 0)))
        tokens = mx.array([t for _, segment in runs for t in segment.tokens])
        if stage.token_layers:
            stage.announce_tokens(tokens, runs)
        found.append(stage.forward(stage.embed(tokens), runs))
        for i, (sequence, segment) in enumerate(runs):
            if segment.open:
                sequence.commit_window(number, max(1, width - i - 1), in_header=True)
    return mx.concatenate(found).astype(mx.float32)


def unchanged(*_: Any, **__: Any) -> SimpleNamespace:
    """Return a fuser that replaces nothing."""
    return SimpleNamespace(layer=lambda x: x, mixer=lambda x: x, picks=lambda *_: False)


def shared_outputs(stage: StageForward) -> tuple[mx.array, int]:
    """Return the outputs of a member of two whose parts are equal, and the number of its sums."""
    communicator = Doubled()
    stage.modules.communicator = communicator
    stage.modules.share()
    return outputs(stage), communicator.sums


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[pytest.mark.thorough] if form in ("8 bits", "float16") else []) for form in FORMS],
)
def test_layers_compute_what_the_reference_does(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Prompts, windows and rejections give the reference's hidden vectors, up to rounding, in every format."""
    path, kinds = written_as(checkpoints, monkeypatch, form), FORMS[form][1]
    monkeypatch.setattr(window_attention, "FROM_KEYS", 0)
    with metal_path():
        stage = stage_of(path)
        expected_kinds = ", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))
        assert stage.variants.summary.partition(";")[0] == expected_kinds
        launched = runs["window_attention_plain"]
        found = outputs(stage)
        assert (runs["window_attention_plain"] > launched) is ("prepared" in kinds)
        monkeypatch.setattr(layer_variants, "Fuser", unchanged)
        expected = outputs(stage_of(path))
    # In bfloat16 the reference itself is 9 % away from the same layers in fp32.
    limit = 1e-5 if stage.dtype == mx.float32 else 0.1
    assert (mx.abs(found - expected).mean() <= limit * mx.abs(expected).mean()).item()


@pytest.mark.slow
@pytest.mark.usefixtures("trials")
def test_windows_over_quantized_keys_have_a_kernel(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for windows is tried and used in the format of the stored keys and values."""
    monkeypatch.setattr(window_attention, "FROM_KEYS", 0)
    modules = load_stage(
        Checkpoint.open(checkpoints(layers=4)), Span(0, 4), first=True, last=True, dtype=None, with_head=False
    )
    stage = StageForward(modules, KVFormat.of(256, 4), kernels=Kernels.own)
    launched = runs["window_attention_quantized"]
    assert launched, stage.variants.summary
    assert mx.isfinite(outputs(stage, (2, 3), 0)).all()
    assert runs["window_attention_quantized"] > launched


@pytest.mark.parametrize(
    ("gate", "dim"),
    [
        ("silu", 128),
        ("sigmoid", 32),
        pytest.param("sigmoid", 128, marks=pytest.mark.thorough),
        pytest.param("silu", 32, marks=pytest.mark.thorough),
    ],
)
def test_flash_next_computes_what_the_reference_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: str, dim: int
) -> None:
    """A GatedDeltaNet within residual streams runs in the window kernel, with either gate of its output."""
    pytest.importorskip("torch", reason="transformers needs torch")
    heads = {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    text = text_config(4, **heads, output_gate_type=gate)
    path = write_flash_next(tmp_path / "model", reference_model(text), text)
    with metal_path():
        stage = stage_of(path)
        mixers = [type(layer.mixer) for layer in stage.modules.layers]
        assert mixers == [WindowMixer if dim == 128 else GatedDelta] * 3 + [SparseMixer]
        found = outputs(stage)
        monkeypatch.setattr(layer_variants, "Fuser", unchanged)
        expected = outputs(stage_of(path))
    assert (mx.abs(found - expected).mean() <= 1e-5 * mx.abs(expected).mean()).item()


@pytest.mark.parametrize("bound", [-5.0, None])
def test_delta_attention_computes_what_its_operations_do(bound: float | None) -> None:
    """The products, the window kernel and the order of its inputs, for a prompt, windows and a rejection."""
    modules, x = row_kernels.delta_mixer(mx.float32, bound), mx.random.normal((12, row_kernels.DELTA_HIDDEN))

    def results(mixer: Mixer) -> mx.array:
        cache, found = mixer.new_cache(KVFormat()), []
        for first, end in ((0, 5), (5, 6), (6, 9)):
            found.append(mixer.mix(x[first:end], [cache], [end - first], [first > 0]))
        cache.apply_commit(1, 1, 2)
        return mx.concatenate([*found, mixer.mix(x[9:], [cache], [3], [False])])

    expected = results(modules)
    with metal_path():
        kernels = fuse.Fuser(row_kernels.DELTA_HIDDEN, mx.float32, lambda *_: True).mixer(modules)
        assert isinstance(kernels, WindowMixer)
        found = results(kernels)
    assert row_kernels.error(found, expected) < 1e-4


@pytest.mark.parametrize("family", [pytest.param("Flash-Next", marks=pytest.mark.slow), "GLM"])
def test_few_rows_of_4_bits_have_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A quantized model with residual streams computes with the kernels of few rows what MLX's operations compute."""
    if family == "GLM":
        small = ModelShape(256, 4, 2, 2, 2, 128, vocab=4096, experts=32, per_token=4, is_glm=True)
        kernels, options = ["gated_delta_window", "stream_spread", "stream_read"], {"images": 0}
    else:
        small = ModelShape(256, 4, 4, 2, 16, 128, vocab=4096, experts=32, per_token=4, ngram_rows=400)
        kernels, options = ["stream_norm"], {}
    write_dialled_model(tmp_path / "model", small, bits=4)
    with metal_path():
        stage = stage_of(tmp_path / "model")
        runs.clear()  # of the trials
        found = outputs(stage, (6, 2), **options)
        assert all(runs[kernel] for kernel in ["expert_down", *kernels])
        monkeypatch.setattr(layer_variants, "Fuser", unchanged)
        expected = outputs(stage_of(tmp_path / "model"), (6, 2), **options)
    assert (mx.abs(found - expected).mean() <= 0.1 * mx.abs(expected).mean()).item()


@pytest.mark.parametrize("form", list(FORMS)[:3])
def test_the_parts_of_the_members_are_added(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A layer of a group adds the parts of all members after both of its halves, as the reference does."""
    path = written_as(checkpoints, monkeypatch, form)
    with metal_path():
        found, once = shared_outputs(stage_of(path))
        monkeypatch.setattr(layer_variants, "Fuser", unchanged)
        expected, again = shared_outputs(stage_of(path))
        alone = outputs(stage_of(path))
    # Compiled bodies ask for their sums once for each number of rows.
    assert 8 <= once <= again == 8 * len(WIDTHS)
    assert (mx.abs(found - expected).mean() <= 0.1 * mx.abs(expected).mean()).item()
    assert (mx.abs(alone - expected).mean() > 0.2 * mx.abs(expected).mean()).item()


def test_an_open_window_keeps_its_own_rows_alone(checkpoints: Checkpoints) -> None:
    """A window that runs beside a prompt does not hold the prompt's rows in memory, and is cut as it is alone."""
    found = []
    with metal_path():
        stage = stage_of(checkpoints(layers=4, seed=10))
        for chunk in (20, 0):
            sequences = [stage.new_sequence(Admit(i, 64, 20)) for i in range(3)]
            for i in (0, 2):
                run = (sequences[i], Segment(i, 0, 0, (1, 2, 3 + i)))
                stage.forward(stage.embed(mx.array(run[1].tokens)), [run])
            runs = [(sequences[0], Segment(0, 1, 3, (4, 5, 6), open=True))]
            if chunk:
                runs.append((sequences[1], Segment(1, 0, 0, tuple(range(chunk)))))
            runs.append((sequences[2], Segment(2, 1, 3, (7, 8), open=True)))
            tokens = [t for _, segment in runs for t in segment.tokens]
            stage.forward(stage.embed(mx.array(tokens)), runs)
            for i, accepted in ((0, 2), (2, 1)):
                cache: Any = sequences[i].layers[0]
                assert cache.point.rows.shape[0] == 5
                sequences[i].commit_window(1, accepted, in_header=True)
                found.append(cache.copy().arrays())
    assert all(map(mx.array_equal, found[0] + found[1], found[2] + found[3]))


def _broken(*_: Any) -> Any:
    """Run a kernel that does not compile."""
    kernel = MetalKernel("broken", ["rows"], ["out"], "this is no Metal;")
    row = mx.zeros((1,))
    return kernel([row], blocks=(1, 1, 1), template=[], shapes=[(1,)], dtypes=[mx.float32])


def _mutated(run: Any, mutation: str) -> Any:
    """Return `run` with a mutation of the kernel that it launches, if it launches one."""

    def changed(*arguments: Any) -> Any:
        if arguments[-1] is False:
            return run(*arguments)
        if mutation == "does not compile":
            return _broken()
        if mutation == "slow":
            time.sleep(SLOW_SECONDS)
        found = run(*arguments)
        if mutation == "slow":
            return found
        if isinstance(found, mx.array):
            return 1.1 * found
        # The outputs of windows, keys and values, or norms: a tenth too large.
        place = 0 if len(found) == 3 else 1
        return tuple(1.1 * array if i == place else array for i, array in enumerate(found))

    return changed


SLOW_SECONDS = 0.05

PATCHED = {
    "gated_delta_window": [(fuse, "gated_delta_window")],
    "attention_prepare": [(attention, "prepare_rows")],
    "residual_norm": [(linear, "add_norm")],
    "window_attention_8": [(kv_cache, "window_attention")],
}
"""The functions that launch each kernel. The last argument of `add_norm` says whether it does."""


@pytest.mark.parametrize(
    ("mutation", "mode", "reason"),
    [
        ("does not compile", Kernels.own, "expected"),
        ("wrong", Kernels.own, "differ by"),
        ("slow", Kernels.auto, "us a step"),
        ("slow", Kernels.own, "us a step"),
    ],
)
@pytest.mark.parametrize("kernel", PATCHED)
@pytest.mark.usefixtures("trials")
def test_a_kernel_is_used_if_it_is_right_and_not_slower(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    mutation: str,
    mode: Kernels,
    reason: str,
) -> None:
    """A kernel that fails, differs or is slower costs nothing but its trial, and --kernels overrules the times."""
    for module, name in PATCHED[kernel]:
        monkeypatch.setattr(module, name, _mutated(getattr(module, name), mutation))
    path = checkpoints(layers=4, seed=9)
    _kinds, *found = stage_of(path, mode).variants.summary.split("; ")
    results = dict(one.split(": ", 1) for one in found)
    assert reason in results.pop(kernel)
    used = "MLX" if mode is Kernels.auto or mutation != "slow" else "own"
    assert f"{used} used" in dict(one.split(": ", 1) for one in found)[kernel]
    if mode is Kernels.own:
        assert all(result.endswith("own used") for result in results.values())


def test_kernels_mlx_tries_nothing(checkpoints: Checkpoints, trials: Path) -> None:
    """With --kernels mlx no kernel runs."""
    summary = stage_of(checkpoints(layers=4, seed=9), Kernels.mlx).variants.summary
    assert summary == "4 fused"
    assert not list(trials.iterdir())


def test_a_trial_is_kept_for_the_next_start(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, trials: Path
) -> None:
    """The next start of the same program on the same machine tries nothing, and another kernel is tried."""
    path = checkpoints(layers=4, seed=9)
    tried: list[str] = []

    def try_layer(own: Any, *_: Any) -> KernelTrial:
        tried.append(getattr(own, "kind", "a part"))
        return KernelTrial(1e-6, 2e-6)

    monkeypatch.setattr(fuse, "try_layer", try_layer)
    summaries = [stage_of(path, Kernels.auto).variants.summary for _ in range(2)]
    assert tried == ["window", "window", "prepared", "a part"]  # one of them for norms
    times = "1 us a step, MLX's operations 2 us, own used"
    names = ("gated_delta_window", "residual_norm", "attention_prepare", "window_attention_8")
    results = "; ".join(f"{name}: {times}" for name in names)
    assert set(summaries) == {f"1 prepared, 3 window; {results}"}
    monkeypatch.setattr(gdn_windows, "SOURCE", "another text")
    stage_of(path, Kernels.auto)
    assert len(tried) == 5
    monkeypatch.setattr(layer_variants, "version", lambda _: "next")
    stage_of(path, Kernels.auto)
    assert len(tried) == 9, "an update of this program tries again"
    (trials / "kernels.json").write_text("{damaged")
    stage_of(path, Kernels.auto)
    assert len(tried) == 13
    assert len(read_trials(trials / "kernels.json")) == 4
    other = trials / "given by --state-dir"
    stage = stage_of(path, Kernels.auto, other)
    assert len(tried) == 17 and len(read_trials(other / "kernels.json")) == 4
    assert stage.variants.arithmetic == f"prepared, window, {', '.join(names)}"
    assert stage_of(path, Kernels.mlx).variants.arithmetic != stage.variants.arithmetic


@dataclass
class TimedLayer:
    """A layer without arithmetic, whose steps take the times of a machine that is busy at first."""

    clock: SimpleNamespace
    seconds: float
    slow: int = 0
    """Steps at the start that take twenty times as long."""

    def new_cache(self, kv_format: KVFormat) -> None:
        """Return no cache."""

    def forward(self, x: mx.array, *_: Any) -> mx.array:
        """Let the time of a step pass."""
        self.slow -= 1
        self.clock.now += self.seconds * (20 if self.slow >= 0 else 1)
        return x


@pytest.mark.parametrize("own", [0.9e-4, 1.1e-4])
@pytest.mark.parametrize("slow", [0, 100])
def test_a_busy_start_decides_no_trial(monkeypatch: pytest.MonkeyPatch, own: float, slow: int) -> None:
    """The sides take turns, and go on while their difference is within noise. Both sides see the same rounds."""
    clock = SimpleNamespace(now=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr(fuse, "time", times)
    layers: Any = [TimedLayer(clock, own, slow), TimedLayer(clock, 1e-4)]
    assert fuse.try_layer(layers[0], layers[1], 8, mx.float32).is_won is (own < 1e-4)
    assert clock.now < 1.1 * fuse.TRIAL_SECONDS


def operations(name: str, *_: Any, **__: Any) -> Any:
    """Return MLX's operations for a kernel of attention layers. Those of another kernel are zeros."""

    def call(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        if name == "attention_prepare":
            x, places, *constants = inputs
            (rows, heads, dim), (_two, kv, *_rest) = output_shapes
            q, kv_rows, gate = mx.split(x, [heads * dim, (heads + 2 * kv) * dim], axis=1)
            both = mx.stack([t.reshape(rows, heads, dim) for t in (q, gate)], axis=2)
            there = mx.concatenate([both.reshape(rows, -1), kv_rows], axis=1)
            shape = AttentionShape(heads, kv, 2 * constants[2].size)
            return [*reference_kernels.prepare_rows(shape, there, places, tuple(constants))]
        if name == "stream_norm":
            x, y, _, weight, eps = inputs
            total = x + y
            scale = mx.rsqrt((total * total).mean(axis=-1, keepdims=True) + eps)
            return [total, total * scale * weight]
        return [mx.zeros(s, t) for s, t in zip(output_shapes, output_dtypes, strict=True)]

    return call


def test_compiled_bodies_compute_what_the_kernels_do(checkpoints: Checkpoints) -> None:
    """Two layers of one shape share a trace and keep their own weights, over several steps and widths.

    A trace cannot hold a kernel that the CPU runs, so operations stand for it there.
    """
    path = checkpoints(layers=8, seed=11)
    steps = [mx.random.normal((rows, 64)) for rows in (4, 2, 2, 4)]

    def run() -> mx.array:
        modules = load_stage(Checkpoint.open(path), Span(0, 8), first=True, last=True, dtype=None, with_head=False)
        fuser: Any = fuse.Fuser(64, mx.float32, lambda *_: True)
        layers = [fuser.layer(modules.layers[i]) for i in (3, 7)]
        caches = [[layer.new_cache(KVFormat()) for _ in range(2)] for layer in layers]
        found = []
        for x in steps:
            for layer, held in zip(layers, caches, strict=True):
                assert layer.kind == "prepared"
                x = layer.forward(x, held, [x.shape[0] // 2] * 2)
            found.append(x)
        mx.eval(found)
        return mx.concatenate(found)

    with metal_path():
        expected = run()
    with metal_choices(operations):
        found = run()
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4)
