"""`mtp-coord inspect MODEL`: the content of a checkpoint, its MTP head, and its cut over equal machines."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.cli.model_argument import ModelArgument, ModelOption, required_model
from coordinator.local_engine.head_trial import HeadAssessment, assess_head
from coordinator.planning.even_cut import even_spans
from mtp.checkpoint.format.names import join_names
from mtp.checkpoint.format.report import report
from mtp.checkpoint.hub.remote_checkpoint import open_model
from mtp.checkpoint.hub.resolve import find_model
from proto.terminal.progress_bar import byte_bar
from proto.terminal.size import format_size


def inspect(
    argument: ModelArgument = None,
    option: ModelOption = None,
    nodes: Annotated[
        int,
        typer.Option(min=1, help="Show what each of N equal nodes would hold, drafts not charged."),
    ] = 1,
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Read headers only, and do not try the head.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a checkpoint's layers, sizes, quantization and MTP head.

    The last line says whether drafting with the head will work. If this machine can hold the model, the head was tried
    on a short prompt. For a hub repo that is not on this machine, only headers are read.

    --nodes cuts for equal machines without memory limits, and ignores the time of drafts. mtp-coord plan and serve
    use each machine's memory and speed, and the time of drafts, so their cuts may differ.
    """
    model = required_model(argument, option)
    if find_model(model) is None:
        typer.echo(f"{model} is not on this machine: asking the hub for its headers …", err=True)
    checkpoint = open_model(model)
    cut = even_spans(checkpoint, nodes, "--nodes")
    with byte_bar("loading for a trial") as on_progress:
        assessment = assess_head(checkpoint, trial=not no_trial, on_progress=on_progress)
    facts = {**report(checkpoint, cut), "health": _health(assessment)}
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console(emoji=False)
    console.print(_summary(model, facts))
    console.print(_node_table(facts))
    console.print(_COLOURS[assessment.works] + escape(assessment.verdict), soft_wrap=True)


def _health(assessment: HeadAssessment) -> dict[str, Any]:
    trial = assessment.trial
    return {
        "works": assessment.works,
        "verdict": assessment.verdict,
        "head_norms": assessment.norms,
        "acceptance": None if trial is None else [round(share, 3) for share in trial.acceptance],
    }


_COLOURS = {True: "[green]", False: "[red]", None: "[yellow]"}


def _summary(model: str, facts: dict[str, Any]) -> Table:
    table = Table(title=escape(model), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    kinds = Counter(facts["layer_kinds"])
    sizes = facts["bytes"]
    table.add_row("architecture", facts["model_type"])
    table.add_row(
        "layers",
        f"{facts['num_layers']}: {kinds['gdn']} GatedDeltaNet, {kinds['attention']} full attention",
    )
    table.add_row("parameters", f"{facts['parameters']:,}")
    table.add_row("context", f"{facts['max_positions']:,} tokens")
    table.add_row(
        "stored as", ", ".join(f"{d} {format_size(n)}" for d, n in facts["dtypes"].items())
    )
    quantization = _quantization(facts["quantization"])
    if method := facts["packed_by"]:
        quantization = f"{method}, repacked for MLX while loading"
    table.add_row("quantization", quantization)
    for part, packed in facts["packed"].items():
        table.add_row(f"  {part}", ", ".join(_counted(n, what) for what, n in packed.items()))
    table.add_row("norms", _NORMS[facts["norms"]])
    table.add_row("MTP head", _mtp(facts["mtp"]))
    table.add_row("embedding", format_size(sizes["embed"]))
    table.add_row("a layer", _range(sizes["layers"]))
    table.add_row(
        "lm_head", "tied" if facts["tie_word_embeddings"] else format_size(sizes["lm_head"])
    )
    table.add_row("MTP", format_size(sizes["mtp"]))
    table.add_row("all parts", format_size(sizes["total"]))
    if sizes["vision"]:
        table.add_row("vision", f"{format_size(sizes['vision'])}, not used")
    if missing := facts["missing_tensors"]:
        table.add_row(
            "incomplete", f"[red]{_tensors(missing)} missing: {escape(join_names(missing))}[/red]"
        )
    if unknown := facts["unknown_tensors"]:
        table.add_row(
            "unknown", f"[red]{_tensors(unknown)} of no part: {escape(join_names(unknown))}[/red]"
        )
    return table


def _tensors(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)}"


def _counted(count: int, packed: str) -> str:
    return f"{count} {packed}" if packed == "unquantized" else f"{count} at {packed}"


_NORMS = {
    "raw": "raw (offsets from 1, as Qwen publishes them)",
    "shifted": "shifted (as used; converted for MLX)",
}


def _quantization(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    text = f"{found['bits']} bit, groups of {found['group_size']}, {found['mode']}"
    overrides = Counter(
        "unquantized" if o is False else f"{o['bits']} bit" for o in found["overrides"].values()
    )
    return "; ".join([text, *(f"{n} modules {what}" for what, n in sorted(overrides.items()))])


def _mtp(mtp: dict[str, Any]) -> str:
    missing = mtp["missing"]
    if mtp["complete"]:
        return "complete"
    if mtp["present"]:
        return f"[red]incomplete[/red]: {_tensors(missing)} missing: {escape(join_names(missing))}"
    if mtp["announced"]:
        return "[yellow]none[/yellow]: config.json announces one, its tensors are missing"
    return "none"


def _node_table(facts: dict[str, Any]) -> Table:
    title = f"what each of {len(facts['nodes'])} equal nodes would hold"
    table = Table(title=title, title_justify="left")
    for heading in ("stage", "layers", "GDN", "attention", "size"):
        table.add_column(heading, justify="right")
    table.add_column("and")
    for node in facts["nodes"]:
        row = [
            node["stage"],
            node["layers"],
            node["gdn"],
            node["attention"],
            format_size(node["bytes"]),
        ]
        table.add_row(*map(str, row), ", ".join(node["ends"]))
    return table


def _range(sizes: list[int]) -> str:
    smallest, largest = format_size(min(sizes)), format_size(max(sizes))
    return smallest if smallest == largest else f"{smallest} to {largest}"
