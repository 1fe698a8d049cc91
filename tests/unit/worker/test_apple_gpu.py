"""Facts about Apple GPUs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mtp.device import FUSED_ROWS, Arithmetic, FrameLimits
from mtp.layers import kv_cache
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
def test_an_m5_attends_a_prompt_chunk_at_once(
    monkeypatch: pytest.MonkeyPatch, generation: int, calls: int
) -> None:
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
