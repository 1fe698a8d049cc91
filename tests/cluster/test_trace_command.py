"""`mtp-coord trace` against a real coordinator with two workers, and its refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from typer.testing import CliRunner, Result

from coordinator.cli import app as commands
from tests.support.processes.processes import serving

TOKENS = 24
PHASES = {"decode", "begin", "build", "compute", "read", "encode"}


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120", "MTP_API_KEY": ""}).invoke(commands, ["trace", *arguments])


def test_a_trace_follows_every_frame_through_all_processes(
    pool: Callable[[int], list[str]], toy: Path, tmp_path: Path
) -> None:
    """Each frame of an answer shows in each process in order, with a hop to each, and times add up.

    The workers here run on the coordinator's machine, so their clocks need no correction.
    """
    file = tmp_path / "trace.json"
    flags = ("--nodes", "2", "--mtp", "off")
    with serving(tmp_path, toy, pool(2), *flags) as coordinator:
        started = time.monotonic()
        body = {"prompt": [1, 2, 3], "max_tokens": TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{coordinator.url}/v1/completions", json={"model": toy.name, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        seconds = time.monotonic() - started + 1.0
        done = run("--url", coordinator.url, "--seconds", f"{seconds:.1f}", "--output", str(file))
    assert done.exit_code == 0, done.output
    assert "compute" in done.output and "hop to it" in done.output
    found = json.loads(file.read_text())
    slices = [e for e in found["traceEvents"] if e["ph"] == "X" and e["args"]["rows"] == 1]
    for pid in (1, 2):
        frames = {e["args"]["frame"] for e in slices if e["pid"] == pid}
        assert len(frames) >= TOKENS - 1
        for frame in frames:
            own = [e for e in slices if (e["pid"], e["args"]["frame"]) == (pid, frame)]
            assert {e["name"] for e in own} == PHASES
    begins = {(e["name"], e["id"]): e["ts"] for e in found["traceEvents"] if e["ph"] == "b"}
    last = max(number for name, number in begins if name == "hop to coordinator")
    stages = sorted({name for name, _ in begins if "hop to stage" in name})
    order = [begins[name, last] for name in (*stages, "hop to coordinator")]
    assert len(order) == 3 and order == sorted(order)
    assert "relay to it" in done.output
    ends = {(e["name"], e["id"]): e["ts"] for e in found["traceEvents"] if e["ph"] == "e"}
    relays = {key: ts for key, ts in begins.items() if key[0].startswith("relay to stage 0")}
    assert len(relays) >= TOKENS - 4 and all(ends[key] > ts for key, ts in relays.items())
