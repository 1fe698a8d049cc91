"""`mtp-coord add-mtp`: the MTP head for an MLX checkpoint whose conversion dropped it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from mtp.checkpoint.convert.add_head import HeadAddition, plan_head_addition
from mtp.checkpoint.convert.output import HEAD_FILE
from mtp.checkpoint.convert.settings import FloatType, HeadBits
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.remote_head import RemoteHead
from mtp.checkpoint.hub.resolve import find_model
from proto.errors import UsageError
from proto.terminal.progress_bar import byte_bar
from proto.terminal.size import format_size

_DOWNLOADS = "mtp-source"
"""Directory inside the checkpoint for downloaded files. It is removed when the head is added."""


def add_mtp(
    mlx_path: Annotated[Path, typer.Option(help="Directory of the MLX checkpoint to add to.")],
    hf_path: Annotated[
        str,
        typer.Option(
            help="The checkpoint with the head, from which the model was converted: a directory, a hub repo, or "
            "'builtin'."
        ),
    ],
    mtp_bits: Annotated[
        HeadBits | None,
        typer.Option(help="Bits of the head's layer.  [default: as the model's own layers]"),
    ] = None,
    mtp_dtype: Annotated[
        FloatType | None,
        typer.Option(help="Type of unquantized weights.  [default: as the model's own]"),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the present head.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check: read no weight, write nothing.")
    ] = False,
) -> None:
    """Add the MTP head to an MLX checkpoint that lacks it.

    From a hub repo, only the bytes of the head are downloaded. The files of the model do not change. The head gets a
    file of its own, and the index and config.json are updated.

    `mtp-coord add-mtp --mlx-path Qwen3.5-27B-4bit --hf-path Qwen/Qwen3.5-27B`
    """
    if not mlx_path.is_dir():
        raise UsageError(
            f"--mlx-path {mlx_path}: no such directory. Copy a hub repo first: "
            f"hf download {mlx_path} --local-dir DIRECTORY"
        )
    target = Checkpoint.open(mlx_path)
    found = find_model(hf_path)
    if found is not None:
        source = Checkpoint.open(found, to_convert=True, allow_head_only=True)
        addition = plan_head_addition(target, source, mtp_bits, mtp_dtype, replace=replace)
        if not dry_run:
            _write(addition, source)
        _tell(addition, hf_path, 0, dry_run)
        return
    with RemoteHead(hf_path) as remote:
        addition = plan_head_addition(
            target, remote.checkpoint, mtp_bits, mtp_dtype, replace=replace
        )
        if not dry_run:
            directory = mlx_path / _DOWNLOADS
            with byte_bar("downloading") as on_progress:
                source = remote.fetch(
                    addition.needed, directory, on_progress, beside=addition.nbytes
                )
            _write(addition, source)
            shutil.rmtree(directory)
        _tell(addition, hf_path, addition.source_bytes if dry_run else remote.received, dry_run)


def _write(addition: HeadAddition, source: Checkpoint) -> None:
    with byte_bar("adding") as on_progress:
        addition.write(source, on_progress)


def _tell(addition: HeadAddition, source: str, downloaded: int, dry_run: bool) -> None:
    packed = sorted({how["bits"] for how in addition.quantization.values()})
    bits = " and ".join(f"{n} bits" for n in packed) or "unquantized"
    would = "would be " if dry_run else ""
    typer.echo(f"{addition.target.path / HEAD_FILE}: {would}{format_size(addition.nbytes)}, {bits}")
    if downloaded:
        typer.echo(f"{would}downloaded from {source}: {format_size(downloaded)}")
    if not dry_run:
        typer.echo(f"mtp-coord inspect {addition.target.path} says whether it works.")
