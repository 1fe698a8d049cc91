"""Versions, environment variables and priority in the doctor's report."""

from __future__ import annotations

import os

import pytest

from coordinator.doctor.environment import check_environment, check_priority, check_versions
from coordinator.doctor.finding import Verdict
from coordinator.doctor.open_files import check_open_files


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


def test_versions_are_those_that_decide_the_arithmetic() -> None:
    """The report has the versions of MLX and mlx-lm."""
    assert {"mlx", "mlx-lm", "python", "system"} <= check_versions().values.keys()


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({"MLX_METAL_FAST_SYNCH": "1", "HOME": "/x"}, Verdict.WARN),
        ({"MLX_METAL_GPU_ARCH": "applegpu_g14s"}, Verdict.WARN),
        ({"MTP_DEVICE": "cpu"}, Verdict.WARN),
        ({"MLX_MAX_OPS_PER_BUFFER": "200"}, Verdict.OK),
        ({"MTP_API_KEY": "secret", "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS": "500"}, Verdict.OK),
    ],
)
def test_harmful_variables_are_named_and_secrets_are_not(
    environ: dict[str, str], verdict: Verdict
) -> None:
    """A variable that changes MLX's kernels is a warning by its name. Other programs' variables are left out."""
    finding = check_environment(environ)
    assert finding.verdict is verdict
    assert "secret" not in str(finding)
    if verdict is Verdict.WARN:
        assert next(iter(environ)) in finding.advice


@pytest.mark.parametrize(("niceness", "verdict"), [(0, Verdict.OK), (10, Verdict.WARN)])
def test_a_lowered_priority_is_named(
    monkeypatch: pytest.MonkeyPatch, niceness: int, verdict: Verdict
) -> None:
    """A process that runs under nice gets a warning."""
    monkeypatch.setattr(os, "getpriority", lambda which, who: niceness)
    assert check_priority().verdict is verdict


@pytest.mark.parametrize(("state", "verdict"), [(0, Verdict.OK), (1, Verdict.WARN)])
def test_the_background_class_of_macos_is_named(
    monkeypatch: pytest.MonkeyPatch, state: int, verdict: Verdict
) -> None:
    """A process that launchd starts with ProcessType Background gets a warning."""
    on_mac(monkeypatch, "26.1", "arm64")
    monkeypatch.setattr(os, "getpriority", lambda which, who: state if which == 4 else 0)
    finding = check_priority()
    assert finding.verdict is verdict
    assert finding.values == {"nice": 0, "background": state == 1}


@pytest.mark.parametrize(("soft", "verdict"), [(256, Verdict.WARN), (8192, Verdict.OK)])
def test_few_open_files_are_named(
    monkeypatch: pytest.MonkeyPatch, soft: int, verdict: Verdict
) -> None:
    """launchd's limit of 256 open files is a warning."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, 2**20))
    assert check_open_files().verdict is verdict
