"""`mtp-coord convert`: conversion of a raw checkpoint for MLX, with its MTP head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp.checkpoint.convert.convert import ConversionResult
from mtp.checkpoint.convert.convert import convert as convert_checkpoint
from mtp.checkpoint.convert.settings import (
    FloatType,
    HeadBits,
    Mode,
    Quantization,
    Recipe,
    Settings,
)
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import resolve_model
from proto.errors import UsageError
from proto.terminal.progress_bar import byte_bar
from proto.terminal.size import format_size


def convert(
    hf_path: Annotated[
        str,
        typer.Option(
            "--hf-path", "--model", help="What to convert: a directory, a hub repo, or 'builtin'."
        ),
    ],
    mlx_path: Annotated[Path, typer.Option(help="New directory to write.")] = Path("mlx_model"),
    quantize: Annotated[
        bool, typer.Option("-q", "--quantize", help="Quantize the weights.")
    ] = False,
    q_bits: Annotated[int | None, typer.Option(help="Bits per weight.  [default: 4]")] = None,
    q_group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale.  [default: 64]")
    ] = None,
    q_mode: Annotated[Mode, typer.Option(help="How weights are packed.")] = "affine",
    quant_predicate: Annotated[
        Recipe | None,
        typer.Option(help="A recipe of mlx-lm: few bits for most weights, more for the delicate."),
    ] = None,
    dtype: Annotated[
        FloatType | None,
        typer.Option(
            help="Type of what is not quantized: float16 for an M1, whose GPU has no bfloat16.  "
            "[default: as stored]"
        ),
    ] = None,
    mtp_bits: Annotated[
        HeadBits | None,
        typer.Option(help="Bits of the head's layer.  [default: as the model's own layers]"),
    ] = None,
    mtp_dtype: Annotated[
        FloatType | None, typer.Option(help="Type of the head's.  [default: as --dtype]")
    ] = None,
) -> None:
    """Convert a checkpoint for MLX, and keep its MTP head.

    The output works here and in mlx-lm, which ignores the head. Converting needs the memory of the largest layer's
    experts, not of the model. After an interruption, the same command continues. Weights in FP8, NVFP4, MXFP4, GPTQ,
    AWQ or AutoRound keep their bits where MLX has their format. Otherwise they are dequantized, and -q quantizes them.

    `mtp-coord convert --hf-path Qwen/Qwen3.5-27B --mlx-path Qwen3.5-27B-4bit -q`
    """
    _check_needs_quantize(quantize, q_bits, q_group_size, q_mode)
    settings = Settings(
        quantization=Quantization.of(q_bits, q_group_size, q_mode) if quantize else None,
        recipe=quant_predicate,
        dtype=dtype,
        head_bits=mtp_bits,
        head_dtype=mtp_dtype,
    )
    source = Checkpoint.open(resolve_model(hf_path), to_convert=True)
    with byte_bar("converting") as on_progress:
        outcome = convert_checkpoint(source, mlx_path, settings, on_progress)
    for line in _summary(outcome):
        typer.echo(line)


def _check_needs_quantize(
    quantize: bool, bits: int | None, group_size: int | None, mode: Mode
) -> None:
    given = {"--q-bits": bits, "--q-group-size": group_size, "--q-mode": mode != "affine" or None}
    for flag, value in given.items():
        if value is not None and not quantize:
            raise UsageError(f"{flag} needs --quantize")


def _percent(error: float) -> str:
    return "0" if error == 0 else f"{100 * error:.2g} %"


def _summary(outcome: ConversionResult) -> list[str]:
    lines = [f"{outcome.path}: {format_size(outcome.nbytes)}"]
    if outcome.resumed:
        lines[0] += f", {format_size(outcome.resumed)} of them from an earlier run"
    for way, found in sorted(outcome.ways.items()):
        error = "" if found.error is None else f", adding an error of {_percent(found.error)}"
        lines.append(f"{found.modules} weights {way}{error}")
    if not outcome.for_mlx_lm:
        lines.append(
            "Some weights keep a scale or an order that stock mlx-lm cannot load. For mlx-lm, convert with -q."
        )
    if outcome.has_head:
        lines.append(f"MTP head: kept. mtp-coord inspect {outcome.path} shows it.")
    else:
        lines.append(
            "MTP head: the source has none; mtp-coord add-mtp adds one from a raw checkpoint."
        )
    if "BF16" in outcome.dtypes:
        lines.append("For an M1, convert with --dtype float16: its GPU has no bfloat16.")
    return lines
