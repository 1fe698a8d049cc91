"""First token in a group of two, with a prompt's chunk as a whole and in halves, whose sums and products overlap.

    python -m tests.bench.group_halves --rate 150mbit

Two members on one machine take turns between both ways, and one without sums, which is the bound. `--rate` puts them in
network namespaces whose cable has this rate, which needs Linux and root. `--backend nccl` gives each a GPU. The sockets
of MLX's ring spin, so members on a core each hide less of a sum than machines with more cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.device import FrameLimits, this_device
from mtp.layers.layer import KVFormat
from proto.control import Backend
from proto.frame import Admit, Evict, Frame, Segment
from proto.span import Span
from tests.bench.dialled_model import SHAPES, write_dialled_model
from tests.bench.machine import about, parser_of
from tests.support.processes.network_namespaces import two_machines
from worker.engine.frame_engine import FrameEngine
from worker.engine.group import GroupSpec, join_group
from worker.model.loader import load_stage
from worker.model.stage import StageForward
from worker.model.verifier import Verifier
from worker.node.member import group_address

WAYS = ("whole", "halves", "without sums")


def member(rank: int, hosts: Sequence[str], path: str, options: Any) -> dict[str, list[float]]:
    """Return the seconds until the first token, in each of the ways."""
    if this_device().computes_on_host and sys.platform == "linux":
        os.sched_setaffinity(0, {rank})
    communicator = join_group(GroupSpec(rank, tuple(hosts), Backend(options.backend)), exact=False)
    if communicator.beside is None and options.backend == "nccl":
        communicator.beside = mx.new_stream(mx.gpu)
    checkpoint = Checkpoint.open(Path(path))
    span = Span(0, checkpoint.config.num_layers)
    dtype = mx.float32 if this_device().computes_on_host else None
    modules = load_stage(checkpoint, span, first=True, last=True, dtype=dtype, communicator=communicator)
    stage = StageForward(modules, KVFormat())
    engine = FrameEngine(stage, epoch=1, first=True, verifier=Verifier(modules, KVFormat()))
    least = FrameLimits.here(sparse=checkpoint.config.num_experts > 0).shortest
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens = set()
    for sequence in range((options.rounds + 1) * len(WAYS)):
        way = WAYS[sequence % len(WAYS)]
        mx.eval(communicator.sum(mx.zeros(1)))  # both members begin together
        stage.least_half = least if way == "halves" else None
        if way == "without sums":
            communicator.__dict__["sum"] = lambda x: x
        started, ops = time.perf_counter(), (Admit(sequence, options.prompt + 8, options.prompt),)
        for start in range(0, options.prompt, options.chunk):
            end = min(start + options.chunk, options.prompt)
            words = tuple(place * 7919 % 200 for place in range(start, end))
            chunk = Segment(sequence, start // options.chunk, start, words, sample=end == options.prompt)
            out = engine.process(Frame(1, engine.frames_done, ops if start == 0 else (), (chunk,)))
        if sequence >= len(WAYS):  # the first round compiles kernels
            taken[way].append(time.perf_counter() - started)
        if communicator.__dict__.pop("sum", None) is None:
            tokens.add(out.outcomes[0].token)
        engine.process(Frame(1, engine.frames_done, (Evict(sequence),), ()))
    assert len(tokens) == 1 or stage.dtype != mx.float32, tokens
    return taken


def main() -> None:
    """Print the fastest rounds, as other programs disturb some, and the share of the sums' time that halves hide."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="toy")
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--backend", choices=("ring", "nccl"), default="ring")
    parser.add_argument("--rate", help="rate of the cable, as `tc` takes it")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--member", help="for the members alone")
    options = parser.parse_args()
    if options.member:
        rank, hosts, path = json.loads(options.member)
        print(json.dumps(member(rank, hosts, path, options)))
        return
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        write_dialled_model(model, SHAPES[options.shape], bits=options.bits)
        prefixes: list[tuple[str, ...]] = [(), ()]
        hosts = [group_address("127.0.0.1") for _ in range(2)]
        if options.rate:
            machines = stack.enter_context(two_machines())
            hosts = [f"{machine.address}:2970{rank}" for rank, machine in enumerate(machines)]
            prefixes = [machine.prefix for machine in machines]
            for machine in machines:
                limit = ("root", "tbf", "rate", options.rate, "burst", "64kb", "latency", "100ms")
                subprocess.run(["tc", "-n", machine.name, "qdisc", "add", "dev", machine.cable, *limit], check=True)
        command = [sys.executable, "-m", "tests.bench.group_halves", *sys.argv[1:], "--member"]
        members = [
            subprocess.Popen(
                [*prefix, *command, json.dumps([rank, hosts, str(model)])],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": str(rank)} if options.backend == "nccl" else {}),
            )
            for rank, prefix in enumerate(prefixes)
        ]
        first, _ = (process.communicate()[0] for process in members)
    print(about())
    whole, halves, bound = (min(seconds) for seconds in json.loads(first).values())
    print(f"first token: whole {whole:.3f} s, halves {halves:.3f} s, without sums {bound:.3f} s")
    print(f"hidden: {(whole - halves) / (whole - bound):.0%} of the sums")


if __name__ == "__main__":
    main()
