"""The answer of `/trace`: the frame trace of a generation loop in Chrome's format, and its table of times."""

from __future__ import annotations

from typing import Any

from coordinator.frame_trace.chrome_trace import chrome_trace
from coordinator.frame_trace.step_times import step_table
from coordinator.generation.loop import GenerationLoop


async def trace_report(loop: GenerationLoop, seconds: float) -> dict[str, Any]:
    """Return the trace of the last `seconds`. Raises NotReadyError if no plan serves."""
    processes = await loop.collect_trace(seconds)
    return {"trace": chrome_trace(processes), "table": step_table(processes)}
