"""Tests of the controller on a simulated machine: known costs, known acceptance, noisy timings, no clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from coordinator.drafts.averages import (
    Acceptance,
    DraftResult,
    Shape,
    StepCost,
    StepCosts,
    expected_tokens,
)
from coordinator.drafts.controller import AUTO_DEPTH, Controller, MtpMode
from proto.errors import UsageError

COSTS = {
    "dear": (1.0, 1.9, 2.8, 3.7, 4.6, 5.5, 6.4, 7.3),  # a CPU: every row costs almost a pass
    "middling": (1.0, 1.45, 1.85, 2.3, 2.75, 3.2, 3.65, 4.1),
    "cheap": (
        1.0,
        1.2,
        1.3,
        1.45,
        1.6,
        1.75,
        1.9,
        2.05,
    ),  # an M4: rows share the reading of the weights
    "stairs": (1.0, 1.7, 1.75, 1.8, 1.85, 1.9, 1.95, 2.0),  # another kernel from two rows on
}
LAST_INTERVAL = 320
"""Steps. A shape whose trial loses little has a probe within this time."""

CHANCES = {
    "published": (0.84, 0.65, 0.49, 0.30, 0.25, 0.2, 0.2),
    "steady": (0.84, 0.78, 0.75, 0.70, 0.68, 0.66, 0.65),
    "great": (0.97, 0.95, 0.94, 0.93, 0.92, 0.92, 0.91),
    "poor": (0.30, 0.20, 0.20, 0.10, 0.1, 0.1, 0.1),
    "none": (0.02,) * 7,
}
DRAFT_COST = 0.05
"""Cost of one draft over a plain step; contained in COSTS."""


@dataclass(frozen=True)
class Run:
    """The value of the choices of one simulation, and the choices: (tokens so far, depth) per step."""

    tokens_per_second: float
    steps: list[tuple[int, int]]

    def share(self, depth: int, first: int, last: int) -> float:
        """Return the share of the steps between two token counts that drafted `depth`."""
        depths = [d for tokens, d in self.steps if first <= tokens < last]
        return depths.count(depth) / len(depths)


def drafts(width: int, accepted_length: int) -> list[DraftResult]:
    """Return the draft results of a window with `accepted_length` accepted tokens."""
    return [DraftResult(number, number < accepted_length) for number in range(1, width)]


def simulate(
    controller: Controller,
    costs: Sequence[float],
    chances: Callable[[int], Sequence[float]],
    tokens: int,
    seed: int,
    hiccups: float = 0.02,
    slowdown: Callable[[int], float] = lambda tokens: 1.0,
) -> Run:
    """Decode `tokens` tokens. `chances(t)` and `slowdown(t)` hold from token t on.

    Timings scatter by 5 %, and a share `hiccups` of them takes three times as long. The rate is that of the *choices*:
    expected tokens over expected cost, without the luck of the draws.
    """
    rng = random.Random(seed)
    yielded = spent = 0.0
    done, width = 0, 1
    steps = []
    while done < tokens:
        now = chances(done)
        depth = controller.choose_shape().depth
        accepted_length = 1
        while accepted_length < width and rng.random() < now[accepted_length - 1]:
            accepted_length += 1
        cost = costs[width - 1] + DRAFT_COST * (depth - (width - 1))
        noise = math.exp(rng.gauss(0, 0.05)) * (3 if rng.random() < hiccups else 1)
        seconds = cost * noise * slowdown(done)
        ahead = depth == width - 1 == 0
        controller.record_step_cost(1, 1, width, depth, Shape(width), StepCost(seconds, ahead=ahead))
        controller.record_drafts(drafts(width, accepted_length))
        yielded += expected_tokens(now[: width - 1])
        spent += cost
        done += accepted_length
        steps.append((done, depth))
        width = depth + 1
    return Run(yielded / spent, steps)


def best_fixed(costs: Sequence[float], chances: Sequence[float]) -> float:
    """Return the tokens per second of the best fixed depth."""
    return max(expected_tokens(chances[:d]) / costs[d] for d in range(AUTO_DEPTH + 1))


def auto() -> Controller:
    """Return a controller in `auto` mode."""
    return Controller(MtpMode.parse("auto"))


@pytest.mark.parametrize("profile", CHANCES)
@pytest.mark.parametrize("machine", COSTS)
def test_auto_comes_within_three_percent_of_the_best_fixed_depth(machine: str, profile: str) -> None:
    """From a cold start, 2,000 tokens take at most 3 % longer than with the best fixed depth.

    This is the mean of ten runs, exploration included. No run loses more than 10 %.
    """
    costs, chances = COSTS[machine], CHANCES[profile]
    best = best_fixed(costs, chances)
    rates = [simulate(auto(), costs, lambda _: chances, 2000, seed).tokens_per_second / best for seed in range(10)]
    assert sum(rates) / len(rates) > 0.97, rates
    assert min(rates) > 0.90, rates


def test_auto_finds_the_best_depth_despite_hiccups() -> None:
    """With one timing in ten tripled, `auto` spends most of its steps at the best depth or an equal one."""
    run = simulate(auto(), COSTS["cheap"], lambda _: CHANCES["great"], 2000, 3, hiccups=0.1)
    assert run.share(6, 500, 2000) + run.share(7, 500, 2000) > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_of_acceptance_turns_drafting_off(seed: int) -> None:
    """Within 150 tokens after drafts stop being accepted, plain decoding is in use again.

    Later probes take less than 15 % of the steps.
    """

    def chances(tokens: int) -> Sequence[float]:
        return CHANCES["steady"] if tokens < 1000 else CHANCES["none"]

    run = simulate(auto(), COSTS["middling"], chances, 3000, seed)
    assert run.share(0, 500, 1000) < 0.1
    assert run.share(0, 1150, 3000) > 0.85


@pytest.mark.parametrize("seed", range(5))
def test_a_rise_of_acceptance_turns_drafting_on_again(seed: int) -> None:
    """Drafting that pays again is in use at the latest one probe interval later."""
    change = 2000

    def chances(tokens: int) -> Sequence[float]:
        return CHANCES["none"] if tokens < change else CHANCES["steady"]

    run = simulate(auto(), COSTS["cheap"], chances, change + LAST_INTERVAL + 700, seed)
    assert run.share(0, change - 500, change) > 0.8
    assert run.share(0, change + LAST_INTERVAL + 100, change + LAST_INTERVAL + 700) < 0.1


def test_probes_grow_rare() -> None:
    """If nothing changes, less than 2 % of the steps between token 4,000 and 8,000 leave the depth in use."""
    run = simulate(auto(), COSTS["dear"], lambda _: CHANCES["poor"], 8000, 1)
    assert run.share(0, 4000, 8000) > 0.98


def test_a_first_impression_of_plain_decoding_is_corrected() -> None:
    """A wrong first measurement of plain decoding is corrected.

    Everything takes five times as long while plain decoding is first timed, so drafting looks cheap. Plain decoding is
    timed again, and is in use before 200 tokens are emitted.
    """
    run = simulate(
        auto(),
        COSTS["dear"],
        lambda _: CHANCES["poor"],
        2000,
        seed=4,
        slowdown=lambda tokens: 5.0 if tokens < 4 else 1.0,
    )
    assert run.share(0, 6, 30) < 0.1
    assert run.share(0, 200, 2000) > 0.9


def test_a_hot_chip_is_measured_again() -> None:
    """Costs of a cold chip do not last: once wide windows cost more, the best depth is in use again.

    From token 800 on, each further row costs 1.5 times as much. Over the next 3,200 tokens the choices lose at most 4 %
    to the best fixed depth, in the mean of six runs.
    """
    cold, chances = COSTS["dear"], CHANCES["great"]
    hot = [1 + 1.5 * (cost - 1) for cost in cold]
    rates = []
    for seed in range(6):
        controller = auto()
        simulate(controller, cold, lambda _: chances, 800, seed)
        rate = simulate(controller, hot, lambda _: chances, 3200, seed + 10).tokens_per_second
        rates.append(rate / best_fixed(hot, chances))
    assert sum(rates) / len(rates) > 0.96, rates


def test_a_fixed_mode_is_obeyed() -> None:
    """`--mtp 3` drafts 3 at any cost, and `--mtp off` drafts none."""
    for text, depth in (("3", 3), ("off", 0), ("0", 0)):
        controller = Controller(MtpMode.parse(text))
        controller.record_step_cost(1, 1, 4, 3, Shape(4), StepCost(100.0))
        assert [controller.choose_shape().depth for _ in range(5)] == [depth] * 5


@pytest.mark.parametrize("text", ["", "on", "-1", "1.5", "9", "²", "10000000000"])
def test_mode_refuses_anything_else(text: str) -> None:
    """The error names the flag and the accepted values."""
    with pytest.raises(UsageError, match=r"--mtp .* auto, off, filled, or a number"):
        MtpMode.parse(text)


def test_acceptance_is_conditional_on_the_drafts_before() -> None:
    """A draft after a rejected one has no verdict, so it does not count for its position."""
    estimate = Acceptance()
    for _ in range(500):
        estimate.record_drafts(drafts(4, 3))  # two drafts right, the third wrong
        estimate.record_drafts(drafts(4, 1))  # the first wrong already
    first, second, third = estimate.by_position(3)
    assert first == pytest.approx(0.5, abs=0.05)
    assert second == pytest.approx(1.0, abs=0.05)
    assert third == pytest.approx(0.0, abs=0.1)


def test_hiccups_do_not_push_a_cost_up() -> None:
    """With one step in twenty three times as long, the cost of the width in use stays the same."""
    costs = StepCosts()
    for number in range(2000):
        costs.record_step(2, 1, StepCost(3.9 if number % 20 == 7 else 1.3), Shape(2))
        assert number < 3 or costs.seconds(2, 1) == 1.3


def test_plain_steps_beside_prompts_do_not_show_the_cost_of_plain_decoding() -> None:
    """Sixteen streams whose plain steps take twice as long while prompts arrive never draft for more than one trial.

    A step with a draft takes 1.5 times as long as a plain step that runs ahead, and yields 1.3 times the tokens.
    """
    controller, width, drafted = auto(), 1, 0
    for step in range(200):
        ahead = step >= 20 and width == 1
        depth = controller.choose_shape(16).depth
        cost = StepCost(1 + 0.5 * (width - 1) + (not ahead), ahead=ahead and not depth)
        controller.record_step_cost(16, 1, 16 * width, depth, Shape(width), cost)
        controller.record_drafts(drafts(width, 1 + (step % 10 < 3)))
        width, drafted = depth + 1, drafted + (depth > 0)
    assert drafted <= 8


def test_a_step_of_fewer_sequences_counts_with_the_rows_that_it_lacks() -> None:
    """A shape that was timed while ten of sixteen answers were left has the cost for sixteen."""
    costs = StepCosts(16)
    for sequences, width in ((16, 1),) * 3 + ((16, 2),) * 3 + ((10, 4),) * 3:
        seconds = 1 + 0.1 * sequences * width
        costs.record_step(width, width - 1, StepCost(seconds), Shape(width), 16 - sequences)
    assert costs.seconds(4, 3) == pytest.approx(1 + 0.1 * 16 * 4)


def test_a_cost_follows_from_other_widths_until_it_is_measured() -> None:
    """It lies between the widths beside it. Half of the last slope continues beyond the widest one."""
    costs = StepCosts()
    for width, seconds in ((1, 1.0), (3, 1.4)) * 3:
        costs.record_step(width, width - 1, StepCost(seconds), Shape(width))
    assert costs.seconds(2, 1) == pytest.approx(1.2)
    assert costs.seconds(5, 4) == pytest.approx(1.6)
    for _ in range(3):
        costs.record_step(5, 4, StepCost(3.0), Shape(5))
    assert costs.seconds(5, 4) == 3.0


def test_several_stages_show_the_cost_of_drafts() -> None:
    """Only the last stage drafts, so a shape with more drafts is expected to cost more."""
    costs = StepCosts()
    for drafts in (0, 2) * 3:
        stages = (1.0, 1.0 + 0.2 * drafts)
        costs.record_step(1, drafts, StepCost(sum(stages), stages=stages), Shape(1, 3))
    assert costs.seconds(1, 5) == pytest.approx(3.0)
    assert costs.interval(Shape(1, 6)) == pytest.approx(2.0)


def test_plain_decoding_keeps_its_cost_while_drafts_are_in_use() -> None:
    """A single plain step after a long time leaves it measured, or drafts that cost more could stay in use."""
    costs = StepCosts(8)
    plain, drafted = StepCost(1.0, ahead=True), StepCost(3.0)
    for width, cost, count in ((1, plain, 3), (2, drafted, 100), (1, plain, 1)):
        for _ in range(count):
            costs.record_step(width, width - 1, cost, Shape(width))
        assert costs.is_measured(Shape(1)) and costs.seconds(1, 0) == 1.0


def test_wide_windows_of_a_few_sequences_allow_no_wide_trial() -> None:
    """While others arrive, steps have few windows of drafts. They do not show what windows for all would cost."""
    costs = StepCosts(8)
    for width, count in ((1, 3), (4, 3)):
        for _ in range(count):
            costs.record_step(width, 0, StepCost(float(width)), Shape(1))
    assert costs.widest == 1


def test_slow_first_steps_are_no_cost() -> None:
    """Two of three first steps may compile kernels. Seven slow steps show that the machine is slow."""
    costs = StepCosts()
    for seconds in (9.0, 8.0, 1.0, 1.1):
        costs.record_step(2, 1, StepCost(seconds), Shape(2))
        assert not costs.is_measured(Shape(2))
    costs.record_step(2, 1, StepCost(1.2), Shape(2))
    assert costs.seconds(2, 1) == pytest.approx(1.1)
    for _ in range(7):
        costs.record_step(2, 1, StepCost(8.0), Shape(2))
    assert costs.seconds(2, 1) == 8.0
