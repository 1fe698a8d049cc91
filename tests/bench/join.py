"""The time from `mtp-worker --join` to a serving plan, at a network address of this machine.

python -m tests.bench.join --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from proto.rpc.bind import own_addresses
from tests.bench.report import bars, publish
from tests.support.processes.processes import (
    ending,
    launch_coordinator,
    launch_worker,
)
from tests.support.processes.reserved_port import reserved_port

STEPS = ("command to certificate", "certificate to plan", "load", "load to serving")


def main() -> None:
    """Join new workers to new clusters, and print the median of each step."""
    parser = argparse.ArgumentParser(description="The time of a join.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    hosts = [a for a in own_addresses() if "." in a and not a.startswith("127.")]
    if not hosts:
        sys.exit("this machine has no network address")
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_measure(hosts[0], Path(folder)))
            print("  ".join(f"{seconds:6.2f}" for seconds in found[-1]), flush=True)
    medians = {
        step: statistics.median(times)
        for step, times in zip(STEPS, zip(*found, strict=True), strict=True)
    }
    for step, seconds in medians.items():
        print(f"{step}: {seconds:.2f} s")
    publish("join", {"seconds": medians, "rounds": found}, {"a join": bars(medians, "s")})


def _measure(host: str, folder: Path) -> tuple[float, ...]:
    """Return the seconds of each step of one join."""
    with reserved_port(host) as port:
        listen = ("--listen", f"{host}:0", "--state-dir", str(folder / "a"))
        address = f"{host}:{port}"
        wait = ("--nodes", "1", "--wait", "120", "--worker", address)
        process = launch_coordinator(folder, *listen, *wait)
        with ending(process):
            process.wait_for("machines join here")
            code = "from coordinator.cli import main; main()"
            make = [sys.executable, "-c", code, "token", "create", "--state-dir", str(folder / "a")]
            token = subprocess.run(make, check=True, capture_output=True, text=True).stdout.strip()
            started = time.monotonic()
            flags = ("--listen", address, "--state-dir", str(folder / "b"))
            worker = launch_worker(folder, "w", *flags, env={"MTP_JOIN_TOKEN": token})
            with ending(worker):
                times = [started]
                for source, record in (
                    (process, "machine joined"),
                    (process, "worker joined"),
                    (worker, "stage loaded"),
                    (process, "serving"),
                ):
                    source.wait_for(record)
                    times.append(time.monotonic())
    return tuple(end - start for start, end in pairwise(times))


if __name__ == "__main__":
    main()
