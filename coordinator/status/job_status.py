"""The status of a job on a model: a download, a conversion, or the addition of an MTP head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

JobKind = Literal["download", "convert", "add-mtp", "try-head"]
JobState = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True)
class JobStatus:
    """One job. `done` of `total` bytes are processed; `total` is 0 before the first progress.

    `target` is the name of the model that the job makes or changes. `detail` is the result or the error, for people.
    `began_at` is seconds since 1970.
    """

    number: int
    kind: JobKind
    model: str
    target: str
    began_at: float
    state: JobState = "running"
    done: int = 0
    total: int = 0
    detail: str = ""
