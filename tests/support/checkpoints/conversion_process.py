"""A conversion in its own process, which a test can kill or measure.

`python -m tests.support.checkpoints.conversion_process SOURCE OUT BITS SHARD_BYTES FILES` prints one JSON object:
`peak`, the maximum growth of memory in bytes. If FILES is not 0, the process stops after it has written FILES whole
files, and waits to be killed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import psutil

from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.terminal import console

KILL_SECONDS = 100.0
"""Seconds. Longest wait to be killed."""


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes. Linux's own figure includes the parent process."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
    return int(line.split()[1]) * 1024


def start(
    source: Path, out: Path, *, bits: int = 0, shard_bytes: int = 2**31, files: int = 0
) -> subprocess.Popen[str]:
    """Start a conversion. `bits` 0 leaves the weights unquantized."""
    arguments = [str(source), str(out), str(bits), str(shard_bytes), str(files)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.checkpoints.conversion_process", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _main(source: str, out: str, bits: str, shard_bytes: str, files: str) -> None:
    def wait_for_the_end(done: int, total: int) -> None:
        """Wait to be killed once `files` files are written."""
        if int(files) and len(list(Path(out).glob("*.safetensors"))) >= int(files):
            time.sleep(KILL_SECONDS)
            sys.exit("the process was not killed in time")

    settings = Settings(Quantization.of(int(bits), None) if int(bits) else None)
    checkpoint = Checkpoint.open(Path(source))
    mx.eval(mx.quantize(mx.ones((64, 64))))  # load the library before measuring
    before = psutil.Process().memory_info().rss
    convert(
        checkpoint, Path(out), settings, on_progress=wait_for_the_end, shard_bytes=int(shard_bytes)
    )
    print(json.dumps({"peak": peak_memory() - before}))


if __name__ == "__main__":
    console.run("converting", lambda: _main(*sys.argv[1:]))
