"""The measured memory bandwidth against the known figure of the chip."""

from __future__ import annotations

import re

from coordinator.doctor.finding import Finding, Verdict

GIGABYTES_PER_SECOND = {
    "M1": 68,
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max": 300,
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max": 410,
    "M5": 153,
    "NVIDIA H200": 4800,
}
"""Published figures in GB/s. Of a chip that exists in two variants it is the smaller one's."""

LEAST_SHARE = 0.6
"""Share of the published figure below which something slows the machine down. The probe rounds to 41 %."""


def known_bandwidth(chip: str) -> int | None:
    """Return the published GB/s of a chip's name, such as `Apple M4 Max`, or None for an unknown chip."""
    names = sorted(GIGABYTES_PER_SECOND, key=len, reverse=True)
    for name in names:
        if re.search(rf"\b{re.escape(name)}\b", chip):
            return GIGABYTES_PER_SECOND[name]
    return None


def check_bandwidth(chip: str, bytes_per_second: float) -> Finding:
    """Compare the speed of matrix-vector products, which decoding consists of, with the chip's figure."""
    measured, known = bytes_per_second / 1e9, known_bandwidth(chip)
    values = {"chip": chip, "measured": bytes_per_second, "published": known and known * 1e9}
    if known is None:
        return Finding("bandwidth", Verdict.OK, f"{chip}: {measured:.3g} GB/s", "", values)
    figure = f"{chip}: {measured:.3g} of {known} GB/s"
    if measured >= LEAST_SHARE * known:
        return Finding("bandwidth", Verdict.OK, figure, "", values)
    advice = (
        "Decoding will be slow, and the plan gives this machine fewer layers. End other programs that use the "
        "GPU, leave Low Power Mode, and let the machine cool down."
    )
    return Finding("bandwidth", Verdict.WARN, figure, advice, values)
