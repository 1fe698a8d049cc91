"""The report of a window's costs: the shapes of models, the times, their bounds, and kernels that fail."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers import few_rows
from mtp.layers.few_rows import Step, Weights
from mtp.layers.linear import Format
from tests.conftest import Checkpoints
from tests.support.checkpoints.mlx_models import write_mlx_model
from tests.support.checkpoints.published_headers import read_published
from tests.support.metal import runner
from tests.support.metal.metal_path import metal_choices
from worker.engine import cost_report
from worker.engine.cost_report import CostReport, LinearShape, _add_product, _race, model_shapes

BUILTIN = Checkpoint.open(checkpoint_dir())
FOUR_BITS = Format(4, 64, "affine")
SMALL = LinearShape(64, 128, FOUR_BITS)


def measured(shape: LinearShape, **bounds: Any) -> dict[str, Any]:
    """Return the values of one product."""
    return CostReport(BUILTIN, large=[shape], **bounds).parts[f"product {shape}"]()[1]


def test_the_report_has_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch, the memory, both contexts, and the products of the model and the large ones have all their times."""
    monkeypatch.setattr(cost_report, "CHAIN_SECONDS", 1e-4)
    monkeypatch.setattr(cost_report, "CONTEXTS", (256, 1024))
    parts = CostReport(BUILTIN, large=[SMALL]).parts
    costs = {name: measure() for name, measure in parts.items()}
    machine = costs.pop("launch and memory")[1]
    assert machine["bytes_per_second"] > 1e8
    assert 0 < machine["ms"]["launch"][0] < 10
    assert [name for name in costs if name.startswith("attention")] == [f"attention to {n} tokens" for n in (256, 1024)]
    assert {"product 4096 x 256, not quantized", f"product {SMALL}"} <= costs.keys()
    for figure, values, problem in costs.values():
        assert not problem
        assert list(values["rows"]) in ([1, 4, 8], [1, 2, 4, 5, 8, 12, 16])
        for times in values["ms"].values():
            assert len(times) == len(values["rows"])
            assert all(ms > 0 for ms in times), figure
    assert costs["attention to 256 tokens"][1].items() >= {"heads": 4, "kv_heads": 2, "head_dim": 64}.items()


def test_the_times_are_those_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times the weights take several times as long."""
    monkeypatch.setattr(cost_report, "ROWS", (1,))
    small, large = (measured(LinearShape(rows, 1024, FOUR_BITS))["ms"]["MLX"][0] for rows in (256, 4096))
    assert 4 * small < large


def test_a_round_trip_hides_in_a_chain_and_copies_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Metal's .25 ms an evaluation, the time of a step is within 3 %. Each side uses the copies in turn.

    A compiler that takes longer than the time for all turns does not change it.
    """
    clock, used = [0.0, 1.0], dict[str, list[int]](first=[], second=[])

    def step(name: str, seconds: float) -> Step:
        def run(x: mx.array, weights: Weights) -> mx.array:
            clock[1] += seconds
            used[name].append(weights[0].size)
            return x

        return run

    def evaluate(_: mx.array) -> None:
        clock[:] = clock[0] + 0.25e-3 + clock[1], 0.0

    monkeypatch.setattr(mx, "eval", evaluate)
    for module in (cost_report, few_rows):
        fake = SimpleNamespace(perf_counter=lambda: clock[0], monotonic=lambda: clock[0])
        monkeypatch.setattr(module, "time", fake)
    copies, seconds = [(mx.ones((size,)),) for size in (1, 2, 3)], {"first": 900e-6, "second": 30e-6}
    found = _race({name: step(name, took) for name, took in seconds.items()}, mx.ones((1,)), copies, 0.5, {})
    assert found == {name: pytest.approx(took, rel=0.03) for name, took in seconds.items()}
    assert all(min(Counter(sizes)[size] for size in (1, 2, 3)) > len(sizes) // 4 for sizes in used.values())


def test_a_slow_machine_ends_in_time() -> None:
    """Without time, the first product of a format is timed once, and a larger one is not timed."""
    shapes, began = [LinearShape(rows, 4096, FOUR_BITS) for rows in (8192, 65536)], time.monotonic()
    report = CostReport(BUILTIN, 0.0, shapes)
    small, large = (report.parts[f"product {shape}"]()[1]["ms"]["MLX"] for shape in shapes)
    assert small[0] > 0
    assert small[1:] == [None] * 6
    assert large == [None] * 7
    assert time.monotonic() - began < 5


def test_shapes_are_those_of_the_stored_layers(checkpoints: Checkpoints) -> None:
    """Each linear layer has the format in which it is stored, and a tied embedding counts as a product.

    Experts, of which a row needs few, are not among them.
    """
    tied = [str(shape) for shape in model_shapes(BUILTIN)]
    assert tied[:3] == ["576 x 256, not quantized", "256 x 576, not quantized", "4096 x 256, not quantized"]
    path = checkpoints(moe=True, layout="mlx", quantize=4, overrides=True)
    config, bits = Checkpoint.open(path).config, Counter[int | None]()
    for shape in model_shapes(Checkpoint.open(path)):
        bits[shape.format.bits] += 1
        assert config.hidden_size in (shape.inputs, shape.outputs)
    assert bits.keys() == {None, 4, 8}


@pytest.mark.parametrize(("name", "kind"), [("mxfp4", Format(4, 32, "mxfp4")), ("nvfp4", Format(4, 16, "nvfp4"))])
def test_the_shapes_of_a_published_model(tmp_path: Path, name: str, kind: Format) -> None:
    """The headers of a published 27B give its products, in the format that the weights and the scales have."""
    checkpoint = Checkpoint.open(read_published()[f"mlx-qwen3.6-27b-{name}"].write(tmp_path / "m"))
    expected = {LinearShape(large.outputs, large.inputs, kind) for large in cost_report.LARGE}
    assert expected <= set(model_shapes(checkpoint)[: cost_report.MOST_PRODUCTS])


def test_a_model_of_mlx_lm_has_its_shapes_and_heads(tmp_path: Path) -> None:
    """A model that runs by mlx-lm's class has the shapes of its modules, and attention where it keeps heads."""
    checkpoint = Checkpoint.open(write_mlx_model("llama", tmp_path / "llama"))
    layer = checkpoint.config.backbone().layers[0].self_attn
    shapes = {(shape.outputs, shape.inputs) for shape in model_shapes(checkpoint)}
    assert {layer.q_proj.weight.shape, layer.k_proj.weight.shape, layer.o_proj.weight.shape} <= shapes
    values = CostReport(checkpoint, 0.0).parts["attention to 2048 tokens"]()[1]
    assert (values["heads"], values["kv_heads"]) == (layer.n_heads, layer.n_kv_heads)
    assert values["head_dim"] * layer.n_heads == layer.q_proj.weight.shape[0]
    latent = Checkpoint.open(write_mlx_model("deepseek_v3", tmp_path / "deepseek"))
    assert not [name for name in CostReport(latent).parts if name.startswith("attention")]


@pytest.mark.parametrize(
    "kind", [Format(), FOUR_BITS, Format(4, 16, "nvfp4"), Format(4, 32, "mxfp4"), Format(8, 32, "mxfp8")]
)
def test_rows_of_a_chain_stay(kind: Format) -> None:
    """A chain computes the product and leaves its rows as they are, so that no value overflows."""
    shape, x = LinearShape(1000, 128, kind), mx.ones((2, 128), mx.bfloat16)
    copies = shape.weights(mx.bfloat16)
    assert len(copies) == cost_report.MOST_COPIES
    product = kind.multiply(x, copies[1])
    assert product.shape == (2, 1000)
    assert mx.isfinite(product).all().item()
    assert mx.abs(product[:, 1:512]).max() > 0
    assert mx.array_equal(_add_product(kind.multiply, x, copies[1]), x)


def test_the_copies_of_large_weights_are_bounded() -> None:
    """All copies together have at most COPY_BYTES, or there is one."""
    large = LinearShape(65536, 2048, FOUR_BITS).weights(mx.bfloat16)
    assert 1 < len(large) < 8
    assert sum(part.nbytes for copy in large for part in copy) <= cost_report.COPY_BYTES


def failing(*_: Any, **__: Any) -> Any:
    """Represent a function of MLX whose kernels do not compile."""

    def call(**_: Any) -> list[mx.array]:
        raise RuntimeError("unable to build the library")

    return call


def test_a_mac_compares_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an Apple GPU this project's product has all its times too."""
    if reason := runner.reason_not_to_run():
        pytest.skip(reason)
    monkeypatch.setattr(cost_report, "ROUNDS", 0)
    monkeypatch.setattr(cost_report, "ROWS", (1, 8, 16))
    monkeypatch.setattr(cost_report, "MOST_STEPS", 1)
    before = runner.runs["few_rows"]
    with metal_choices(runner.metal_kernel):
        values = measured(SMALL)
    assert list(values["ms"]) == ["MLX", "own"]
    assert all(ms > 0 for times in values["ms"].values() for ms in times)
    assert runner.runs["few_rows"] - before >= 3


def test_a_kernel_that_does_not_compile_leaves_the_times_of_mlx() -> None:
    """The problem is in the report once, and the times of MLX are complete."""
    with metal_choices(failing):
        _, values, problem = CostReport(BUILTIN, large=[SMALL]).parts[f"product {SMALL}"]()
    assert problem == "own failed: unable to build the library"
    assert values["ms"]["own"] == [None] * 7
    assert all(ms > 0 for ms in values["ms"]["MLX"])
