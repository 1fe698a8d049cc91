"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.planning.groups import MAX_GROUP, Parallel, Prefer
from mtp.checkpoint.hub.resolve import BUILTIN, local_repos
from proto.errors import UsageError

ExactOption = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Compute every token with the same arithmetic, so that drafts, other requests and the number of equal "
        "machines never change an answer. Costs speed on GPUs, most of it for long prompts.",
    ),
]
SlicesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_GROUP,
        help="With --exact: compute every layer in N slices, so that an answer is the same in groups of any size that "
        "divides N. The default is the size of the group that --parallel names.",
    ),
]

MtpOption = Annotated[
    str,
    typer.Option(
        help="Drafts a step: auto, off, a number, or filled: several windows of an answer in flight."
    ),
]
NgramOption = Annotated[
    NgramMode,
    typer.Option(
        help="Drafts from the text itself, which continue an earlier place of the newest tokens, where they pay."
    ),
]
ParallelOption = Annotated[
    str,
    typer.Option(
        metavar="auto|pipeline|tensor|GxN",
        help="How machines share the model: its layers one after another, every layer in one group, or G groups of N "
        "machines. auto takes what --prefer is best with.",
    ),
]
PreferOption = Annotated[
    Prefer, typer.Option(help="The aim of --parallel auto: one stream, or many of them.")
]
DtypeOption = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    typer.Option(help="Compute in this type instead of the stored one."),
]
KvBitsOption = Annotated[Literal["4", "8"] | None, typer.Option(help="Quantize keys and values.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
WorkersOption = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="A worker besides those mDNS finds; repeatable."),
]
NoMdnsOption = Annotated[bool, typer.Option("--no-mdns", help="Use only those of --worker.")]


def complete_model(incomplete: str) -> list[str]:
    """Return the names of the models on this machine that begin with `incomplete`, for a shell's completion."""
    return [name for name in (BUILTIN, *local_repos()) if name.startswith(incomplete)]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A directory, a hub repo, or 'builtin'.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="The same, as an option.", autocompletion=complete_model
    ),
]


def named_model(argument: str | None, option: str | None, default: str = "") -> str:
    """Return the model named by argument or option, or `default`. Raises UsageError without any, or with two."""
    if argument is not None and option is not None:
        raise UsageError(f"name one model, not both {argument!r} and --model {option!r}")
    if not (model := (argument if option is None else option) or default):
        raise UsageError("name one model: a directory, a hub repo, or 'builtin'")
    return model


def checked_slices(
    slices: int | None, exact: bool, parallel: Parallel | None = None, nodes: int | None = None
) -> int:
    """Return the value of --slices. Raises UsageError if it does not suit the flags beside it."""
    parallel = parallel or Parallel()
    if not exact:
        if slices is not None:
            raise UsageError(
                f"--slices {slices} is a part of --exact. Add --exact, or leave it out"
            )
        return 1
    size = parallel.size or min(nodes or 0, MAX_GROUP)
    if slices is None and (not size or parallel.auto):
        raise UsageError(
            f"--parallel {parallel} with --exact needs --slices N: groups of every size that divides N then give the "
            "same answers"
        )
    slices = slices or size
    if parallel.size and slices % parallel.size:
        raise UsageError(
            f"--slices {slices} cannot be shared by groups of {size}. Use a multiple of {size}"
        )
    return slices
