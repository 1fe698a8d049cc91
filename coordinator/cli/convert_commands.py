"""`mtp-coord convert` and `add-mtp`: checkpoints for MLX that keep their MTP head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.convert.convert import HEAD_FILE, FloatType, Mode, Quantization, Settings
from mtp.checkpoint.convert.convert import convert as convert_checkpoint
from mtp.checkpoint.convert.foreign import open_source
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.missing_head import add_head_from, base_model
from mtp.checkpoint.hub.repo import HubRepo
from mtp.checkpoint.hub.resolve import find_model, resolve_model
from proto.errors import UsageError
from proto.terminal.options import takes_options
from proto.terminal.progress import byte_bar, format_size


@dataclass(frozen=True)
class ConvertOptions:
    """The flags of `mtp-coord convert`."""

    hf_path: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="What to convert: a directory, a hub repo, or 'builtin'.",
            show_default=False,
        ),
        typer.Option("--hf-path", "--model", metavar="MODEL", help="The same, as an option."),
    ]
    mlx_path: Annotated[Path, typer.Option(help="New directory to write.")] = Path("mlx_model")
    quantize: Annotated[bool, typer.Option("-q", "--quantize", help="Quantize weights.")] = False
    q_bits: Annotated[int | None, typer.Option(help="Bits per weight.  [default: 4]")] = None
    q_group_size: Annotated[int | None, typer.Option(help="Weights that share a scale.  [default: 64]")] = None
    q_mode: Annotated[Mode, typer.Option(help="How weights are packed.")] = "affine"
    dtype: Annotated[
        FloatType | None,
        typer.Option(
            help="Type of what is not quantized: float16 for an M1, whose GPU has no bfloat16.  [default: as stored]"
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


@takes_options(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Convert a checkpoint for MLX, and keep its MTP head and its vision part.

    The output works here and in mlx-lm, which ignores the head. Converting needs the memory of the largest layer's
    experts, not of the model.

    Weights that another program packed as integers (GPTQ, AutoRound) keep their codes. FP8 and NVFP4 are
    dequantized, and -q quantizes them.

    `mtp-coord convert Qwen/Qwen3.5-27B --mlx-path Qwen3.5-27B-4bit -q`
    """
    settings = options.settings()
    source = open_source(resolve_model(options.hf_path))
    with byte_bar("converting") as on_progress:
        outcome = convert_checkpoint(source, options.mlx_path, settings, on_progress)
    typer.echo(f"{outcome.path}: {format_size(outcome.nbytes)}")
    kept = f"kept. mtp-coord inspect {outcome.path} shows it."
    none = "the source has none; mtp-coord add-mtp adds one from a raw checkpoint."
    if source.config.shape.head is not None:
        typer.echo(f"MTP head: {kept if outcome.has_head else none}")
    if "BF16" in outcome.dtypes:
        typer.echo("For an M1, convert with --dtype float16: its GPU has no bfloat16.")


@dataclass(frozen=True)
class AddOptions:
    """The flags of `mtp-coord add-mtp`."""

    mlx_path: Annotated[
        Path,
        typer.Argument(metavar="DIRECTORY", help="The MLX checkpoint to add to.", show_default=False),
        typer.Option(metavar="DIRECTORY", help="The same, as an option."),
    ]
    hf_path: Annotated[
        str | None,
        typer.Option(
            help="The checkpoint with the head, from which the model was converted: a directory, a hub repo, or "
            "'builtin'.  [default: the model that its card names]",
            show_default=False,
        ),
    ] = None
    replace: Annotated[bool, typer.Option("--replace", help="Replace the present head.")] = False


@takes_options(AddOptions)
def add_mtp(options: AddOptions) -> None:
    """Add the MTP head to an MLX checkpoint that lacks it.

    From a hub repo, only the bytes of the head are downloaded. The files of the model do not change. The head gets a
    file of its own, and the index and config.json are updated.

    `mtp-coord add-mtp Qwen3.5-27B-4bit --hf-path Qwen/Qwen3.5-27B`
    """
    path = options.mlx_path
    if not path.is_dir():
        raise UsageError(
            f"--mlx-path {path}: no such directory. Copy a hub repo first: hf download {path} --local-dir DIRECTORY"
        )
    target = Checkpoint.open(path)
    hf_path = options.hf_path or base_model(path)
    if (found := find_model(hf_path)) is not None:
        source = open_source(found, allow_head_only=True)
        addition = plan_head_addition(target, source, replace=options.replace)
        with byte_bar("adding") as on_progress:
            addition.write(source, on_progress)
    else:
        with HubRepo(hf_path) as hub, byte_bar("downloading") as show:
            addition, downloaded = add_head_from(hub, target, show, replace=options.replace)
        typer.echo(f"downloaded from {hf_path}: {format_size(downloaded)}")
    packed = sorted({how["bits"] for how in addition.quantization.values()})
    bits = " and ".join(f"{n} bits" for n in packed) or "unquantized"
    typer.echo(f"{path / HEAD_FILE}: {format_size(addition.nbytes)}, {bits}")
    typer.echo(f"mtp-coord inspect {path} says whether it works.")
