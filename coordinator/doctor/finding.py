"""A finding of the doctor: a figure, a verdict and an advice."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The result of a check in one word. A skipped check does not apply to this machine."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of a check: a verdict, its figure for people, the advice, and the measured values for a report.

    `advice` is a sentence that says what to do, and is empty for OK. `values` holds plain JSON values.
    """

    check: str
    verdict: Verdict
    figure: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def judged(check: str, figure: str, advice: str, values: dict[str, Any]) -> Finding:
    """Return a finding that is a warning if there is advice."""
    return Finding(check, Verdict.WARN if advice else Verdict.OK, figure, advice, values)


SECONDS = 5.0
"""Seconds. Longest run of one program. All of them answer from memory."""

CommandOutput = Callable[..., str]
"""A function as `command_output`. Tests pass one that returns recorded outputs."""


def command_output(*command: str) -> str:
    """Return what `command` prints, or an empty string if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
