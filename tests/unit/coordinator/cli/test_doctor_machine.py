"""Versions and the device in the doctor's report."""

from __future__ import annotations

import pytest

from coordinator.cli import doctor_checks as checks
from coordinator.cli.doctor_checks import Verdict, check_device, check_versions


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


@pytest.mark.parametrize(
    ("limit", "share", "words"),
    [(60.0, 2.0, ""), (0.0, 2.0, "answers slowly"), (60.0, -1.0, "swapped model")],
)
def test_a_slow_device_and_swap_are_named(
    monkeypatch: pytest.MonkeyPatch, limit: float, share: float, words: str
) -> None:
    """A round trip above the limit, or more swap than the share, is a warning. The report has the chip's speed."""
    monkeypatch.setattr(checks, "SLOW_SECONDS", limit)
    monkeypatch.setattr(checks, "SWAP_SHARE", share)
    finding = check_device()
    assert finding.verdict is (Verdict.WARN if words else Verdict.OK)
    assert words in finding.advice
    assert finding.values["bytes_per_second"] > 0
    assert finding.values["chip"] in finding.figure
