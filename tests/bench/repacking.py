"""Repacking against quantizing anew: bytes, time, memory and error, by the format of the source.

    python -m tests.bench.repacking

The checkpoints are random. Each is converted twice: without flags, which keeps the bits where MLX has the format, and
with `-q` in the same bits with another group size, which dequantizes and quantizes anew. Repacking comes first in one
round and second in the next. The times are medians; they are comparable within a row.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import mlx.core as mx

from mtp.checkpoint.convert.convert import ConversionResult, convert
from mtp.checkpoint.convert.settings import Quantization, Settings
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.terminal.size import format_size
from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.support.checkpoints.foreign import FORMATS, write_foreign

LAYERS = 12
"""Layers of a checkpoint. The conversion measures the error of the first and the last two, as it does for a model."""


@dataclass(frozen=True)
class Row:
    """One format: bytes of source and results, seconds, peak bytes of memory, and the added relative errors."""

    form: str
    way: str
    source: int
    repacked: int
    anew: int
    repacked_seconds: float
    anew_seconds: float
    repacked_peak: int
    anew_peak: int
    repacked_error: float
    anew_error: float

    def __str__(self) -> str:
        sizes = [format_size(size) for size in (self.source, self.repacked, self.anew)]
        peaks = f"{format_size(self.repacked_peak)}, {format_size(self.anew_peak)}"
        ratio = f"{self.repacked_seconds:.2f}, {self.anew_seconds:.2f} s"
        errors = f"{self.repacked_error:.2%}, {self.anew_error:.2%}"
        return f"| {' | '.join([self.form, self.way, *sizes, ratio, peaks, errors])} |"


@dataclass
class Measured:
    """The times of one kind of conversion, and the result and peak memory of the last."""

    settings: Settings
    seconds: list[float]
    result: ConversionResult | None = None
    peak: int = 0

    def run(self, source: Path, path: Path) -> None:
        """Convert once."""
        shutil.rmtree(path, ignore_errors=True)
        checkpoint = Checkpoint.open(source, to_convert=True)
        mx.reset_peak_memory()
        start = time.perf_counter()
        self.result = convert(checkpoint, path, self.settings)
        self.seconds.append(time.perf_counter() - start)
        self.peak = mx.get_peak_memory()

    @property
    def error(self) -> float:
        """The largest error of a way."""
        assert self.result is not None
        return max(way.error or 0.0 for way in self.result.ways.values())


def measure(form: str, folder: Path, hidden: int, rounds: int) -> Row:
    """Return the row of one format."""
    source = write_foreign(folder / "source", form, hidden=hidden, layers=LAYERS, dtype=mx.bfloat16)
    bits = 8 if "8" in form else 4
    kept = Measured(Settings(), [])
    anew = Measured(Settings(Quantization.of(bits, 64)), [])
    for number in range(rounds):
        for each in (kept, anew) if number % 2 == 0 else (anew, kept):
            each.run(source, folder / "out")
    assert kept.result is not None and anew.result is not None
    ways = sorted(kept.result.ways.items(), key=lambda item: -item[1].modules)
    stored = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    return Row(
        form,
        ways[0][0],
        stored,
        kept.result.nbytes,
        anew.result.nbytes,
        median(kept.seconds),
        median(anew.seconds),
        kept.peak,
        anew.peak,
        kept.error,
        anew.error,
    )


def main() -> None:
    """Measure all formats, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    rows = []
    for form in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(form, Path(folder), options.hidden, options.rounds))
            print(rows[-1], flush=True)
    lines = [
        f"{about()}; hidden size {options.hidden}, {LAYERS} dense layers, {options.rounds} rounds",
        "| format | without flags | source | without flags | with -q | seconds | peak memory | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(str, rows),
    ]
    print("\n".join(lines))
    heights = {row.form: row.repacked_seconds / row.anew_seconds for row in rows}
    chart = bars(heights, "seconds of repacking over seconds of quantizing anew")
    publish("repacking", {"rows": [asdict(row) for row in rows]}, {"time": chart})


if __name__ == "__main__":
    main()
