"""The cost of the journal on tokens per second, and the time from a restart to the first continued token.

    python -m tests.bench.journal [--rounds 5] [--tokens 256] [--restarts 3]

Two servers of the built-in model run on this machine, one of them with --no-journal. Stored streams alternate between
them, and the ratio is taken within a round. The restarts follow kill -9 in the middle of a stored stream.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes.processes import (
    Coordinator,
    as_coordinator,
    ending,
    launch_coordinator,
    serving,
)

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a function that adds two numbers."}],
    "temperature": 0,
    "stream": True,
    "store": True,
    "ignore_eos": True,
}

SAME = ("--mtp", "1")
"""Flags of both servers. A fixed depth, because `auto` may choose another one in each process."""


def stream_rate(url: str, tokens: int) -> float:
    """Return the tokens per second of one stored stream, from its first event with text to its last."""
    times = []
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=BODY | {"max_tokens": tokens}, timeout=600
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return tokens / (times[-1] - times[1])


def compare_rates(folder: Path, rounds: int, tokens: int) -> None:
    """Print the rates with and without the journal, and their ratios."""
    with (
        serving(folder, "builtin", [], *SAME, "--state-dir", str(folder / "on"), name="on") as on,
        serving(folder, "builtin", [], *SAME, "--no-journal", name="off") as off,
    ):
        for server in (on, off):
            stream_rate(server.url, 64)
        ratios, rates = [], []
        cpu: dict[str, list[float]] = {"on": [], "off": []}
        for number in range(rounds):
            order = (on, off) if number % 2 == 0 else (off, on)
            found = {}
            for server in order:
                before = cpu_seconds(server.pid)
                found[server.name] = stream_rate(server.url, tokens)
                cpu[server.name].append(cpu_seconds(server.pid) - before)
            rates.append(found)
            ratios.append(found["on"] / found["off"])
    for name in ("on", "off"):
        values = [found[name] for found in rates]
        print(f"journal {name}: {statistics.median(values):.1f} tokens/s (median of {rounds})")
    print(f"ratio on/off: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    on_cpu, off_cpu = (1000 * statistics.median(cpu[name]) / tokens for name in ("on", "off"))
    print(f"CPU per token: {on_cpu:.2f} ms on, {off_cpu:.2f} ms off, ratio {on_cpu / off_cpu:.3f}")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, which a busy machine disturbs less than the clock; 0 without /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def start_again(folder: Path, port: int, name: str) -> Coordinator:
    """Start the server over the state directory, and wait until it serves."""
    flags = ("--single-node", "--port", str(port), "--state-dir", str(folder / "restart"))
    return as_coordinator(launch_coordinator(folder, "--model", "builtin", *flags, name=name))


def measure_restart(folder: Path, port: int, number: int) -> tuple[float, float]:
    """Return the seconds from the start of the next process, and from its plan, to the first continued token."""
    first = start_again(folder, port, f"before-{number}")
    with ending(first):
        last_id = ""
        with httpx.stream(
            "POST",
            f"{first.url}/v1/chat/completions",
            json=BODY | {"max_tokens": 400},
            timeout=600,
        ) as reply:
            for line in reply.iter_lines():
                last_id = line.removeprefix("id: ") if line.startswith("id: ") else last_id
                if last_id.endswith(":100"):
                    break
            os.kill(first.pid, signal.SIGKILL)
    began = time.perf_counter()
    second = start_again(folder, port, f"after-{number}")
    served = time.perf_counter()
    with ending(second):
        path = f"{second.url}/v1/chat/completions/{last_id.partition(':')[0]}"
        headers = {"Last-Event-ID": last_id}
        with httpx.stream("GET", path, headers=headers, timeout=600) as reply:
            # The first events repeat tokens of the journal; the log says when new ones follow.
            for line in reply.iter_lines():
                if line.startswith("data: ") and second.records("answer restored"):
                    break
        now = time.perf_counter()
        (record,) = second.records("answer restored")
        print(json.dumps({"tokens restored": record["tokens"], "seconds": round(now - began, 2)}))
        httpx.delete(path, timeout=60)
        return now - began, now - served


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--restarts", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare_rates(folder, given.rounds, given.tokens)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        found = [measure_restart(folder, port, number) for number in range(given.restarts)]
        for what, column in (("start of the process", 0), ("plan", 1)):
            values = [pair[column] for pair in found]
            print(f"first continued token: {statistics.median(values):.2f} s after the {what}")


if __name__ == "__main__":
    main()
