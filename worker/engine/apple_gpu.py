"""Facts about Apple GPUs that follow from MLX's name of the architecture, such as `applegpu_g15s`."""

from __future__ import annotations

import logging
import re

import mlx.core as mx

log = logging.getLogger(__name__)

FIRST_WITH_BFLOAT16 = 15
"""Generation of M3 (M1 is 13, M2 is 14). Earlier GPUs emulate bfloat16, so mlx-lm advises float16 on them."""

FIRST_WITH_WIDE_PREFILL = 17
"""Generation of M5. Its fused attention for prompts starts at 1024 rows."""

DEFAULT_PREFILL_CHUNK = 512
WIDE_PREFILL_CHUNK = 1024


def generation(architecture: str) -> int | None:
    """Return the generation in an architecture's name, or None for another vendor's GPU or the CPU."""
    found = re.fullmatch(r"applegpu_g(\d+)[a-z]?", architecture)
    return int(found[1]) if found else None


def this_generation() -> int | None:
    """Return the generation of the GPU that MLX computes on, or None if it is no Apple GPU."""
    if mx.default_device() == mx.Device(mx.cpu):
        return None
    return generation(str(mx.device_info().get("architecture", "")))


def warn_of_emulated_bfloat16(dtype: mx.Dtype) -> None:
    """Log advice if this GPU emulates `dtype`, the type of the activations."""
    own = this_generation()
    if dtype == mx.bfloat16 and own is not None and own < FIRST_WITH_BFLOAT16:
        log.warning(
            "this GPU emulates bfloat16: serve with --dtype float16 for speed, on every machine of the plan"
        )


def default_prefill_chunk() -> int:
    """Return the tokens of a prompt chunk that suit the GPU of this machine."""
    own = this_generation()
    wide = own is not None and own >= FIRST_WITH_WIDE_PREFILL
    return WIDE_PREFILL_CHUNK if wide else DEFAULT_PREFILL_CHUNK
