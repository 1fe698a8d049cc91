"""The model of the study in virtual time: tokens by a formula, which are fast.

It makes the engines of a plan, and has one list of stages for each way to cut it.
"""

from __future__ import annotations

import itertools
from typing import cast

from coordinator.planning.capacity import Capacity
from proto.backup import LayerState
from proto.span import Span
from tests.support.stages.formula_stages import TokenBackup, formula_engine
from tests.support.stages.token_stages import TokenStage
from worker.engine.stage_engine import Budget, StageEngine

CUTS: tuple[tuple[int, ...], ...] = ((), (4,), (3,), (2, 5), (1, 6), (2, 4, 6))
"""The plans: the layers before which a model of eight is cut."""

LAYERS = 8

CAPACITY = Capacity(
    sequences=3, kv_tokens=2048, prefix_bytes=2**24, token_bytes=8192, state_bytes=2**18
)
"""Room for fewer sequences than clients, so that some wait."""

BUDGET = Budget(CAPACITY.sequences, CAPACITY.kv_tokens, CAPACITY.prefix_bytes)


class FormulaModel:
    """Layers that hold tokens, and a text by formula."""

    def __init__(self) -> None:
        self.prompts = [tuple(range(i, i + length)) for i, length in enumerate((9, 9, 17, 30, 47))]
        self._plans = [
            [TokenStage(span=Span(a, b)) for a, b in itertools.pairwise((0, *cuts, LAYERS))]
            for cuts in CUTS
        ]

    def make_engines(self, way: int, epoch: int) -> list[StageEngine]:
        """Return the engines of a new plan, cut in way number `way`."""
        stages = self._plans[way]
        return [
            formula_engine(
                stage, epoch, first=stage is stages[0], last=stage is stages[-1], budget=BUDGET
            )
            for stage in stages
        ]

    def read_states(self, engine: StageEngine, seq_id: int) -> tuple[int, list[LayerState]]:
        """Remove a backup from an engine. Return its length and its states. Raises KeyError if there is none."""
        backup = cast(dict[int, TokenBackup], engine.backups.made).pop(seq_id)
        return backup.length, backup.states
