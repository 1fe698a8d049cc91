"""The description of the machine and the choice of MLX's device."""

from __future__ import annotations

import os
from typing import Any

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


def test_the_memory_limit_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status shows the limit, also of a process without a free descriptor."""
    limit = hardware.default_memory_limit()
    monkeypatch.setattr("psutil.virtual_memory", None)
    assert hardware.default_memory_limit() == limit


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


@pytest.mark.parametrize(("chip", "speed"), [("M4", 120e9), ("M4 Max", 546e9), ("M3 Ultra", 819e9)])
def test_the_bandwidth_probe_sees_the_chip_and_not_the_evaluation(
    monkeypatch: pytest.MonkeyPatch, chip: str, speed: float
) -> None:
    """With Metal's cost of 0.25 ms an evaluation, the result is within half an octave of the chip's bandwidth."""
    clock = [0.0]

    def evaluate(*arrays: Any) -> None:
        products = arrays[0] if isinstance(arrays[0], list) else []
        clock[0] += 0.25e-3 + len(products) * hardware.PROBE_ROWS**2 * 4 / speed

    monkeypatch.setattr(hardware, "backend", lambda: "metal")
    monkeypatch.setattr(mx, "eval", evaluate)  # nothing is computed, so no memory is used
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert 2**-0.5 < hardware.measured_bandwidth() / speed < 2**0.5, chip


def test_the_bandwidth_probe_reads_different_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One evaluation on a GPU covers GPU_MATRICES different matrices, and the result is finite and positive."""
    monkeypatch.setattr(hardware, "backend", lambda: "metal")
    monkeypatch.setattr(hardware, "PROBE_ROWS", 64)
    evaluated: list[int] = []
    evaluate = mx.eval

    def record(*arrays: Any) -> None:
        if isinstance(arrays[0], list):
            evaluate(*arrays)
            evaluated.append(len({product[0].item() for product in arrays[0]}))
        else:
            evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", record)
    assert 0 < hardware.measured_bandwidth() < float("inf")
    assert evaluated == [hardware.GPU_MATRICES] * hardware.PROBES


def test_freed_buffers_are_counted_besides_the_memory_in_use() -> None:
    """A freed array moves from the memory in use to the cached memory, and a clear returns it."""
    mx.clear_cache()
    used = hardware.memory_used()
    array = mx.ones((1024, 1024))
    mx.eval(array)
    assert hardware.memory_used() >= used + array.nbytes
    nbytes = array.nbytes
    del array
    assert hardware.memory_cached() >= nbytes
    assert hardware.memory_used() < used + nbytes
    mx.clear_cache()
    assert hardware.memory_cached() == 0
