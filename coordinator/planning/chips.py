"""Apple's chips: the speed and the usable memory of a Mac that is not at hand, for plans.

Bandwidths are Apple's, by tables that cite its pages (llmfit, whichllm, sunkcost in November 2026). Of two variants the
memory decides. The GPU's share of the memory is what users of MLX and llama.cpp print under macOS 26; earlier releases
gave 2/3 up to 32 GB and 3/4 above.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from coordinator.planning.plan import NodeSpec
from proto.errors import UsageError

BANDWIDTHS: dict[str, dict[int, float]] = {
    "M1": {0: 68.25},
    "M1 Pro": {0: 200},
    "M1 Max": {0: 400},
    "M1 Ultra": {0: 800},
    "M2": {0: 100},
    "M2 Pro": {0: 200},
    "M2 Max": {0: 400},
    "M2 Ultra": {0: 800},
    "M3": {0: 100},
    "M3 Pro": {0: 150},
    "M3 Max": {0: 300, 48: 400, 96: 300, 128: 400},
    "M3 Ultra": {0: 819},
    "M4": {0: 120},
    "M4 Pro": {0: 273},
    "M4 Max": {0: 410, 48: 546},
    "M5": {0: 153},
    "M5 Pro": {0: 307},
    "M5 Max": {0: 460, 48: 614},
    "M5 Ultra": {0: 1200},
    "M6": {0: 153, 24: 170},
}
"""GB/s by chip, and by the least memory in GB of a variant."""

GPU_SHARES = {8: 0.66, 16: 0.74, 32: 0.78, 64: 0.81, 128: 0.84, 256: 0.87}
"""The share of the memory that macOS recommends to a GPU at most, by the least memory in GB."""

USED_SHARE = 0.85
"""The part of it that a worker takes, as in `worker.engine.hardware`."""

READ_SHARE = 0.95
"""The part of the bandwidth that products with large weights reach."""

LAYER_SECONDS = 160e-6
"""Seconds of a layer besides reading its weights: launches, norms and recurrences.

With these two constants the formula is within a third of 16 published speeds of one stream (tests/unit/coordinator/
planning/test_chips.py). By bytes alone 35B-A3B on an M3 Ultra is predicted five times too fast.
"""


def layer_seconds(chip: str) -> float:
    """Return LAYER_SECONDS for a chip of Apple. Launches of other machines are not known, and taken as 0."""
    return LAYER_SECONDS if chip.startswith("Apple") else 0.0


GB_SPEED = 100.0
"""GB/s of a machine of speed 1 (see `NodeSpec`)."""

_MAC = re.compile(r"(?i)(?:apple\s+)?(m\d)[\s-]*(pro|max|ultra)?[\s,-]+(\d{1,4})\s*(?:gb)?")


def mac_specs(texts: Sequence[str]) -> list[NodeSpec]:
    """Return the machines that `texts` describe, with a number behind equal names. Raises UsageError."""
    found: list[NodeSpec] = []
    for spec in map(mac_spec, texts):
        equal = sum(other.name.startswith(spec.name) for other in found)
        found.append(replace(spec, name=f"{spec.name} {equal + 1}") if equal else spec)
    return found


def mac_spec(text: str) -> NodeSpec:
    """Return the machine that `text` describes, such as `M4 Pro 64GB`. Raises UsageError for an unknown one."""
    found = _MAC.fullmatch(text.strip())
    chip = f"{found[1].upper()} {(found[2] or '').title()}".strip() if found else ""
    if found is None or chip not in BANDWIDTHS:
        raise UsageError(
            f"--mac {text!r:.60}: write a chip and its memory, as in 'M4 Pro 64GB'. Known are "
            f"{', '.join(BANDWIDTHS)}. mtp-coord plan takes any other machine with --node"
        )
    memory = int(found[3])
    if memory < min(GPU_SHARES):
        raise UsageError(f"--mac {text!r:.60}: a Mac has at least {min(GPU_SHARES)} GB")
    bandwidth = _from(BANDWIDTHS[chip], memory) * READ_SHARE
    return NodeSpec(f"{chip} {memory}GB", _limit(memory), bandwidth / GB_SPEED, layer_seconds=LAYER_SECONDS)


def chip_speed(chip: str, memory_limit: int) -> float | None:
    """Return the bytes a second of a Mac's `chip` such as `Apple M4 Pro`, or None for another machine.

    Of several variants it is the one with the most memory that `memory_limit` allows, within a twentieth.
    """
    table = BANDWIDTHS.get(chip.removeprefix("Apple "), {})
    found = [speed for least, speed in table.items() if not least or 0.95 * _limit(least) <= memory_limit]
    return found[-1] * 1e9 * READ_SHARE if found else None


def _limit(memory: int) -> int:
    """Return the bytes that a worker takes of `memory` GB."""
    return int(memory * 2**30 * _from(GPU_SHARES, memory) * USED_SHARE)


def _from(table: dict[int, float], memory: int) -> float:
    return table[max(least for least in table if least <= memory)]
