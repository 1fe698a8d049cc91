"""`mtp-coord plan MODEL`: the layers of each machine and the expected speed, without loading weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.planning import groups
from coordinator.planning.capacity import plan_capacity
from coordinator.planning.chips import CARDS, card_spec, find_card, mac_specs
from coordinator.planning.groups import ONE_MACHINE
from coordinator.planning.plan import MAX_FREE_NODES, PROMPT_TOKENS, NodeSpec, StagePlan
from coordinator.serve import options
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.checkpoint.hub.known_repos import KNOWN, MLX_LM_MODELS
from mtp.checkpoint.hub.published import MODELS, converted_headers, find_published
from mtp.checkpoint.hub.remote_checkpoint import open_model
from mtp.checkpoint.hub.repo import repo_name
from mtp.checkpoint.hub.resolve import find_model
from mtp.vision.tower import tower_bytes
from proto.errors import ClusterError, UsageError
from proto.span import Span
from proto.terminal.options import JsonOption, Parsed, takes_options
from proto.terminal.progress import format_size, parse_size


@dataclass(frozen=True)
class PlanOptions:
    """The flags of `mtp-coord plan`."""

    model: options.ModelOption
    node: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="NAME=SIZE[,speed=X][,tflops=X][,layers=A-B]",
            help="A machine that may take part; repeatable. Speed 1 reads 100 GB/s, and prompts reach tflops. SIZE may "
            "be an NVIDIA card, as in 'box=RTX 4090'.",
        ),
    ] = ()
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_FREE_NODES, help="Number of equal machines with --memory each."),
    ] = None
    memory: Annotated[
        int | None,
        typer.Option(metavar="SIZE", help="Memory of each of --nodes, or of each --mac instead of the default."),
        Parsed(parse_size),
    ] = None
    mac: Annotated[
        tuple[str, ...],
        typer.Option(metavar="'M4 Pro 64GB'", help="A Mac by its chip and memory; repeatable."),
    ] = ()
    bits: Annotated[
        int | None,
        typer.Option(help="Plan a conversion of a published model with these bits: no download."),
        Parsed(int, Literal["2", "3", "4", "5", "6", "8", "16"]),
    ] = None
    mtp: Annotated[int, typer.Option(min=0, max=8, help="Drafts a step that the last stage is charged for.")] = 1
    sequences: Annotated[int, typer.Option(min=1, help="Requests at once, at most.")] = 16
    context: Annotated[int, typer.Option(min=1, help="Tokens that every plan must have room for.")] = 4096
    dtype: options.DtypeOption = None
    kv_bits: options.KvBitsOption = None
    parallel: options.ParallelOption = options.ONE_PIPELINE
    sum_us: Annotated[
        float,
        typer.Option(min=0, help="Microseconds of a sum over the machines of a group, by its link."),
    ] = groups.DEFAULT_COLLECTIVE * 1e6
    json: JsonOption = False


@takes_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show how a model would be split over your Macs, and the predicted speed. Reads headers only, no weights.

    The machines are those of --mac, --node, and --nodes with --memory. The times are those of reading the active
    weights at each machine's bandwidth, and for a Mac of its launches, within a third of what people measured. A table
    compares one machine, a pipeline and groups of equal machines that share every layer.
    `mtp-coord plan qwen3.5:397b-a17b --bits 4 --mac "M4 Max 128GB" --mac "M3 Ultra 256GB"` needs no download.
    """
    specs = given_nodes(options)
    checkpoint = _checkpoint(options)
    if missing := missing_from_backbone(checkpoint):
        raise checkpoint.missing_tensors_error(missing)
    facts = answer(checkpoint, specs, options)
    if options.json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(options.model, facts)


def _checkpoint(options: PlanOptions) -> Checkpoint:
    """Return the model of the plan: with --bits, and of a known repo that is not here, by the shape in this program."""
    if options.bits is None:
        repo = repo_name(options.model)
        known = next((one for one in KNOWN if one.name == repo), None)
        shape = find_published(repo)
        if known is None or shape is None or find_model(repo) is not None:
            return open_model(options.model)
        head = ". serve fetches the head that the repo lacks" * (not known.head and shape in MODELS)
        typer.echo(
            f"{repo} is not on this machine. The plan uses the shape that comes with this program{head}.", err=True
        )
        return converted_headers(shape, known.bits)
    model = find_published(options.model)
    if model is None:
        names = ", ".join([*(one.name for one in MODELS), *(one.name for one in MLX_LM_MODELS)])
        raise UsageError(
            f"--bits needs a published model, and {options.model!r:.80} is none of {names}. Leave out --bits to plan "
            "any other checkpoint"
        )
    return converted_headers(model, options.bits if options.bits < 16 else None)


def given_nodes(options: PlanOptions) -> list[NodeSpec]:
    """Return the machines of --node, --nodes and --mac. Raises UsageError without one."""
    if (options.nodes is None) != (options.memory is None) and not (options.memory and options.mac):
        raise UsageError("--nodes and --memory go together, as in --nodes 3 --memory 64GB")
    specs = [parse_node(text) for text in options.node]
    specs += [replace(spec, memory_limit=options.memory or spec.memory_limit) for spec in mac_specs(options.mac)]
    if options.nodes is not None and options.memory is not None:
        specs += [NodeSpec(f"node-{i}", options.memory) for i in range(1, options.nodes + 1)]
    if not specs:
        raise UsageError("no machine to plan for. Name some, as in --mac 'M4 Pro 64GB' or --nodes 2 --memory 64GB")
    return specs


def parse_node(text: str) -> NodeSpec:
    """Return the machine in `NAME=SIZE[,speed=X][,tflops=X][,layers=A-B]`. Raises UsageError, SpanError for layers."""
    name, equals, rest = text.partition("=")
    size, *settings = rest.split(",")
    if not (name.strip() and equals and size):
        raise UsageError(f"--node {text!r:.80}: write NAME=SIZE, as in mac-1=64GB,speed=2")
    if card := find_card(size):
        spec = card_spec(name.strip(), card)
    elif size.strip()[:1].isdigit():
        spec = NodeSpec(name.strip(), parse_size(size))
    else:
        raise UsageError(f"--node {text!r:.80}: not a size such as 64GB, and not a known card: {', '.join(CARDS)}")
    for setting in settings:
        key, _, value = setting.partition("=")
        match key.strip():
            case "speed":
                spec = replace(spec, speed=_number(name, setting))
            case "tflops":
                spec = replace(spec, operations=_number(name, setting) * 1e12)
            case "layers":
                spec = replace(spec, pinned=Span.parse(value))
            case other:
                raise UsageError(f"--node {name}: {other!r:.40} is neither speed, tflops nor layers")
    return spec


def _number(name: str, setting: str) -> float:
    try:
        return float(setting.partition("=")[2])
    except ValueError:
        raise UsageError(f"--node {name}: {setting!r:.40} has no number. Write it as in speed=2") from None


def answer(checkpoint: Checkpoint, specs: Sequence[NodeSpec], options: PlanOptions) -> dict[str, Any]:
    """Return the object that --json prints. Sizes are bytes, times are seconds."""
    planning = groups.Planning.of(
        checkpoint,
        options.context,
        draft_depth=options.mtp,
        parallel=options.parallel,
        collective=options.sum_us / 1e6,
        dtype=options.dtype,
        kv_bits=options.kv_bits,
        with_head=options.mtp > 0,
    )
    machines = groups.plan_machines(specs)
    found = groups.choose_plan(planning, machines, 1)
    costs, longest = planning.costs_of(found.group_size), checkpoint.config.max_positions
    capacity = plan_capacity(costs, found.stages, longest, options.sequences)
    pinned = any(spec.pinned for spec in specs)
    candidates = [] if pinned else groups.predict_plans(planning, machines)
    fastest = min(candidates, key=lambda one: one.fastest, default=None)
    return {
        "candidates": [
            {
                "plan": one.text,
                "token_seconds": one.token,
                "drafted_seconds": min(one.drafted, default=None),
                "first_token_seconds": one.plan.first_token_seconds,
                "weight_bytes": max(stage.weight_bytes for stage in one.plan.stages),
            }
            for one in candidates
        ],
        "fastest": fastest.text if fastest else None,
        "no_group": _why_no_group(planning, machines, candidates),
        "accepted": costs.accepted,
        "head": checkpoint.mtp.complete,
        "machines": len(found.nodes),
        "drafts": options.mtp if checkpoint.mtp.complete else 0,
        "slowest_seconds": found.slowest_seconds,
        "pass_seconds": found.pass_seconds,
        "first_token_seconds": found.first_token_seconds,
        "capacity": asdict(capacity),
        "unused": list(found.unused),
        "reason": found.reason,
        "sequences": options.sequences,
        "rows_on_disk": checkpoint.disk_bytes,
        "vision_bytes": tower_bytes(checkpoint),
        "stages": [_stage_facts(stage) for stage in found.stages],
    }


def _why_no_group(
    planning: groups.Planning, machines: Sequence[groups.Machine], found: Sequence[groups.Prediction]
) -> str:
    """Return why none of the plans `found` for several machines is a group; empty if one is."""
    if len(machines) == 1 or not found or any(one.plan.group_size > 1 for one in found):
        return ""
    try:
        groups.choose_plan(replace(planning, parallel=groups.Parallel.parse("tensor")), machines, 1)
    except ClusterError as error:
        return str(error)
    return ""


def _stage_facts(stage: StagePlan) -> dict[str, Any]:
    ends = [("embedding", stage.first), ("lm_head", stage.last)]
    return {
        "node": " + ".join(stage.nodes),
        "layers": str(stage.span),
        "ends": [name for name, has in ends if has],
        "weight_bytes": stage.weight_bytes,
        "cache_bytes": stage.cache_bytes,
        "memory_limit": stage.memory_limit,
        "predicted_seconds": stage.predicted_seconds,
    }


def _print(model: str, facts: dict[str, Any]) -> None:
    console = Console(emoji=False)
    stages = facts["stages"]
    count = facts["machines"]
    title = f"{escape(model)} on {count} machine{'s' * (count > 1)}"
    table = Table(title=title, title_justify="left")
    for heading in ("node", "layers", "weights", "caches", "limit", "a pass", "and"):
        table.add_column(heading, justify="left" if heading in ("node", "and") else "right")
    for stage in stages:
        sizes = (stage["weight_bytes"], stage["cache_bytes"], stage["memory_limit"])
        seconds, ends = _milliseconds(stage["predicted_seconds"]), ", ".join(stage["ends"])
        name, layers = escape(stage["node"]), stage["layers"]
        table.add_row(name, layers, *map(format_size, sizes), seconds, ends)
    console.print(table)
    slowest, whole = facts["slowest_seconds"], facts["pass_seconds"]
    drafting = f", drafting {facts['drafts']} ahead" if facts["head"] else ""
    console.print(
        f"One token through all stages: {_milliseconds(whole)}. Slowest stage: {_milliseconds(slowest)}{drafting}."
    )
    if first := facts["first_token_seconds"]:
        console.print(f"First token of a prompt of {PROMPT_TOKENS:,} tokens: {first:.2g} s.")
    if not facts["head"]:
        console.print("Without an MTP head it drafts from repeated text alone.")
    room = facts["capacity"]
    fewer = f" of the {facts['sequences']} asked for" * (room["sequences"] < facts["sequences"])
    console.print(
        f"Room for {room['sequences']} requests{fewer} with {room['kv_tokens']:,} tokens between them, "
        f"and {format_size(room['prefix_bytes'])} of prefixes a stage."
    )
    if facts["reason"]:
        console.print(f"{facts['reason'].capitalize()}.")
    if facts["candidates"]:
        _print_candidates(console, facts["candidates"], facts["accepted"])
        if facts["fastest"] == ONE_MACHINE and len(facts["candidates"]) > 1:
            console.print(f"One answer is fastest on {ONE_MACHINE}. More add room, and serve more answers at once.")
    if facts["no_group"]:
        console.print(f"No group: {escape(facts['no_group'])}", highlight=False)
    if facts["candidates"] and all(one["plan"] != ONE_MACHINE for one in facts["candidates"]):
        console.print(f"Not {ONE_MACHINE}: none has room for the model.")
    if facts["rows_on_disk"]:
        size = format_size(facts["rows_on_disk"])
        console.print(f"Rows of n-grams: {size} on the first machine's disk, and not in memory.")
    if facts["vision_bytes"]:
        size = format_size(facts["vision_bytes"])
        console.print(f"Images: the coordinator's machine reads them with {size} more.")
    if facts["unused"]:
        console.print(f"Not used: {escape(', '.join(facts['unused']))}.")


def _print_candidates(console: Console, candidates: Sequence[dict[str, Any]], accepted: Sequence[float]) -> None:
    title = f"Tokens/s of one stream, as predicted. Of drafts {accepted[0]:g} to {accepted[-1]:g} are accepted"
    table = Table(title=title, title_justify="left")
    table.add_column("--parallel")
    for heading in ("plain", "with drafts", "first token", "weights of a machine"):
        table.add_column(heading, justify="right")
    for one in candidates:
        speeds = [
            f"{1 / seconds:.3g}" if seconds else "-" for seconds in (one["token_seconds"], one["drafted_seconds"])
        ]
        first = f"{one['first_token_seconds']:.2g} s" if one["first_token_seconds"] else "-"
        table.add_row(one["plan"], *speeds, first, format_size(one["weight_bytes"]))
    console.print(table)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
