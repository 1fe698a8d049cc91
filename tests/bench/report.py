"""The figures of a bench: a JSON file and a chart in build/bench, both with the hardware."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.machine import about

FOLDER = Path(__file__).parents[2] / "build" / "bench"

mpl.use("agg")  # draws into files, as there may be no display

Draw = Callable[[Axes], None]


def publish(name: str, figures: Mapping[str, Any], charts: Mapping[str, Draw]) -> None:
    """Write `figures`, plain JSON, and one panel for each of `charts` by title. Print the paths."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    machine = about()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    data = {"bench": name, "when": when, "machine": machine, "figures": figures}
    (FOLDER / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    figure = Figure(figsize=(4.5 * len(charts), 4.5), layout="constrained")
    for place, (title, draw) in enumerate(charts.items(), start=1):
        axes = figure.add_subplot(1, len(charts), place)
        axes.set_title(title)
        draw(axes)
    figure.supxlabel(machine.replace("; ", "\n", 1), fontsize="x-small")
    figure.savefig(FOLDER / f"{name}.png", dpi=120)
    print(f"\nfigures and chart: build/bench/{name}.json, build/bench/{name}.png")


def bars(heights: Mapping[str, float], unit: str) -> Draw:
    """Return a chart with one bar for each name, with its height written on it."""

    def draw(axes: Axes) -> None:
        """Draw the bars."""
        drawn = axes.bar(list(heights), list(heights.values()), color="tab:blue")
        axes.bar_label(drawn, fmt="%.3g")
        axes.margins(y=0.1)
        axes.set_xticks(range(len(heights)), list(heights), rotation=25, ha="right")
        axes.set_ylabel(unit)

    return draw
