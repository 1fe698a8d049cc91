"""A picture of the frame trace of one process, before and after it runs ahead of the coordinator.

    python -m tests.bench.trace_picture --out docs/images/run-ahead.png --traces docs/traces

Both traces come from the same answer in the same process. `--traces` is the folder for the trace files, which
https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coordinator.frame_trace.chrome_trace import chrome_trace
from coordinator.generation import scheduler
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import GenerationRequest
from coordinator.local_engine.generator import local_generator
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.depth.controller import MtpMode
from tests.bench.machine import about

SHOWN_FRAMES = 4
"""Frames of the picture."""

TRACE_SECONDS = 0.25
"""Seconds of each trace file."""

COLORS = {
    "compute": "tab:blue",
    "build": "tab:orange",
    "begin": "tab:orange",
    "read": "tab:green",
    "apply": "tab:red",
    "send next": "tab:purple",
    "deliver": "tab:gray",
}
"""The phases that the picture shows. The others take a few microseconds."""

Event = dict[str, Any]


async def trace_of(loop: GenerationLoop) -> dict[str, Any]:
    """Return the trace of the last moments of a plain answer."""
    async for _ in loop.generate(GenerationRequest(tuple(range(300, 330)), 120)):
        pass
    return chrome_trace(await loop.collect_trace(TRACE_SECONDS))


async def measure(path: Path) -> dict[str, dict[str, Any]]:
    """Return the traces of a process that waits for the coordinator, and of one that runs ahead."""
    mode = MtpMode.parse("off")
    async with local_generator(Checkpoint.open(path), mtp=mode, prefix_cache=False) as loop:
        await trace_of(loop)  # warms up
        with patch.object(scheduler, "sequences_to_run_ahead", lambda *_: []):
            before = await trace_of(loop)
        return {"in turn": before, "run-ahead": await trace_of(loop)}


def draw(axes: Axes, title: str, events: list[Event]) -> None:
    """Draw the tracks over the shortest run of SHOWN_FRAMES frames, and the share of time with a frame under way."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and e["name"] in COLORS]
    computed = [e for e in slices if e["name"] == "compute"]
    built = [e for e in slices if e["name"] == "build"]
    start, end = min(
        ((a["ts"], b["ts"]) for a, b in zip(built, built[SHOWN_FRAMES:], strict=False)),
        key=lambda span: span[1] - span[0],
    )
    tracks = {"event loop": 2, "engine": 1, "device": 0}
    for e in slices:
        left, right = max(e["ts"], start), min(e["ts"] + e["dur"], end)
        if left < right:
            place = tracks[names[e["pid"], e["tid"]]]
            axes.barh(
                place, (right - left) / 1e3, left=(left - start) / 1e3, color=COLORS[e["name"]]
            )
    under_way = {e["args"]["frame"]: (e["ts"], e["ts"]) for e in built}
    for e in computed:
        frame = e["args"]["frame"]
        if frame in under_way:
            under_way[frame] = under_way[frame][0], e["ts"] + e["dur"]
    busy, done = 0.0, start
    for left, right in sorted(under_way.values()):
        left, right = max(left, done), min(right, end)
        busy, done = busy + max(0.0, right - left), max(done, right)
    axes.set_yticks(list(tracks.values()), list(tracks))
    share = busy / (end - start)
    axes.set_title(f"{title}: a frame is under way {share:.0%} of the time", fontsize="medium")


def main() -> None:
    """Trace both ways and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=checkpoint_dir())
    parser.add_argument("--out", type=Path, default=Path("build/bench/run-ahead.png"))
    parser.add_argument("--traces", type=Path, default=Path("build/bench/traces"))
    options = parser.parse_args()
    found = asyncio.run(measure(options.model))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    options.traces.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    axes: Axes
    for place, (title, trace) in enumerate(found.items(), start=1):
        axes = figure.add_subplot(2, 1, place)
        draw(axes, title, trace["traceEvents"])
        name = title.replace(" ", "-")
        (options.traces / f"{name}.json").write_text(json.dumps(trace, separators=(",", ":")))
    axes.set_xlabel("milliseconds")
    for name, color in COLORS.items():
        axes.barh(0, 0, color=color, label=name)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.supxlabel(about(), fontsize="x-small")
    figure.savefig(options.out, dpi=110)
    print(f"{options.out}, {options.traces}")


if __name__ == "__main__":
    main()
