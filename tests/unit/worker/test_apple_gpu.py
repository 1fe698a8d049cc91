"""Facts about Apple GPUs."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mtp.device import Arithmetic
from worker.engine import hardware


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
def test_the_generation_is_read_from_the_architecture(
    architecture: str, expected: int | None
) -> None:
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


@pytest.mark.parametrize(("generation", "chunk"), [(None, 512), (16, 512), (17, 1024)])
def test_m5_gets_longer_prompt_chunks(
    monkeypatch: pytest.MonkeyPatch, generation: int | None, chunk: int
) -> None:
    """An M5 gets chunks that reach its fused attention kernel."""
    use_generation(monkeypatch, generation)
    assert hardware.default_prefill_chunk() == chunk
