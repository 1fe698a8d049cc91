"""Sleep, battery and low power mode of a Mac, read from `pmset`."""

from __future__ import annotations

import re
import sys
from typing import Any

from coordinator.doctor.command_output import CommandOutput, command_output
from coordinator.doctor.finding import Finding, Verdict


def check_power(output: CommandOutput = command_output) -> Finding:
    """Report what may put this Mac to sleep or slow it down while it serves."""
    if sys.platform != "darwin":
        return Finding("power", Verdict.SKIP, "only on macOS")
    source = _source(output("pmset", "-g", "batt"))
    settings = _settings(output("pmset", "-g", "custom")).get(source, {})
    values: dict[str, Any] = {"source": source, **settings}
    advice = []
    if source == "Battery Power":
        advice.append("Connect the power adapter, since macOS slows the GPU on battery.")
    if settings.get("lowpowermode") == 1:
        advice.append("Turn off Low Power Mode.")
    if settings.get("sleep", 0) > 0:
        advice.append(
            f"This Mac sleeps after {settings['sleep']} minutes. Both programs prevent that while they run, "
            "but a closed lid sleeps all the same."
        )
    serious = source == "Battery Power" or settings.get("lowpowermode") == 1
    verdict = Verdict.WARN if serious else Verdict.OK
    minutes = settings.get("sleep")
    figure = f"{source or 'unknown source'}, sleep {minutes if minutes else 'off'}"
    return Finding("power", verdict, figure, " ".join(advice), values)


def _source(batt: str) -> str:
    """Return `AC Power` or `Battery Power`, from the output of `pmset -g batt`."""
    found = re.search(r"drawing from '([^']+)'", batt)
    return found[1] if found else ""


def _settings(custom: str) -> dict[str, dict[str, int]]:
    """Return the numeric settings of each power source, from the output of `pmset -g custom`."""
    found: dict[str, dict[str, int]] = {}
    source = ""
    for line in custom.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            source = line.removesuffix(":")
            found[source] = {}
        elif match := re.match(r"\s+(\w+)\s+(\d+)", line):
            found.setdefault(source, {})[match[1]] = int(match[2])
    return found
