"""The description of the machine and of Apple GPUs, and the choice of MLX's device."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest

from mtp.device import DEVICES, FUSED_ROWS, Arithmetic, FrameLimits
from mtp.layers import kv_cache
from proto.errors import UsageError
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
    assert hardware.checked_memory_limit(None) == 850


def test_a_limit_above_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of --memory-limit has both figures. A GPU's own memory counts, not that of its host."""
    total = psutil.virtual_memory().total
    assert hardware.checked_memory_limit(total) == total
    with pytest.raises(UsageError, match=r"--memory-limit 2 TB: this machine has [\d.]+ GB\. Give less"):
        hardware.checked_memory_limit(2 * 10**12)
    monkeypatch.setattr(hardware, "this_device", lambda: DEVICES["cuda"])
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 1000})
    with pytest.raises(UsageError, match="this machine has 1 kB"):
        hardware.checked_memory_limit(1001)


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


def use_generation(monkeypatch: pytest.MonkeyPatch, generation: int | None) -> None:
    """Make this machine one with an Apple GPU of `generation`, or with none."""
    name = "sm_90" if generation is None else f"applegpu_g{generation}s"
    here = classmethod(lambda cls: Arithmetic("metal", name, "1"))
    monkeypatch.setattr(Arithmetic, "here", here)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("applegpu_g13s", 13),
        ("applegpu_g14d", 14),
        ("applegpu_g17", 17),
        ("x86_64", None),
        ("sm_90", None),
    ],
)
def test_the_generation_is_read_from_the_architecture(architecture: str, expected: int | None) -> None:
    """The number in MLX's name of the architecture is the generation; other names have none."""
    assert Arithmetic("metal", architecture, "1").generation == expected


@pytest.mark.parametrize(
    ("generation", "dtype", "warned"),
    [
        (13, mx.bfloat16, True),
        (14, mx.bfloat16, True),
        (14, mx.float16, False),
        (15, mx.bfloat16, False),
        (None, mx.bfloat16, False),
    ],
)
def test_bfloat16_on_m1_and_m2_is_advised_against(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    generation: int | None,
    dtype: mx.Dtype,
    warned: bool,
) -> None:
    """A GPU that emulates bfloat16 logs the advice to use float16, and no other GPU does."""
    use_generation(monkeypatch, generation)
    hardware.warn_of_emulated_bfloat16(dtype)
    assert ("--dtype float16" in caplog.text) is warned


@pytest.mark.parametrize(
    ("generation", "sparse", "lengths"),
    [
        (None, True, FrameLimits(512, 128)),
        (16, False, FrameLimits(512, 128)),
        (16, True, FrameLimits(512, 512)),
        (17, False, FrameLimits(1024, 1024)),
    ],
)
def test_prompt_chunks_suit_the_gpu(
    monkeypatch: pytest.MonkeyPatch, generation: int | None, sparse: bool, lengths: FrameLimits
) -> None:
    """An M5 gets chunks that reach its fused attention kernel, and a mixture of experts gets longer short ones."""
    use_generation(monkeypatch, generation)
    assert FrameLimits.here(sparse=sparse) == lengths


@pytest.mark.parametrize(("generation", "calls"), [(16, 4), (17, 1)])
def test_an_m5_attends_a_prompt_chunk_at_once(monkeypatch: pytest.MonkeyPatch, generation: int, calls: int) -> None:
    """A kernel that holds no scores gets all rows, and another one as many as their bound permits."""
    use_generation(monkeypatch, generation)
    attend, widths = mx.fast.scaled_dot_product_attention, list[int]()

    def counting(q: mx.array, *args: Any, **options: Any) -> mx.array:
        widths.append(q.shape[2])
        return attend(q, *args, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counting)
    monkeypatch.setattr(kv_cache, "SCORE_BYTES", FUSED_ROWS * FUSED_ROWS)
    q, k = (mx.random.normal((1, 1, FUSED_ROWS, 32)) for _ in range(2))
    found = kv_cache.tiled_attention(q, k, k, 0, 1.0)
    assert widths == [FUSED_ROWS // calls] * calls
    assert mx.allclose(found, attend(q, k, k, scale=1.0, mask="causal"), atol=1e-4)
