"""The flag `--exact` of the commands that generate."""

from __future__ import annotations

from typing import Annotated

import typer

from proto.errors import UsageError
from proto.params import Acceptance

ExactOption = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Compute every token with the same arithmetic, so that drafts, other requests and the number of equal "
        "machines never change an answer. Costs speed on GPUs, most of it for long prompts.",
    ),
]


def checked_exact(exact: bool, acceptance: Acceptance) -> bool:
    """Return `exact`. Raises UsageError together with the ratio rule, whose tokens depend on the drafts."""
    if exact and acceptance == "ratio":
        raise UsageError(
            "--exact with --acceptance ratio: under this rule the tokens depend on the drafts. Use coupled"
        )
    return exact
