"""The process of one job on a model. It prints its progress and its result as lines of JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from coordinator.local_engine.head_trial import assess_head
from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.convert.convert import convert
from mtp.checkpoint.convert.settings import Quantization, Settings
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.remote_head import RemoteHead
from mtp.checkpoint.hub.resolve import find_model, resolve_model
from proto.errors import ClusterError
from proto.terminal.size import format_size

INTERVAL_SECONDS = 0.25
"""Seconds between two lines of progress."""

NICENESS = 10
"""Added to the priority number of the process, so that answers come first."""

DOWNLOADS = "mtp-source"
"""Directory inside a model for a downloaded head. It is removed when the head is added."""


class Progress:
    """A progress function that prints at most one line per INTERVAL_SECONDS, and the last one."""

    def __init__(self) -> None:
        self._printed_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Print that `done` of `total` bytes are processed."""
        now = time.monotonic()
        if done >= total or now - self._printed_at >= INTERVAL_SECONDS:
            self._printed_at = now
            print_line(done=done, total=total)


def print_line(**fields: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def download_model(model: str) -> str:
    """Download a repo into the local cache, and return the result for people."""
    path = resolve_model(model, Progress())
    size = sum(Checkpoint.open(path, to_convert=True).part_bytes().values())
    return f"{format_size(size)} are on this machine"


def convert_model(model: str, target: str, bits: int | None) -> str:
    """Convert a model, download it first if needed, and return the result for people."""
    source = Checkpoint.open(resolve_model(model, Progress()), to_convert=True)
    settings = Settings(quantization=Quantization.of(bits, None) if bits else None)
    result = convert(source, Path(target), settings, Progress())
    head = (
        "with its MTP head"
        if result.has_head
        else "without an MTP head, because the source has none"
    )
    return f"{format_size(result.nbytes)}, {head}"


def add_head(target: str, source: str) -> str:
    """Add the head of `source` to the converted model `target`, and return the result for people."""
    checkpoint, found = Checkpoint.open(Path(target)), find_model(source)
    if found is not None:
        opened = Checkpoint.open(found, to_convert=True, allow_head_only=True)
        addition = plan_head_addition(checkpoint, opened, replace=True)
        addition.write(opened, Progress())
        return f"the head has {format_size(addition.nbytes)}"
    with RemoteHead(source) as remote:
        addition = plan_head_addition(checkpoint, remote.checkpoint, replace=True)
        directory = Path(target) / DOWNLOADS
        fetched = remote.fetch(addition.needed, directory, Progress(), beside=addition.nbytes)
        addition.write(fetched, Progress())
        shutil.rmtree(directory)
        return f"the head has {format_size(addition.nbytes)}, of which {format_size(remote.received)} were downloaded"


def try_head(path: str) -> str:
    """Try the head of a model on a short prompt, and return the verdict."""
    return assess_head(Checkpoint.open(Path(path)), trial=True, on_progress=Progress()).verdict


def run_job(arguments: dict[str, Any]) -> str:
    """Run the job that `arguments` describe, and return its result for people."""
    match arguments["kind"]:
        case "download":
            return download_model(arguments["source"])
        case "convert":
            return convert_model(arguments["source"], arguments["target"], arguments["bits"])
        case "add-mtp":
            return add_head(arguments["target"], arguments["source"])
        case _:
            return try_head(arguments["target"])


def main() -> None:
    """Run one job. Its last line has the state `done` or `failed`."""
    os.nice(NICENESS)
    arguments = json.loads(sys.argv[1])
    hidden = {
        str(arguments.get(name)): Path(str(arguments.get(name))).name
        for name in ("source", "target")
    }
    try:
        state, detail = "done", run_job(arguments)
    except ClusterError as error:
        state, detail = "failed", error.public
    for path, name in hidden.items():
        if path.startswith("/"):
            detail = detail.replace(path, name)
    print_line(state=state, detail=detail)


if __name__ == "__main__":
    main()
