"""The description of the machine and the choice of MLX's device."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest

from worker.engine import hardware


@pytest.mark.parametrize(("value", "chosen"), [("cpu", [mx.Device(mx.cpu)]), ("", []), ("gpu", [])])
def test_the_environment_can_choose_the_cpu(
    monkeypatch: pytest.MonkeyPatch, value: str, chosen: list[mx.Device]
) -> None:
    """MTP_DEVICE=cpu makes the CPU the default device, and any other value leaves MLX's choice."""
    asked: list[mx.Device] = []
    monkeypatch.setattr(mx, "set_default_device", asked.append)
    monkeypatch.setenv(hardware.DEVICE, value)
    hardware.use_requested_device()
    assert asked == chosen


def test_residency_is_renewed_on_macos_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's refresh interval is set on macOS, and a value of the user is left."""
    monkeypatch.setenv(hardware.REFRESH, "")  # restored after the test
    monkeypatch.delenv(hardware.REFRESH)
    monkeypatch.setattr("sys.platform", "linux")
    hardware.renew_residency()
    assert hardware.REFRESH not in os.environ
    monkeypatch.setattr("sys.platform", "darwin")
    hardware.renew_residency()
    assert os.environ[hardware.REFRESH] == "500"
    monkeypatch.setenv(hardware.REFRESH, "100")
    hardware.renew_residency()
    assert os.environ[hardware.REFRESH] == "100"
