"""A bench of a stage that a group of processes shares, beside the same stage in one process.

    python -m tests.bench.groups

The layers are as wide as those of 27B, with random weights of 4 bits. Each process has a core of its own, or on a
machine with NVIDIA GPUs a GPU. The table has the time of a step, how many times as fast the group is, and the time of
a sum of one row in a chain. `--layers 64 --backend nccl` is the whole depth of 27B on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import mlx.core as mx

from mtp.checkpoint.format.cut import Cut
from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.layer import KVFormat
from proto.control import Backend
from proto.frame import Admit, Segment
from tests.bench.machine import about, parser_of
from tests.bench.report import bars, publish
from tests.support.stages.random_stage import random_stage, wide_config
from worker.engine.group import GroupSpec, join_group, measure_collectives
from worker.model.stage import Stage
from worker.node.member import free_group_address

SHAPES = ((1, 1), (1, 4), (8, 1))
"""Sequences of a step and rows of each."""

SECONDS = 500.0
"""Seconds. Bound of a run of all processes."""


class Member:
    """One process of a group, or a process alone."""

    def __init__(self, options: argparse.Namespace, communicator: Communicator) -> None:
        config = wide_config(options.eighths, options.layers)
        modules = random_stage(config.cut_for(Cut(communicator.rank, communicator.size)))
        modules.communicator = communicator
        self.stage = Stage(modules, KVFormat())
        self.hidden = config.hidden_size
        self.steps, self.chunk = options.steps, options.chunk
        self.sequences = 0

    def step_ms(self, count: int, width: int, steps: int) -> float:
        """Return the median milliseconds of a step of `count` sequences with `width` rows each."""
        held = []
        for _ in range(count):
            held.append(self.stage.new_sequence(Admit(self.sequences, 10**6, 1)))
            self.sequences += 1
        times = []
        for window in range(steps):
            x = mx.random.normal((count * width, self.hidden)).astype(mx.bfloat16)
            mx.eval(x)
            runs = [(s, Segment(0, window, s.stack.length, (1,) * width)) for s in held]
            started = time.perf_counter()
            mx.eval(self.stage.forward(x, runs))
            times.append(time.perf_counter() - started)
        return 1e3 * statistics.median(times[len(times) // 4 :])

    def run(self) -> dict[str, float]:
        """Return the time of every shape, in milliseconds."""
        found = {f"{n} x {w}": self.step_ms(n, w, self.steps) for n, w in SHAPES}
        return found | {f"chunk of {self.chunk}": self.step_ms(1, self.chunk, 4)}


def be_member(options: argparse.Namespace) -> None:
    """Measure as one process, and print the figures of the first one."""
    communicator: Communicator = ALONE
    figures: dict[str, float] = {}
    if options.hosts:
        spec = GroupSpec(options.rank, tuple(options.hosts), Backend(options.backend))
        communicator = joined = join_group(spec, exact=False)
        hidden = wide_config(options.eighths, 4).hidden_size
        collectives = measure_collectives(joined, hidden, mx.bfloat16)
        figures = {"sum of a row": 1e3 * collectives.row, "sum of a chunk": 1e3 * collectives.chunk}
    found = Member(options, communicator).run()
    if communicator.rank == 0:
        print(json.dumps(found | figures), flush=True)
    os._exit(0)  # a backend may wait for processes that have ended


def run_processes(options: argparse.Namespace, size: int) -> dict[str, float]:
    """Return the figures of a group of `size` processes, or of one."""
    hosts = [free_group_address("127.0.0.1") for _ in range(size)] if size > 1 else []
    base = [sys.executable, "-m", "tests.bench.groups", "--backend", options.backend]
    base += ["--layers", str(options.layers), "--eighths", str(options.eighths)]
    base += ["--steps", str(options.steps), "--chunk", str(options.chunk)]
    pinned = shutil.which("taskset") if options.backend != Backend.nccl else None
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            command = [*base, "--rank", str(rank), *(["--hosts", *hosts] if hosts else [])]
            if pinned:
                command = [pinned, "-c", str(rank % (os.cpu_count() or 1)), *command]
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)}
            started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
            processes.append(stack.enter_context(started))
            stack.callback(started.kill)
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    found: dict[str, float] = json.loads(printed[0].splitlines()[-1])
    return found


def table(sizes: Sequence[int], rows: dict[int, dict[str, float]], layers: int) -> str:
    """Return the figures, with how many times as fast as one process each group is."""
    lines = [f"| ms | {' | '.join(f'{n} processes' if n > 1 else 'one process' for n in sizes)} |"]
    lines.append(f"| --- |{' --- |' * len(sizes)}")
    for name in rows[sizes[-1]]:
        cells = []
        for size in sizes:
            one, value = rows[sizes[0]].get(name), rows[size].get(name)
            ratio = f" ({one / value:.2f} x)" if one and value and size > 1 else ""
            cells.append(f"{value:.3g}{ratio}" if value else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    shares = []
    for size in sizes:
        row = rows[size]
        share = 2 * layers * row["sum of a row"] / row["1 x 1"] if size > 1 else 0.0
        shares.append(f"{share:.0%}" if size > 1 else "-")
    return "\n".join([*lines, f"| sums of a step of one row | {' | '.join(shares)} |"])


def main() -> None:
    """Measure one process and each group in turn, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--eighths", type=int, default=8, help="of the width of 27B")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--chunk", type=int, default=32, help="rows of a prompt chunk")
    parser.add_argument("--backend", choices=list(Backend), default=Backend.ring)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hosts", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_member(options)
    print(f"{about()}\n{options.layers} layers, {options.eighths} eighths of the width of 27B")
    found: dict[int, list[dict[str, float]]] = {size: [] for size in options.sizes}
    for _ in range(options.rounds):
        for size in options.sizes:
            found[size].append(run_processes(options, size))
            print(size, found[size][-1], flush=True)
    rows = {
        size: {name: statistics.median(one[name] for one in some) for name in some[0]}
        for size, some in found.items()
    }
    print(table(options.sizes, rows, options.layers))
    chart: dict[str, Any] = {str(size): row["1 x 1"] for size, row in rows.items()}
    publish("groups", {"options": vars(options), "rows": rows}, {"1 row": bars(chart, "ms")})


if __name__ == "__main__":
    main()
