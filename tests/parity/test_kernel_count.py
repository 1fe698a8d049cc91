"""The kernels of a layer on the Metal path, counted in the lazy graph."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.layer import KVFormat
from mtp.layers.source_kernel import MetalKernel
from mtp.layers.sparse_attention import IndexerArgs, SparseReads, sparse_attention
from proto.frame import Admit, Segment
from proto.kernels import Kernels
from proto.span import Span
from tests.bench.dialled_model import ModelShape, write_dialled_model
from tests.support.checkpoints import checkpoints
from tests.support.metal.metal_path import metal_choices
from tests.support.stages.doubled import Doubled
from worker.model import layer_variants
from worker.model.layer_variants import KernelChoice
from worker.model.loader import load_stage
from worker.model.stage import StageForward

VIEWS = set(
    "AsStrided Broadcast BroadcastAxes ExpandDims Flatten NumberOfElements Reshape Slice Split Squeeze StopGradient "
    "Transpose Unflatten View".split()
)
"""MLX's operations that launch nothing where their input lies row by row in memory."""

SHORT, LONG = 4, 8
"""Layers of two models. Their difference is the layers alone: three GDN layers and one of attention."""

CAPACITY = 2**20


def kernels_of(arrays: Sequence[mx.array]) -> Counter[str]:
    """Return the kernels that compute lazy `arrays`, by operation. Fused operations and compiled functions are one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *arrays)
        text = path.read_text()
    names = re.findall(r'\{ \d+ \[label ="([^"]*)", shape=rectangle\]', text)
    return Counter(name for name in names if name not in VIEWS)


class _EveryKernel(KernelChoice):
    """The choice of all kernels, because markers have no results that a trial could compare."""

    def choose(self, *_: object, **__: object) -> bool:
        """See `KernelChoice.choose`."""
        return True


@contextmanager
def counted_kernels() -> Iterator[None]:
    """Choose what a Mac would inside the block, with one marker for each kernel. Results have no meaning."""
    fast = {
        "rms_norm": lambda x, *rest, **_: _marked([x, *rest], (x.shape, x.dtype))[0],
        "rope": lambda x, *_, offset, **rest: _marked([x, offset], (x.shape, x.dtype))[0],
        "scaled_dot_product_attention": lambda q, k, v, *, mask=None, **_: _marked([q, k, v, mask], (q.shape, q.dtype))[
            0
        ],
    }
    with metal_choices(_marker_kernel) as patched:
        for name, marker in fast.items():
            patched.setattr(mx.fast, name, marker)
        patched.setattr(layer_variants, "KernelChoice", lambda _, file: _EveryKernel(Kernels.own, file))
        yield


def _marker_kernel(*_: Any, **__: Any) -> Callable[..., list[mx.array]]:
    def call(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **options: Any) -> list[mx.array]:
        return _marked(inputs, *zip(map(tuple, output_shapes), output_dtypes, strict=True))

    return call


def _marked(inputs: Sequence[Any], *outputs: tuple[tuple[int, ...], mx.Dtype]) -> list[mx.array]:
    """Return outputs of one operation that depends on all `inputs` that are arrays."""
    arrays = [x for x in inputs if isinstance(x, mx.array)]
    found: list[mx.array] = mx.depends([zeros(*output) for output in outputs], arrays)
    return found


@cache
def zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return zeros that are no operation of the graph."""
    found = mx.zeros(shape, dtype)
    mx.eval(found)
    return found


class StockSteps:
    """Steps of mlx-lm's own model."""

    def __init__(self, path: Path, count: int, width: int) -> None:
        loaded: Any = load_model(path)[0]
        self.model, self.cache = loaded.language_model.model, make_prompt_cache(loaded)
        self.tokens = mx.ones((count, width), mx.uint32)

    def build(self) -> list[mx.array]:
        """Return the lazy arrays of the next step: hidden vectors and states."""
        x = self.model(self.tokens, cache=self.cache)
        arrays = (array for held in self.cache for array in held.state)
        return [x, *(array for array in arrays if isinstance(array, mx.array))]


class OwnSteps:
    """Steps of a stage, whose windows are accepted whole."""

    def __init__(self, path: Path, count: int, width: int, communicator: Communicator = ALONE) -> None:
        checkpoint = Checkpoint.open(path)
        span = Span(0, checkpoint.config.num_layers)
        modules = load_stage(checkpoint, span, first=True, last=True, dtype=None, with_head=False)
        modules.communicator = communicator
        self.stage = StageForward(modules, KVFormat())
        self.sequences = [self.stage.new_sequence(Admit(i, CAPACITY, 1)) for i in range(count)]
        self.width, self.number = width, 0

    def build(self) -> list[mx.array]:
        """Return the lazy arrays of the next step: hidden vectors and states."""
        if self.number:
            for sequence in self.sequences:
                sequence.commit_window(self.number - 1, self.width, in_header=True)
        tokens = (1,) * self.width
        runs = [
            (sequence, Segment(i, self.number, self.number * self.width, tokens, open=True))
            for i, sequence in enumerate(self.sequences)
        ]
        self.number += 1
        words = mx.ones((len(runs) * self.width,), mx.uint32)
        if self.stage.token_layers:
            self.stage.announce_tokens(words, runs)
        x = self.stage.embed(words)
        with patch.object(mx, "async_eval"):
            x = self.stage.forward(x, runs)
        return [x, *(array for sequence in self.sequences for array in sequence.arrays())]


def write_models(folder: Path, *, moe: bool = False) -> dict[int, Path]:
    """Write two models of 4 bits, by their number of layers, whose heads are those that kernels need."""
    with patch.multiple(checkpoints, GDN_DIM=128, HEAD_DIM=256, _EXPERTS=32):
        return {
            layers: checkpoints.write_checkpoint(
                folder / str(layers),
                moe=moe,
                layers=layers,
                layout="mlx",
                quantize=4,
                hidden=128,
                dtype=mx.bfloat16,
                mtp=False,
                announce_mtp=False,
            )
            for layers in (SHORT, LONG)
        }


class MarkedSums(Doubled):
    """A communicator of two members, each of whose sums is one operation of the graph."""

    def sum(self, x: mx.array) -> mx.array:
        """Return zeros like `x`."""
        return _marked([x], (x.shape, x.dtype))[0]


Steps = StockSteps | OwnSteps


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer, the mean of three GDN layers and one of attention."""

    kernels: float
    names: dict[str, float]


def layer_cost(steps: Callable[[Path, int, int], Steps], paths: dict[int, Path], count: int, width: int) -> LayerCost:
    """Return the cost of a layer for windows of `width` tokens of `count` sequences. Runs within `counted_kernels`."""
    found = {}
    for layers, path in paths.items():
        loop, arrays = steps(path, count, width), list[mx.array]()
        for _ in range(3):
            mx.eval(arrays)  # of the step before
            arrays = list({id(array): array for array in loop.build()}.values())
        found[layers] = kernels_of(arrays)
    more = LONG - SHORT
    names = Counter(found[LONG])
    names.subtract(found[SHORT])
    return LayerCost(
        names.total() / more,
        {name: number / more for name, number in sorted(names.items()) if number},
    )


MOST_KERNELS: dict[tuple[str, tuple[int, int]], float] = {
    ("dense", (1, 1)): 9.75,
    ("dense", (1, 4)): 9.75,
    ("dense", (8, 1)): 13.5,
    # Experts have four, beside the norm and the residual of their MLP.
    ("moe", (1, 1)): 11.75,
    ("moe", (1, 4)): 11.75,
    ("moe", (8, 1)): 15.5,
    # Eleven are those of the residual streams, four of experts, and one of GatedDeltaNet beside its projections.
    ("flash-next", (1, 1)): 20.25,
    ("flash-next", (1, 4)): 20.25,
    ("flash-next", (8, 1)): 27.5,
    # Five are those of the streams, four of experts, and one and seven products of a KDA. MLX's operations are 240.
    ("glm", (1, 1)): 22.5,
    ("glm", (8, 1)): 28.0,
}
"""Kernels a layer for sequences and tokens of each. A change that adds one says here what it pays for."""

STOCK_KERNELS = {"dense": 24.75, "moe": 43.75}

DIALLED: dict[str, dict[str, Any]] = {
    "flash-next": {"kv_heads": 2, "value_heads": 16, "ngram_rows": 400},
    "glm": {"kv_heads": 4, "value_heads": 2, "is_glm": True},
}

RARE = {("dense", (1, 4)), ("moe", (1, 4)), ("glm", (8, 1))}
SLOW = {("flash-next", (1, 4)), ("flash-next", (8, 1))}


def cases() -> Iterator[Any]:
    """Yield each case with its mark."""
    for case in MOST_KERNELS:
        marks = [pytest.mark.thorough] * (case in RARE) + [pytest.mark.slow] * (case in SLOW)
        yield pytest.param(*case, marks=marks, id=str(case))


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the models of a family in 4 bits, by their number of layers."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    if kind not in DIALLED:
        return write_models(folder, moe=kind == "moe")
    for layers in (SHORT, LONG):
        fields = DIALLED[kind] | {"vocab": 4096, "experts": 32, "per_token": 4}
        shape = ModelShape(hidden=256, layers=layers, heads=4, mlp=128, **fields)
        write_dialled_model(folder / str(layers), shape, bits=4)
    return {layers: folder / str(layers) for layers in (SHORT, LONG)}


@pytest.mark.parametrize(("models", "shape"), [*cases()], indirect=["models"])
def test_a_layer_launches_no_more_kernels(
    models: dict[int, Path], shape: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    """A 4-bit layer stays at its number of kernels: less than half of stock mlx-lm's, with experts about a quarter."""
    kind = request.node.callspec.params["models"]
    with counted_kernels():
        own = layer_cost(OwnSteps, models, *shape)
        stock = layer_cost(StockSteps, models, *shape).kernels if kind in STOCK_KERNELS else None
    assert own.kernels <= MOST_KERNELS[kind, shape], own.names
    assert stock == STOCK_KERNELS.get(kind)


@pytest.mark.parametrize("models", STOCK_KERNELS, indirect=True)
def test_a_member_launches_two_sums_more(models: dict[int, Path]) -> None:
    """A layer of a group has the kernels of one machine, and a sum after each of its halves."""
    with counted_kernels():
        member = partial(OwnSteps, communicator=MarkedSums())
        alone, shared = (layer_cost(steps, models, 1, 1) for steps in (OwnSteps, member))
    assert shared.kernels == alone.kernels + 2, shared.names


def test_the_attention_to_chosen_blocks() -> None:
    """Choosing blocks, reading and attending take eleven kernels, two of which read keys and values.

    With the kernels that choose they are nine, without MLX's sorts, which have further launches for many blocks.
    """
    shapes = (1, 4, 1, 16), (1, 2, 400, 16), (1, 4, 16), (100, 16)
    q, keys, queries, blocks = (zeros(shape, mx.float32) for shape in shapes)
    values = mx.ones(keys.shape)  # an array of its own
    mx.eval(values)
    with counted_kernels():
        args = queries, blocks, 399, IndexerArgs(4, 16, 32, 4), 0.25
        reads = SparseReads(q, keys, values, *args)
        kernels = kernels_of([sparse_attention(reads)])
        own = kernels_of([sparse_attention(reads._replace(language=MetalKernel))])
    assert kernels.total() <= 11, kernels
    assert own.total() <= 9 and not any("Sort" in name for name in own), own
    assert kernels["Gather"] == 2
