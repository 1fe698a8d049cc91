"""The models of the study in virtual time: tokens by a formula, which are fast, and the built-in model.

A model makes the engines of a plan. It has one list of stages for each way to cut it.
"""

from __future__ import annotations

import itertools
from typing import Protocol, cast

import mlx.core as mx
from mlx_lm.utils import load_tokenizer

from coordinator.planning.capacity import Capacity
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.layer import KVFormat
from proto.backup import LayerState
from proto.span import Span
from tests.support.stages.formula_stages import FormulaStage, TokenBackup, formula_engine
from worker.engine.backup import layer_states
from worker.engine.stage_engine import Budget, StageEngine
from worker.model.loader import load_stage
from worker.model.stage import Stage
from worker.model.verifier import Verifier

CUTS: tuple[tuple[int, ...], ...] = ((), (4,), (3,), (2, 5), (1, 6), (2, 4, 6))
"""The plans: the layers before which a model of eight is cut."""

LAYERS = 8

CAPACITY = Capacity(
    sequences=3, kv_tokens=2048, prefix_bytes=2**24, token_bytes=8192, state_bytes=2**18
)
"""Room for fewer sequences than clients, so that some wait."""

BUDGET = Budget(CAPACITY.sequences, CAPACITY.kv_tokens, CAPACITY.prefix_bytes)


class Model(Protocol):
    """A model that is cut in the ways of CUTS."""

    prompts: list[tuple[int, ...]]

    def make_engines(self, way: int, epoch: int) -> list[StageEngine]:
        """Return the engines of a new plan, cut in way number `way`."""
        ...

    def read_states(self, engine: StageEngine, seq_id: int) -> tuple[int, list[LayerState]]:
        """Remove a backup from an engine. Return its length and its states. Raises KeyError if there is none."""
        ...


class FormulaModel:
    """Layers that hold tokens, and a text by formula."""

    def __init__(self) -> None:
        self.prompts = [tuple(range(i, i + length)) for i, length in enumerate((9, 9, 17, 30, 47))]
        self._plans = [
            [FormulaStage(Span(a, b)) for a, b in itertools.pairwise((0, *cuts, LAYERS))]
            for cuts in CUTS
        ]

    def make_engines(self, way: int, epoch: int) -> list[StageEngine]:
        """See Model."""
        stages = self._plans[way]
        return [
            formula_engine(
                stage, epoch, first=stage is stages[0], last=stage is stages[-1], budget=BUDGET
            )
            for stage in stages
        ]

    def read_states(self, engine: StageEngine, seq_id: int) -> tuple[int, list[LayerState]]:
        """See Model."""
        backup = cast(dict[int, TokenBackup], engine.backups.made).pop(seq_id)
        return backup.length, backup.states


class BuiltinModel:
    """The built-in model in fp32, loaded once for each way to cut it."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(checkpoint_dir())
        lines = ["def read(path):\n    " * n + f"# {i}\n" for i, n in enumerate((1, 1, 2, 3, 5))]
        self.prompts = [tuple(tokenizer.encode(line)) for line in lines]
        checkpoint = Checkpoint.open(checkpoint_dir())
        assert checkpoint.config.num_layers == LAYERS
        self._plans = [
            [
                Stage(
                    load_stage(
                        checkpoint, Span(a, b), first=a == 0, last=b == LAYERS, dtype=mx.float32
                    ),
                    KVFormat(),
                )
                for a, b in itertools.pairwise((0, *cuts, LAYERS))
            ]
            for cuts in CUTS
        ]

    def make_engines(self, way: int, epoch: int) -> list[StageEngine]:
        """See Model."""
        stages = self._plans[way]
        return [
            StageEngine(
                stage,
                epoch=epoch,
                first=stage is stages[0],
                verifier=Verifier(stage.modules, stage.kv_format) if stage is stages[-1] else None,
                budget=BUDGET,
            )
            for stage in stages
        ]

    def read_states(self, engine: StageEngine, seq_id: int) -> tuple[int, list[LayerState]]:
        """See Model."""
        backup = engine.backups.made.pop(seq_id)
        states: list[LayerState] = []
        while part := layer_states(backup, len(states)):
            states += part
        return backup.length, states
