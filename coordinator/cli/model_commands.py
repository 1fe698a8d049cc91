"""`mtp-coord pull` and `inspect`: a model with its head on this machine, and the content of a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.serve.options import ModelOption
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import join_names
from mtp.checkpoint.format.parts import head_norms, missing_from_backbone, report, settle_norms
from mtp.checkpoint.hub.missing_head import fetched_if_possible, missing_head_tensors, repair_hint, with_fetched_head
from mtp.checkpoint.hub.remote_checkpoint import open_model
from mtp.checkpoint.hub.repo import repo_name
from mtp.checkpoint.hub.resolve import find_model, resolve_model
from proto.terminal.options import JsonOption, takes_options
from proto.terminal.progress import byte_bar, format_size


@dataclass(frozen=True)
class InspectOptions:
    """The flags of `mtp-coord inspect`."""

    model: ModelOption
    json: JsonOption = False


@takes_options(InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Show a checkpoint's layers, sizes, quantization and MTP head.

    The last line says whether the head is complete and its norms are right. For a hub repo that is not on this machine,
    only headers are read. mtp-coord plan shows what each machine would hold, and generate how many drafts are accepted.
    """
    model = options.model
    if find_model(model) is None:
        typer.echo(f"{model} is not on this machine: asking the hub for its headers …", err=True)
    checkpoint = open_model(model)
    health = assess_head(checkpoint)
    facts = {**report(checkpoint), "health": asdict(health)}
    if options.json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console(emoji=False)
    console.print(_summary(model, facts))
    console.print(escape(health.verdict), soft_wrap=True)


@dataclass(frozen=True)
class HeadHealth:
    """The verdict on a head. `works` is None where the norms were not read or look wrong."""

    works: bool | None
    verdict: str


def assess_head(checkpoint: Checkpoint) -> HeadHealth:
    """Assess the head of `checkpoint` by its tensors and its norms, without a pass of the model."""
    if missing := missing_from_backbone(checkpoint):
        error = checkpoint.missing_tensors_error(missing)
        return HeadHealth(False, f"this checkpoint cannot run: {error}")
    if checkpoint.config.shape.head is None:
        return HeadHealth(False, "This model has no MTP head. Its drafts come from the text.")
    if not checkpoint.mtp.present:
        return HeadHealth(False, f"head missing. {repair_hint(checkpoint, replace=False)}")
    hint = repair_hint(checkpoint, replace=True)
    if not checkpoint.mtp.complete:
        lacks = missing_head_tensors(checkpoint)
        return HeadHealth(False, f"head incomplete, it lacks {lacks}. {hint}")
    if not checkpoint.path.is_dir():
        repo = checkpoint.path
        verdict = f"head complete. Its norms were not read. Download {repo} first"
        return HeadHealth(None, f"{verdict}: hf download {repo}")
    settled = settle_norms(checkpoint)
    if head_norms(settled) != "as they should be":
        return HeadHealth(None, f"norms look wrong: 1 was added to them twice or never. {hint}")
    if settled is not checkpoint:
        other = "a head of another layout than the model's, whose norms are corrected as it loads"
        return HeadHealth(True, f"head complete: {other}")
    return HeadHealth(True, "head complete, and its norms look right")


_KINDS = {"gdn": "GatedDeltaNet", "attention": "full attention", "window": "attention in a window"}
"""The kinds of layers in words. Others are words."""


def _summary(model: str, facts: dict[str, Any]) -> Table:
    table = Table(title=escape(model), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    kinds, sizes = Counter(facts["layer_kinds"]), facts["bytes"]
    layers = ", ".join(f"{count} {_KINDS.get(kind, kind)}" for kind, count in kinds.items())
    table.add_row("architecture", facts["model_type"])
    table.add_row("layers", f"{facts['num_layers']}: {layers}")
    table.add_row("parameters", f"{facts['parameters']:,}")
    table.add_row("context", f"{facts['max_positions']:,} tokens")
    table.add_row("quantization", _quantization(facts["quantization"]))
    if facts["norms"] != "as stored":
        table.add_row("norms", facts["norms"])
    table.add_row("MTP head", format_size(sizes["mtp"]) if sizes["mtp"] else "none")
    table.add_row("all parts", format_size(sizes["total"]))
    if unknown := facts["unknown_tensors"]:
        names = escape(join_names(unknown))
        table.add_row("unknown", f"[red]{len(unknown)} tensors of no part: {names}[/red]")
    return table


def _quantization(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    text = f"{found['bits']} bit, groups of {found['group_size']}, {found['mode']}"
    overrides = Counter("unquantized" if o is False else f"{o['bits']} bit" for o in found["overrides"].values())
    return "; ".join([text, *(f"{n} modules {what}" for what, n in sorted(overrides.items()))])


@dataclass(frozen=True)
class PullOptions:
    """The flags of `mtp-coord pull`."""

    model: ModelOption
    no_head: Annotated[bool, typer.Option("--no-head", help="Do not look for a head that the repo lacks.")] = False


@takes_options(PullOptions)
def pull(options: PullOptions) -> None:
    """Download a model with its MTP head. After an interruption the next call continues.

    `mtp-coord pull qwen3.8:27b` takes a repo with 4 bits, `qwen3.5:27b-8bit` one with 8. `mtp-coord recommend` lists
    the names. If the repo lacks the head, it is downloaded alone from the model that its card names.
    """
    repo = repo_name(options.model)
    with byte_bar(f"downloading {repo}") as on_progress:
        path = with_fetched_head(resolve_model(repo, on_progress))
    checkpoint = Checkpoint.open(path)
    if not checkpoint.mtp.complete and not options.no_head:
        with byte_bar("downloading the MTP head") as on_progress:
            checkpoint = Checkpoint.open(fetched_if_possible(path, on_progress))
    head = ", with its MTP head" if checkpoint.mtp.complete else ", without its MTP head"
    if checkpoint.config.shape.head is None:
        head = ""
    size = format_size(sum(checkpoint.part_bytes().values()))
    typer.echo(f"{repo}: {size}{head}. Serve it: mtp-coord serve {options.model}")
