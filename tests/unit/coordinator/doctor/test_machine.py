"""Versions, power and bandwidth in the doctor's report."""

from __future__ import annotations

import pytest

from coordinator.doctor.checks import Verdict, check_bandwidth, check_power, check_versions

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


@pytest.mark.parametrize(("measured", "verdict"), [(380e9, Verdict.OK), (200e9, Verdict.WARN)])
def test_a_slow_chip_is_named(measured: float, verdict: Verdict) -> None:
    """Less than 60 % of the published bandwidth is a warning."""
    assert check_bandwidth("Apple M4 Max", measured).verdict is verdict
    unknown = check_bandwidth("another chip", measured)
    assert unknown.verdict is Verdict.OK
    assert unknown.figure.endswith("GB/s in products of a matrix and a vector")


def on_mac(patch: pytest.MonkeyPatch, release: str, machine: str) -> None:
    """Pretend to run on macOS `release` with a Python for `machine`."""
    patch.setattr("sys.platform", "darwin")
    patch.setattr("platform.mac_ver", lambda: (release, ("", "", ""), machine))
    patch.setattr("platform.machine", lambda: machine)


@pytest.mark.parametrize(
    ("release", "machine", "verdict", "words"),
    [
        ("26.1", "arm64", Verdict.OK, ""),
        ("14.7", "arm64", Verdict.WARN, "Update macOS"),
        ("15.3", "x86_64", Verdict.FAIL, "Rosetta"),
    ],
)
def test_an_old_macos_and_rosetta_are_named(
    monkeypatch: pytest.MonkeyPatch, release: str, machine: str, verdict: Verdict, words: str
) -> None:
    """macOS 14 cannot wire weights, and a Python under Rosetta has no GPU."""
    on_mac(monkeypatch, release, machine)
    finding = check_versions()
    assert finding.verdict is verdict
    assert words in finding.advice
    assert f"macOS {release}" in finding.figure
