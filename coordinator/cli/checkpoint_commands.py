"""`mtp-coord models`, `inspect`, `convert` and `add-mtp`: checkpoints and their MTP heads."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.api.model_catalog import list_models
from coordinator.schedule.local_generator import missing_head_tensors, repair_hint
from coordinator.serve.options import ModelOption
from mtp.checkpoint.convert.add_head import HeadAddition, plan_head_addition
from mtp.checkpoint.convert.convert import (
    HEAD_FILE,
    FloatType,
    Mode,
    Quantization,
    Settings,
)
from mtp.checkpoint.convert.convert import convert as convert_checkpoint
from mtp.checkpoint.convert.foreign import open_source, plan_packed
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import is_head, join_names
from mtp.checkpoint.format.parts import head_norms, missing_from_backbone, report, settle_norms
from mtp.checkpoint.hub.remote_checkpoint import fetch_head, open_model, open_remote
from mtp.checkpoint.hub.repo import HubRepo
from mtp.checkpoint.hub.resolve import find_model, resolve_model
from proto.errors import UsageError
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


def _summary(model: str, facts: dict[str, Any]) -> Table:
    table = Table(title=escape(model), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    kinds, sizes = Counter(facts["layer_kinds"]), facts["bytes"]
    layers = f"{kinds['gdn']} GatedDeltaNet, {kinds['attention']} full attention"
    table.add_row("architecture", facts["model_type"])
    table.add_row("layers", f"{facts['num_layers']}: {layers}")
    table.add_row("parameters", f"{facts['parameters']:,}")
    table.add_row("context", f"{facts['max_positions']:,} tokens")
    table.add_row("quantization", _quantization(facts["quantization"]))
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
    overrides = Counter(
        "unquantized" if o is False else f"{o['bits']} bit" for o in found["overrides"].values()
    )
    return "; ".join([text, *(f"{n} modules {what}" for what, n in sorted(overrides.items()))])


REMOVED = {
    "--mtp-bits N": "Convert the raw checkpoint with -q and other --q-bits, and take its head by mtp-coord add-mtp "
    "--replace.",
    "--mtp-dtype TYPE": "Use convert --dtype, which is for the head too.",
    "--quant-predicate RECIPE": "Use mlx_lm.convert with it, then mtp-coord add-mtp.",
}
"""Flags of earlier releases of convert and add-mtp, and what to use instead."""


@dataclass(frozen=True)
class ConvertOptions:
    """The flags of `mtp-coord convert`."""

    hf_path: Annotated[
        str,
        typer.Option(
            "--hf-path", "--model", help="What to convert: a directory, a hub repo, or 'builtin'."
        ),
    ]
    mlx_path: Annotated[Path, typer.Option(help="New directory to write.")] = Path("mlx_model")
    quantize: Annotated[bool, typer.Option("-q", "--quantize", help="Quantize weights.")] = False
    q_bits: Annotated[int | None, typer.Option(help="Bits per weight.  [default: 4]")] = None
    q_group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale.  [default: 64]")
    ] = None
    q_mode: Annotated[Mode, typer.Option(help="How weights are packed.")] = "affine"
    dtype: Annotated[
        FloatType | None,
        typer.Option(
            help="Type of what is not quantized: float16 for an M1, whose GPU has no bfloat16.  "
            "[default: as stored]"
        ),
    ] = None
    keep_vision: Annotated[
        bool, typer.Option("--keep-vision/--drop-vision", help="Keep the part that reads images.")
    ] = True

    def settings(self) -> Settings:
        """Return the settings of the conversion. Raises UsageError for flags that need --quantize."""
        mode = None if self.q_mode == "affine" else self.q_mode
        given = {"--q-bits": self.q_bits, "--q-group-size": self.q_group_size, "--q-mode": mode}
        for flag, value in given.items():
            if value is not None and not self.quantize:
                raise UsageError(f"{flag} needs --quantize")
        packing = Quantization.of(self.q_bits, self.q_group_size, self.q_mode)
        return Settings(packing if self.quantize else None, self.dtype, self.keep_vision)


@takes_options(ConvertOptions, REMOVED)
def convert(options: ConvertOptions) -> None:
    """Convert a checkpoint for MLX, and keep its MTP head and its vision part.

    The output works here and in mlx-lm, which ignores the head. Converting needs the memory of the largest layer's
    experts, not of the model.

    Weights that another program packed as integers (GPTQ, AutoRound) keep their codes. FP8 and NVFP4 are
    dequantized, and -q quantizes them.

    `mtp-coord convert --hf-path Qwen/Qwen3.5-27B --mlx-path Qwen3.5-27B-4bit -q`
    """
    settings = options.settings()
    source = open_source(resolve_model(options.hf_path))
    with byte_bar("converting") as on_progress:
        outcome = convert_checkpoint(source, options.mlx_path, settings, on_progress)
    typer.echo(f"{outcome.path}: {format_size(outcome.nbytes)}")
    kept = f"kept. mtp-coord inspect {outcome.path} shows it."
    none = "the source has none; mtp-coord add-mtp adds one from a raw checkpoint."
    typer.echo(f"MTP head: {kept if outcome.has_head else none}")
    if "BF16" in outcome.dtypes:
        typer.echo("For an M1, convert with --dtype float16: its GPU has no bfloat16.")


_DOWNLOADS = "mtp-source"
"""Directory inside the checkpoint for downloaded files. It is removed when the head is added."""


@dataclass(frozen=True)
class AddOptions:
    """The flags of `mtp-coord add-mtp`."""

    mlx_path: Annotated[Path, typer.Option(help="Directory of the MLX checkpoint to add to.")]
    hf_path: Annotated[
        str,
        typer.Option(
            help="The checkpoint with the head, from which the model was converted: a directory, a hub repo, or "
            "'builtin'."
        ),
    ]
    replace: Annotated[bool, typer.Option("--replace", help="Replace the present head.")] = False


@takes_options(
    AddOptions,
    REMOVED | {"--dry-run": "The command checks the head before it writes, and changes no weight."},
)
def add_mtp(options: AddOptions) -> None:
    """Add the MTP head to an MLX checkpoint that lacks it.

    From a hub repo, only the bytes of the head are downloaded. The files of the model do not change. The head gets a
    file of its own, and the index and config.json are updated.

    `mtp-coord add-mtp --mlx-path Qwen3.5-27B-4bit --hf-path Qwen/Qwen3.5-27B`
    """
    path = options.mlx_path
    if not path.is_dir():
        raise UsageError(
            f"--mlx-path {path}: no such directory. Copy a hub repo first: hf download {path} --local-dir DIRECTORY"
        )
    target = Checkpoint.open(path)
    if (found := find_model(options.hf_path)) is not None:
        source = open_source(found, allow_head_only=True)
        addition = plan_head_addition(target, source, replace=options.replace)
        _write(addition, source)
    else:
        with HubRepo(options.hf_path) as hub:
            head = plan_packed(open_remote(hub, is_head))
            addition = plan_head_addition(target, head, replace=options.replace)
            directory, needed = path / _DOWNLOADS, addition.needed
            with byte_bar("downloading") as show:
                source = fetch_head(hub, head, needed, directory, show, beside=addition.nbytes)
            _write(addition, source)
            shutil.rmtree(directory)
            downloaded = sum(head.tensors[name].nbytes for name in needed)
            typer.echo(f"downloaded from {options.hf_path}: {format_size(downloaded)}")
    packed = sorted({how["bits"] for how in addition.quantization.values()})
    bits = " and ".join(f"{n} bits" for n in packed) or "unquantized"
    typer.echo(f"{path / HEAD_FILE}: {format_size(addition.nbytes)}, {bits}")
    typer.echo(f"mtp-coord inspect {path} says whether it works.")


def _write(addition: HeadAddition, source: Checkpoint) -> None:
    with byte_bar("adding") as on_progress:
        addition.write(source, on_progress)


def models() -> None:
    """List the models on this machine that can be served, and the problems of the others.

    It searches the hub's cache and LM Studio's folders. Give a name to serve --model, load or inspect.
    """
    found = list_models()
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("model", overflow="fold")
    for title in ("size", "weights", "context", "MTP head"):
        table.add_column(title)
    for model in found:
        if not model.problem:
            size, context = format_size(model.nbytes), f"{model.context:,}"
            weights = model.quantization or "full"
            table.add_row(escape(model.name), size, weights, context, model.head)
    Console(emoji=False).print(table)
    for model in found:
        if model.problem:
            typer.echo(f"{model.name} cannot be served: {model.problem}")
