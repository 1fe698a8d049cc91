"""Room on the disk for the layers that a worker fetches."""

from __future__ import annotations

import shutil
from pathlib import Path

from coordinator.doctor.finding import Finding, Verdict
from proto.terminal.size import format_size

SPARE = 5 * 10**9
"""Bytes that should stay free for the system, above all for swap."""


def check_disk(folder: Path, weights: int) -> Finding:
    """Compare the free bytes of the disk of `folder` with the bytes of the model's `weights`."""
    free = shutil.disk_usage(folder).free
    values = {"free": free, "weights": weights}
    figure = f"{format_size(free)} free, the model has {format_size(weights)}"
    if free < weights:
        advice = "A worker here cannot fetch the whole model. Free space, or give it fewer layers."
        return Finding("disk", Verdict.FAIL, figure, advice, values)
    if free < weights + SPARE:
        return Finding("disk", Verdict.WARN, figure, "Free some space for the system.", values)
    return Finding("disk", Verdict.OK, figure, "", values)
