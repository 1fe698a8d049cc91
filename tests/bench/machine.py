"""The hardware and the versions of a measurement, and the file of its figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx


def parser_of(page: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help has the lines of `page`."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=page, formatter_class=formatter)


def about() -> str:
    """Return one line: processor, cores, MLX device, versions, commit."""
    parts = [
        f"{_processor()}, {os.cpu_count()} cores",
        f"MLX device {mx.default_device().type.name}",
        *(f"{name} {version(name)}" for name in ("mlx", "mlx-lm")),
        f"Python {platform.python_version()}",
        f"commit {_commit()}",
    ]
    return "; ".join(parts)


def publish(name: str, figures: Mapping[str, Any]) -> None:
    """Write `figures`, plain JSON, to build/bench with the hardware, and print the path."""
    path = Path(__file__).parents[2] / "build" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    data = {"bench": name, "when": when, "machine": about(), "figures": figures}
    path.write_text(json.dumps(data, indent=2) + "\n")
    print(f"\nfigures: {path}")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip() or "unknown"
