"""`auto` against the best of `off`, 1, 2, 3 and `filled` by the real scheduler, over machines of recorded costs.

`python -m tests.unit.coordinator.drafts.test_recorded_costs` prints the whole table, which takes minutes.
"""

from __future__ import annotations

from itertools import product
from statistics import fmean

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from tests.support.protocol.recorded_costs import COSTS, MEASURED
from tests.support.protocol.virtual_run import Load, Noise, run

FIXED = ("off", "1", "2", "3", "filled")
STREAMS = (1, 8, 16)

STEADY = (0.83, 0.78, 0.75, 0.70, 0.68, 0.66, 0.65)
PUBLISHED = (0.84, 0.65, 0.49, 0.30, 0.25, 0.20, 0.20)
POOR = (0.30, 0.20, 0.20, 0.10, 0.10, 0.10, 0.10)
GREAT = (0.97, 0.95, 0.94, 0.93, 0.92, 0.92, 0.91)

UNEVEN = Noise(0.1, 0.002)


def _load(streams: int, tokens: int, answers: int, context: int = 0, growth: int = 1) -> Load:
    return Load(lambda _: streams, tokens, streams * tokens * answers, lambda _: STEADY, context, growth)


def _together(streams: int) -> Load:
    """Return clients that ask 20 ms after each other, and again when the answers of all have ended."""
    return Load(lambda _: streams, 80, 320 * streams, lambda _: (0.69,), gap=0.02)


def _of(streams: int, chances: tuple[float, ...], later: tuple[float, ...] | None = None) -> Load:
    text = Load(lambda _: streams, 400, 800 * streams, lambda place: chances)
    if later is None:
        return text
    return Load(lambda _: streams, 800, 799 * streams, lambda place: chances if place < 400 else later)


def _crowd(share: float) -> int:
    return (1, 8, 16, 1)[min(3, int(4 * share))]


def load_of(setting: str, streams: int) -> tuple[Load, Noise, bool]:
    """Return the load of a setting, the noise, and whether only its second half counts."""
    loads = {
        "first 400 tokens": (_load(streams, 400, 1), Noise(), False),
        "next 400 tokens": (_load(streams, 400, 2), Noise(), True),
        "kernels compile": (_load(streams, 400, 2), Noise(0.1, 0.002, 0.3), False),
        "answers of 16 tokens": (_load(streams, 16, 60), Noise(0.05), True),
        "answers of 80 together": (_together(streams), Noise(0.05), False),
        "published acceptance": (_of(streams, PUBLISHED), UNEVEN, True),
        "poor acceptance": (_of(streams, POOR), UNEVEN, True),
        "turns great": (_of(streams, POOR, GREAT), UNEVEN, False),
        "turns poor": (_of(streams, GREAT, POOR), UNEVEN, False),
        "after 30,000 tokens": (_load(streams, 400, 2, context=30_000), UNEVEN, True),
        "grows to 30,000": (_load(streams, 400, 2, growth=75), UNEVEN, True),
        "1, 8, 16, 1 streams": (Load(_crowd, 400, 6000, lambda _: STEADY), UNEVEN, False),
    }
    return loads[setting]


SETTINGS = (
    "first 400 tokens",
    "next 400 tokens",
    "kernels compile",
    "answers of 16 tokens",
    "answers of 80 together",
    "published acceptance",
    "poor acceptance",
    "turns great",
    "turns poor",
    "after 30,000 tokens",
    "grows to 30,000",
    "1, 8, 16, 1 streams",
)


def share(machine: str, streams: int, setting: str, seeds: int = 1) -> float:
    """Return the mean speed of `auto` with `seeds` seeds over that of the best fixed choice with the first one."""
    load, noise, later = load_of(setting, streams)

    def speed(mode: str, seed: int = 0) -> float:
        return run(Controller(MtpMode.parse(mode)), COSTS[machine], load, noise, seed).speed(later=later)

    fixed = FIXED if COSTS[machine].stages > 1 else FIXED[:-1]  # one stage has no `filled` pipeline
    return fmean(speed("auto", seed) for seed in range(seeds)) / max(map(speed, fixed))


@pytest.mark.parametrize(("machine", "streams"), MEASURED)
def test_the_costs_give_the_measured_speeds(machine: str, streams: int) -> None:
    """Plain decoding by the recorded costs has the measured tokens per second, within an eighth."""
    costs = COSTS[machine]
    batch = -(-streams // costs.stages)
    step = costs.milliseconds([(1, 16)] * batch, 0, 0, last=True)
    cycle = step * costs.stages + (costs.hop * costs.stages if streams < costs.stages else 0.0)
    assert 1000 * streams / cycle == pytest.approx(MEASURED[machine, streams], rel=0.125)


def test_a_draft_of_eight_sequences_of_glm_costs_what_was_measured() -> None:
    """A step of eight sequences of two rows takes 35 ms more than a plain one."""
    costs = COSTS["GLM, H200"]
    plain = costs.milliseconds([(1, 0)] * 8, 0, 0, last=True)
    assert costs.milliseconds([(2, 0)] * 8, 1, 0, last=True) - plain == pytest.approx(35, abs=1)


@pytest.mark.parametrize(
    ("machine", "streams", "setting"),
    [
        ("27B, two H200s", 1, "published acceptance"),
        ("27B, M3 Ultra", 8, "kernels compile"),
        ("wide, group of two H100s", 1, "after 30,000 tokens"),
    ],
)
def test_auto_comes_near_the_best_fixed_choice(machine: str, streams: int, setting: str) -> None:
    """`auto` has .97 of the speed of the best of `off`, 1, 2, 3 and `filled`."""
    assert share(machine, streams, setting, seeds=3) >= 0.97


SHORT_ANSWERS = (
    ("GLM that drafts on the device, H200", 8, "answers of 80 together", 0.97),
    ("GLM that drafts on the device, H200", 16, "answers of 80 together", 0.97),
    ("GLM, H200", 8, "answers of 16 tokens", 0.92),
)


@pytest.mark.parametrize(("machine", "streams", "setting", "least"), SHORT_ANSWERS)
def test_short_answers_lose_little(machine: str, streams: int, setting: str, least: float) -> None:
    """Short answers of GLM have nearly the speed of plain decoding. While prompts arrive, drafts look fast."""
    assert share(machine, streams, setting, seeds=3) >= least


if __name__ == "__main__":
    import sys

    print("| machine | streams | " + " | ".join(SETTINGS) + " |")
    for machine, streams in product(sys.argv[1:] or COSTS, STREAMS):
        cells = [f"{share(machine, streams, setting):.3f}" for setting in SETTINGS]
        print(f"| {machine} | {streams} | {' | '.join(cells)} |", flush=True)
