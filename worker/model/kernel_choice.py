"""The choice of an optional kernel by measurement, kept on disk for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mtp.device import Arithmetic
from mtp.layers.layer import KernelTrial
from proto.errors import UsageError
from proto.kernels import Kernels
from proto.trust.node_trust import read_text, state_dir, write_private

log = logging.getLogger(__name__)

FILE = "kernels.json"
"""The file of the state directory with all trials of this machine."""

MOST_TRIALS = 64
"""Trials that are kept, the newest ones: a few for each model and version."""


_UNTIMED: dict[str, KernelTrial] = {}
"""Trials without times, of this process."""


class KernelChoice:
    """The trials of one stage. `summary` is for people, empty without a trial."""

    def __init__(self, mode: Kernels) -> None:
        self.mode = mode
        self.summary = ""
        self._chosen: dict[str, bool] = {}

    def choose(
        self, kernel: str, shapes: str, source: str, run_trial: Callable[[bool], KernelTrial]
    ) -> bool:
        """Return whether to use `kernel` of text `source` at `shapes`, by an earlier trial or by a new one.

        `run_trial(timed)` tries it. With `--kernels own` it is not timed, and decides only whether the kernel works.
        """
        if self.mode is Kernels.mlx:
            return False
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        key = f"{kernel} {digest}, {shapes}, {Arithmetic.here()}"
        if key not in self._chosen:
            self._chosen[key] = self._decide(kernel, key, run_trial)
        return self._chosen[key]

    def _decide(self, kernel: str, key: str, run_trial: Callable[[bool], KernelTrial]) -> bool:
        if self.mode is Kernels.own:
            trial = _UNTIMED.get(key) or _UNTIMED.setdefault(key, run_trial(False))
        else:
            trials = read_trials()
            trial = trials.get(key) or run_trial(True)
            if key not in trials:
                _write_trials({**trials, key: trial})
        own = trial.is_won
        self.summary = f"{kernel}: {describe(trial)}, {'own' if own else 'MLX'} used"
        level = logging.WARNING if trial.problem else logging.INFO
        log.log(level, "kernel chosen", extra={"kernel": kernel, "choice": self.summary})
        return own


def describe(trial: KernelTrial) -> str:
    """Return the result of a trial for people."""
    if trial.problem:
        return trial.problem
    if not trial.mlx:
        return "it works"
    return f"{trial.own * 1e6:.0f} us a step, MLX's operations {trial.mlx * 1e6:.0f} us"


def read_trials() -> dict[str, KernelTrial]:
    """Return the trials of this machine, by kernel, shapes and arithmetic. A file that is damaged has none."""
    try:
        found: dict[str, Any] = json.loads(read_text(state_dir(None) / FILE) or "{}")
        return {str(key): KernelTrial(**trial) for key, trial in found.items()}
    except (UsageError, ValueError, TypeError, AttributeError) as error:
        log.warning("trials of kernels not read", extra={"error": str(error)[:200]})
        return {}


def _write_trials(trials: dict[str, KernelTrial]) -> None:
    newest = dict(list(trials.items())[-MOST_TRIALS:])
    text = json.dumps({key: asdict(trial) for key, trial in newest.items()}, indent=1)
    try:
        write_private(state_dir(None) / FILE, text)
    except UsageError as error:  # the next start tries again
        log.warning("trial of a kernel not kept", extra={"error": str(error)})
