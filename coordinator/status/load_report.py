"""The progress of a change of the served model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LoadPhase = Literal["opening", "finishing answers", "loading", "ready", "failed"]


@dataclass(frozen=True)
class LoadReport:
    """The last change of the model. `done` of `total` bytes of the phase are processed.

    `note` says whether the present model stays until the next one is ready. It and `error` are for people.
    """

    model: str
    phase: LoadPhase
    done: int = 0
    total: int = 0
    error: str = ""
    note: str = ""

    @property
    def running(self) -> bool:
        """True until the change has ended."""
        return self.phase not in ("ready", "failed")
