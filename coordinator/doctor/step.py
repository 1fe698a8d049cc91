"""One plain step of a model on this machine, beside mlx-lm's: its kernels, the time to build it, and its whole time."""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from coordinator.doctor.checks import Finding, judged
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.layer import KVFormat
from proto.frame import Admit, Segment
from proto.span import Span
from worker.engine.hardware import release_weights
from worker.model.choice import write_trials
from worker.model.loader import load_stage
from worker.model.stage import Stage

VIEWS = set(
    "AsStrided Broadcast BroadcastAxes ExpandDims Flatten NumberOfElements Reshape Slice Split Squeeze StopGradient "
    "Transpose Unflatten View".split()
)
"""MLX's operations that launch nothing where their input lies row by row in memory."""

STEPS = 30
"""Measured steps. Their medians count."""

WARM_STEPS = 4


def kernels_of(arrays: Sequence[mx.array]) -> Counter[str]:
    """Return the kernels that compute lazy `arrays`, by operation. Fused operations and compiled functions are one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *arrays)
        text = path.read_text()
    names = re.findall(r'\{ \d+ \[label ="([^"]*)", shape=rectangle\]', text)
    return Counter(name for name in names if name not in VIEWS)


BuildStep = Callable[[], list[mx.array]]
"""A function that returns the lazy arrays of the next plain step of one sequence: hidden vectors and states."""


def stock_steps(checkpoint: Checkpoint) -> BuildStep:
    """Return steps of mlx-lm's own model."""
    loaded: Any = load_model(checkpoint.path)[0]
    cache: Any = make_prompt_cache(loaded)

    def build() -> list[mx.array]:
        x = loaded.language_model.model(mx.ones((1, 1), mx.uint32), cache=cache)
        arrays = (array for held in cache for array in held.state)
        return [x, *(array for array in arrays if isinstance(array, mx.array))]

    return build


def own_steps(checkpoint: Checkpoint) -> tuple[BuildStep, str]:
    """Return steps of a stage with all layers, and the variants of its layers with the trials of their kernels."""
    span = Span(0, checkpoint.config.num_layers)
    modules = load_stage(checkpoint, span, first=True, last=True, dtype=None, with_head=False)
    stage = Stage(modules, KVFormat())
    sequence = stage.new_sequence(Admit(0, 2 * (WARM_STEPS + STEPS), 1))
    numbers = itertools.count()

    def build() -> list[mx.array]:
        number = next(numbers)
        run = (sequence, Segment(0, number, number, (1,)))
        tokens = mx.ones((1,), mx.uint32)
        if stage.reads_tokens:
            stage.announce_tokens(tokens, [run])
        x = stage.forward(stage.embed(tokens), [run], lazily=True)
        return [x, *sequence.arrays()]

    return build, stage.variants.summary


@dataclass(frozen=True)
class StepFigures:
    """Kernels of a step, seconds in which Python builds it, and seconds until it is computed."""

    kernels: int
    build: float
    whole: float


def measure_steps(build: BuildStep) -> StepFigures:
    """Return the medians of STEPS steps."""
    built, whole, kernels = list[float](), list[float](), 0
    for number in range(WARM_STEPS + STEPS):
        started = time.perf_counter()
        arrays = build()
        moment = time.perf_counter()
        if number == WARM_STEPS - 1:
            kernels = kernels_of(arrays).total()
        mx.eval(arrays)
        if number >= WARM_STEPS:
            built.append(moment - started)
            whole.append(time.perf_counter() - started)
    return StepFigures(kernels, statistics.median(built), statistics.median(whole))


def forget_trials() -> None:
    """Forget the trials of kernels on this machine, so that the next stage tries all kernels."""
    write_trials({})


def check_step(checkpoint: Checkpoint) -> Finding:
    """Measure a plain step of this project and of mlx-lm."""
    stock = measure_steps(stock_steps(checkpoint))
    release_weights()
    build, layers = own_steps(checkpoint)
    own = measure_steps(build)
    del build
    release_weights()
    figure = (
        f"{own.kernels} kernels ({stock.kernels} in mlx-lm), built in {own.build * 1e3:.2f} ms "
        f"({stock.build * 1e3:.2f}), computed in {own.whole * 1e3:.2f} ms ({stock.whole * 1e3:.2f}). Layers: {layers}"
    )
    slower = own.whole > 1.1 * stock.whole
    advice = "mlx-lm's step is faster. Please report it with --full --json, and try --kernels mlx."
    values = {"this project": asdict(own), "mlx-lm": asdict(stock), "layers": layers}
    return judged("step", figure, advice if slower else "", values)
