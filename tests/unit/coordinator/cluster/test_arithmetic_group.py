"""Machines that round in the same way: with --exact only they serve together, and a mixed plan is named."""

from __future__ import annotations

from coordinator.cluster.membership import ArithmeticGroup
from mtp.device import unlike_machines

M4, M1 = "metal applegpu_g16s, mlx 0.32.4", "metal applegpu_g13s, mlx 0.32.4"


def test_the_first_machine_sets_the_arithmetic_for_good() -> None:
    group = ArithmeticGroup(exact=True)
    assert group.refusal("mac-1", M4) == ""
    assert group.refusal("mac-2", M4) == ""
    reason = group.refusal("mac-3", M1)
    assert "applegpu_g13s" in reason and "mac-1 as metal applegpu_g16s" in reason
    assert "unknown machine" in group.refusal("old", "")
    assert group.refusal("mac-1", M4) == ""


def test_without_exact_every_machine_takes_part() -> None:
    group = ArithmeticGroup(exact=False)
    assert group.refusal("mac-1", M4) == group.refusal("mac-3", M1) == ""


def test_unlike_machines_are_named_with_their_arithmetic() -> None:
    assert unlike_machines([("a", M4), ("b", M4)]) == ""
    assert unlike_machines([("a", M4), ("b", M1), ("c", M4)]) == f"a, c: {M4}; b: {M1}"
