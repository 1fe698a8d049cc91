"""The flag `--draft-vocab` of the commands that generate."""

from __future__ import annotations

from typing import Annotated

import typer

DraftVocabOption = Annotated[
    str,
    typer.Option(
        metavar="N|auto|off",
        help="Draft from the tokenizer's N lowest tokens and the words of recent texts only, which reads less of "
        "lm_head for each draft. auto does so while it pays. Answers do not change.",
    ),
]
