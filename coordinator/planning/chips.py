"""Apple's chips and NVIDIA's cards: the speed and the usable memory of a machine that is not at hand, for plans.

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


GB_SPEED = 100.0
"""GB/s of a machine of speed 1 (see `NodeSpec`)."""

OPERATIONS_PER_BYTE = 32.0
"""Operations a second that prompts reach on M1 to M4, for each byte a second of the bandwidth. Published prompts of 27B
in 4 bits have 157 to 184 tokens/s on an M4 Pro (mlx-dspark) and 245 on an M3 Max (oMLX)."""

M5_OPERATIONS_PER_BYTE = 93.0
"""The same from M5 on, whose GPU has matrix units: 559 tokens/s of 27B on an M5 Pro (Splash)."""

CPU_OPERATIONS_PER_BYTE = 0.5
"""The same of MLX's CPU backend on Linux, where each of 1 to 256 rows takes as long (two cores of an EPYC)."""

CARDS = {
    "RTX 3090": (24, 936, 71),
    "RTX 4090": (24, 1008, 165.2),
    "RTX 5090": (32, 1792, 209.5),
    "RTX PRO 6000": (96, 1792, 503.8),
    "DGX Spark": (119, 273, 92),
    "H100": (80, 3350, 989),
    "H200": (140, 4800, 989),
}
"""Memory in GB, GB/s, and dense bf16 TFLOPS of NVIDIA's cards by its data sheets (hmc-tech, waredb, techpowerup in
November 2026). Of a DGX Spark, whose GPU is a GB10, the memory is what CUDA reports, and the TFLOPS are measured
(request 283 of huggingface/kernels)."""

CARD_SHARE, MOST_CARD_OPERATIONS = 0.5, 190e12
"""The part of these TFLOPS that prompts reach, and the most that they reach here.

TensorFold's GB10 reads 1,019 tokens/s of 27B, which is .57 of 92 TFLOPS. This program reads 3,760 on an H200, mostly
for other reasons than products (docs/measurements.md).
"""

CARD_LAYER_SECONDS = 85e-6
"""Seconds of a layer besides its weights on an H200, by 115 tokens/s of 27B in 4 bits (docs/measurements.md)."""


def layer_seconds(chip: str) -> float:
    """Return the seconds of a layer besides its weights on a `chip` as MLX names it. On a CPU they are taken as 0."""
    if chip.startswith("Apple"):
        return LAYER_SECONDS
    return CARD_LAYER_SECONDS if chip.startswith("NVIDIA") else 0.0


def prompt_operations(chip: str, bytes_per_second: float) -> float:
    """Return the operations a second of prompts on a `chip` as MLX names it, 0 for an unknown GPU."""
    if card := find_card(chip):
        return min(MOST_CARD_OPERATIONS, CARD_SHARE * CARDS[card][2] * 1e12)
    if chip.startswith("NVIDIA"):
        return 0.0
    found = re.match(r"Apple M(\d+)", chip)
    old = OPERATIONS_PER_BYTE if found else CPU_OPERATIONS_PER_BYTE
    return bytes_per_second * (M5_OPERATIONS_PER_BYTE if found and int(found[1]) >= 5 else old)


def find_card(text: str) -> str | None:
    """Return the name of the card that `text` names, such as `NVIDIA GeForce RTX 4090`, or None."""
    plain = text.lower().replace(" ", "").replace("gb10", "dgxspark")
    return next((card for card in CARDS if card.lower().replace(" ", "") in plain), None)


def card_spec(name: str, card: str) -> NodeSpec:
    """Return the machine `name` with one of CARDS."""
    memory, bandwidth, _ = CARDS[card]
    speed, operations = bandwidth * READ_SHARE / GB_SPEED, prompt_operations(card, 0.0)
    limit = int(memory * 2**30 * USED_SHARE)
    return NodeSpec(name, limit, speed, layer_seconds=CARD_LAYER_SECONDS, operations=operations)


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
    operations = prompt_operations(f"Apple {chip}", bandwidth * 1e9)
    return NodeSpec(
        f"{chip} {memory}GB", _limit(memory), bandwidth / GB_SPEED, layer_seconds=LAYER_SECONDS, operations=operations
    )


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
