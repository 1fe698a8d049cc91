"""Disk, power, memory and bandwidth in the doctor's report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from coordinator.doctor.bandwidth import check_bandwidth, known_bandwidth
from coordinator.doctor.disk import check_disk
from coordinator.doctor.finding import Verdict
from coordinator.doctor.memory import MemoryLimits, check_memory
from coordinator.doctor.power import check_power

GB = 10**9

BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=4653155)\t82%; discharging; 5:12 remaining present: true
"""
ADAPTER = BATTERY.replace("Battery Power", "AC Power").replace("discharging", "charged")

CUSTOM = """Battery Power:
 Sleep On Power Button 1
 lowpowermode         1
 standby              1
 displaysleep         2
 sleep                1
 disksleep            10
AC Power:
 Sleep On Power Button 1
 lowpowermode         0
 displaysleep         10
 sleep                0
 womp                 1
"""


@pytest.mark.parametrize(
    ("free", "verdict"), [(9 * GB, Verdict.FAIL), (12 * GB, Verdict.WARN), (99 * GB, Verdict.OK)]
)
def test_a_small_disk_is_named(
    monkeypatch: pytest.MonkeyPatch, free: int, verdict: Verdict
) -> None:
    """A disk without room for the model fails, and one with little more warns."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    finding = check_disk(Path("/"), 10 * GB)
    assert finding.verdict is verdict
    assert finding.values == {"free": free, "weights": 10 * GB}


@pytest.mark.parametrize(
    ("source", "verdict", "words"),
    [(ADAPTER, Verdict.OK, []), (BATTERY, Verdict.WARN, ["adapter", "Low Power", "after 1 min"])],
)
def test_battery_sleep_and_low_power_are_named(
    monkeypatch: pytest.MonkeyPatch, source: str, verdict: Verdict, words: list[str]
) -> None:
    """The settings of the power source in use decide the verdict."""
    monkeypatch.setattr("sys.platform", "darwin")
    outputs = {"batt": source, "custom": CUSTOM}
    finding = check_power(lambda *command: outputs[command[-1]])
    assert finding.verdict is verdict
    assert all(word in finding.advice for word in words)


def test_power_is_checked_on_macos_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux the check is skipped."""
    monkeypatch.setattr("sys.platform", "linux")
    assert check_power().verdict is Verdict.SKIP


def test_power_without_pmset_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pmset that prints nothing gives no false warning."""
    monkeypatch.setattr("sys.platform", "darwin")
    assert check_power(lambda *command: "").verdict is Verdict.OK


@pytest.mark.parametrize(
    ("swap", "resident", "verdict", "words"),
    [
        (0, GB, Verdict.OK, ""),
        (4 * GB, GB, Verdict.WARN, "swapped out"),
        (0, 9 * GB, Verdict.WARN, "browser 9 GB"),
    ],
)
def test_swap_and_large_programs_are_named(
    monkeypatch: pytest.MonkeyPatch, swap: int, resident: int, verdict: Verdict, words: str
) -> None:
    """Swap in use and another program that holds much memory are warnings."""
    info = {"name": "browser", "memory_info": SimpleNamespace(rss=resident), "pid": 1}
    total = SimpleNamespace(total=32 * GB, available=20 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: total)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=swap))
    monkeypatch.setattr(psutil, "process_iter", lambda names: [SimpleNamespace(info=info)])
    monkeypatch.setattr("sys.platform", "darwin")
    finding = check_memory(MemoryLimits(18 * GB, 22 * GB), lambda *command: "26000\n")
    assert finding.verdict is verdict
    assert words in finding.advice
    assert finding.values["wired_limit_mb"] == 26000


@pytest.mark.parametrize(
    ("chip", "known"),
    [("Apple M4 Max", 410), ("Apple M4", 120), ("Apple M3 Ultra", 819), ("AMD EPYC", None)],
)
def test_the_chip_s_figure_is_found(chip: str, known: int | None) -> None:
    """The longest name that fits decides, and other processors have no figure."""
    assert known_bandwidth(chip) == known


@pytest.mark.parametrize(("measured", "verdict"), [(380e9, Verdict.OK), (200e9, Verdict.WARN)])
def test_a_slow_chip_is_named(measured: float, verdict: Verdict) -> None:
    """Less than 60 % of the published bandwidth is a warning."""
    assert check_bandwidth("Apple M4 Max", measured).verdict is verdict
    assert check_bandwidth("another chip", measured).verdict is Verdict.OK
