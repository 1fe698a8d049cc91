"""The choice of an optional kernel by measurement, kept on disk for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from mtp.device import Arithmetic
from mtp.layers.layer import KernelTrial
from proto.errors import UsageError
from proto.kernels import Kernels
from proto.state_dir import read_text, state_dir, write_private

log = logging.getLogger(__name__)

FILE = "kernels.json"
"""The file of the state directory with all trials of this machine."""

MOST_TRIALS = 64
"""Trials that are kept, the newest ones: a few for each model and version."""


class KernelChoice:
    """The trials of one stage."""

    def __init__(self, mode: Kernels) -> None:
        self.mode = mode
        self._chosen: dict[str, bool] = {}
        self._texts: list[str] = []

    @property
    def summary(self) -> str:
        """The trials for people, empty without a trial."""
        return "; ".join(self._texts)

    def choose(
        self, kernel: str, shapes: str, source: str, run_trial: Callable[[], KernelTrial]
    ) -> bool:
        """Return whether to use `kernel` of text `source` at `shapes`. With `--kernels own` its times do not count."""
        if self.mode is Kernels.mlx:
            return False
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        # After an update of this program or of MLX, a kernel that failed or lost is tried again.
        key = f"{kernel} {digest} of {version('mtp-cluster')}, {shapes}, {Arithmetic.here()}"
        if key not in self._chosen:
            self._chosen[key] = self._decide(kernel, key, run_trial)
        return self._chosen[key]

    def _decide(self, kernel: str, key: str, run_trial: Callable[[], KernelTrial]) -> bool:
        trials = read_trials()
        trial = trials.get(key) or run_trial()
        if key not in trials:
            write_trials({**trials, key: trial})
        own = trial.is_won or (self.mode is Kernels.own and not trial.problem)
        text = f"{kernel}: {describe(trial)}, {'own' if own else 'MLX'} used"
        self._texts.append(text)
        level = logging.WARNING if trial.problem else logging.INFO
        log.log(level, "kernel chosen", extra={"kernel": kernel, "choice": text})
        return own


def describe(trial: KernelTrial) -> str:
    """Return the result of a trial for people."""
    if trial.problem:
        return trial.problem
    return f"{trial.own * 1e6:.0f} us a step, MLX's operations {trial.mlx * 1e6:.0f} us"


def read_trials() -> dict[str, KernelTrial]:
    """Return the trials of this machine, by kernel, shapes and arithmetic. A file that is damaged has none."""
    try:
        found: dict[str, Any] = json.loads(read_text(state_dir(None) / FILE) or "{}")
        return {str(key): KernelTrial(**trial) for key, trial in found.items()}
    except (UsageError, ValueError, TypeError, AttributeError) as error:
        log.warning("trials of kernels not read", extra={"error": str(error)[:200]})
        return {}


def write_trials(trials: dict[str, KernelTrial]) -> None:
    """Keep the newest of `trials` in place of all earlier ones. A machine without any tries every kernel again."""
    newest = dict(list(trials.items())[-MOST_TRIALS:])
    text = json.dumps({key: asdict(trial) for key, trial in newest.items()}, indent=1)
    try:
        write_private(state_dir(None) / FILE, text)
    except UsageError as error:  # the next start tries again
        log.warning("trial of a kernel not kept", extra={"error": str(error)})
