"""Reasoning effort: the levels that clients send, as a switch of the chat template and a budget of tokens."""

from __future__ import annotations

from typing import Literal

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

BUDGETS = {"minimal": 256, "low": 1024, "medium": 8192}
"""Tokens. Maximum reasoning per level. `high` and `xhigh` have no limit of their own."""


def reasoning_of(effort: ReasoningEffort | None) -> tuple[bool | None, int | None]:
    """Return whether the model reasons, None for the template's default, and the maximum number of reasoning tokens."""
    if effort is None:
        return None, None
    if effort == "none":
        return False, None
    return True, BUDGETS.get(effort)
