"""The description of the machine and the choice of MLX's device."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mtp.device import DEVICES
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


def test_the_memory_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host has more memory than its NVIDIA GPU, on which the stage is."""
    monkeypatch.setattr(hardware, "this_device", lambda: DEVICES["cuda"])
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 1000})
    assert hardware.default_memory_limit() == 850


@pytest.mark.parametrize(("chip", "speed"), [("M4", 120e9), ("M4 Max", 546e9), ("M3 Ultra", 819e9)])
def test_the_bandwidth_probe_sees_the_chip_and_not_the_evaluation(
    monkeypatch: pytest.MonkeyPatch, chip: str, speed: float
) -> None:
    """With Metal's cost of 0.25 ms an evaluation, the result is within half an octave of the chip's bandwidth."""
    clock = [0.0]

    def evaluate(*arrays: Any) -> None:
        products = arrays[0] if isinstance(arrays[0], list) else []
        clock[0] += 0.25e-3 + len(products) * hardware.PROBE_ROWS**2 * 4 / speed

    monkeypatch.setattr(hardware, "this_device", lambda: DEVICES["metal"])
    monkeypatch.setattr(mx, "eval", evaluate)  # nothing is computed, so no memory is used
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert 2**-0.5 < hardware.measured_bandwidth() / speed < 2**0.5, chip


def test_the_bandwidth_probe_computes_as_the_layers_do() -> None:
    """On a CPU the result is near the speed of a linear layer with one row, and not that of a slower product."""
    layer = nn.Linear(hardware.PROBE_ROWS, hardware.PROBE_ROWS, bias=False)
    row = mx.ones((1, 1, hardware.PROBE_ROWS))
    mx.eval(layer.parameters(), row)
    shares = []
    for _ in range(3):  # other programs may slow either side
        times = []
        for _ in range(hardware.PROBES):
            started = time.perf_counter()
            mx.eval(layer(row))
            times.append(time.perf_counter() - started)
        shares.append(hardware.measured_bandwidth() * min(times) / layer.weight.nbytes)
    assert max(shares) > 0.5, shares
