"""The result of one check."""

from __future__ import annotations

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
