"""Versions, the device and memory in the doctor's report."""

from __future__ import annotations

import pytest

from coordinator.doctor import checks
from coordinator.doctor.checks import Verdict, check_device, check_memory, check_versions


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


@pytest.mark.parametrize(("limit", "verdict"), [(60.0, Verdict.OK), (0.0, Verdict.WARN)])
def test_a_slow_device_is_named(monkeypatch: pytest.MonkeyPatch, limit: float, verdict: Verdict) -> None:
    """A round trip above the limit is a warning. The report has the chip and its speed."""
    monkeypatch.setattr(checks, "SLOW_SECONDS", limit)
    finding = check_device()
    assert finding.verdict is verdict
    assert finding.values["bytes_per_second"] > 0
    assert finding.values["chip"] in finding.figure


@pytest.mark.parametrize(("share", "verdict"), [(2.0, Verdict.OK), (-1.0, Verdict.WARN)])
def test_swap_is_named(monkeypatch: pytest.MonkeyPatch, share: float, verdict: Verdict) -> None:
    """More swap than the share is a warning."""
    monkeypatch.setattr(checks, "SWAP_SHARE", share)
    assert check_memory().verdict is verdict
