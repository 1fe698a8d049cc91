"""The group of processes that hold a stage together: how a member joins it, and what a collective takes there.

MLX keeps a backend until its process ends. So a process joins one group, and a worker starts a new process for each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
import time
from dataclasses import dataclass

import mlx.core as mx

from mtp.layers.communicator import GroupCommunicator
from proto.control import Backend
from proto.errors import NotReadyError, UsageError

JOIN_SECONDS = 30.0
"""Seconds. Bound of the wait for the other members, which start at the same time."""


@dataclass(frozen=True)
class GroupSpec:
    """The place `rank` in a group. `hosts` are host:port of each member, where it accepts the others."""

    rank: int
    hosts: tuple[str, ...]
    backend: Backend = Backend.ring

    def __post_init__(self) -> None:
        if len(self.hosts) < 2 or not 0 <= self.rank < len(self.hosts):
            raise UsageError(f"member {self.rank} of a group of {len(self.hosts)} does not exist")


@dataclass(frozen=True)
class CollectiveFigures:
    """Seconds of one sum over the members: of a row of a token, in a chain, and of the rows of a prompt chunk."""

    row: float
    chunk: float


def join_group(spec: GroupSpec, *, exact: bool) -> GroupCommunicator:
    """Join the group and return the communicator. Raises NotReadyError if it cannot be formed.

    Blocks until all members have come, and ends the process after JOIN_SECONDS. The process can join no other group
    afterwards.
    """
    os.environ["MLX_RANK"] = str(spec.rank)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            if spec.backend is Backend.ring:
                json.dump([[host] for host in spec.hosts], file)
                file.flush()
                os.environ["MLX_HOSTFILE"] = file.name
            else:
                host, _, port = spec.hosts[0].rpartition(":")
                os.environ |= {
                    "MLX_WORLD_SIZE": str(len(spec.hosts)),
                    "NCCL_HOST_IP": host.strip("[]"),
                    "NCCL_PORT": port,
                }
            # MLX holds Python's lock while it waits for the others, so only a thread outside Python can end the wait.
            faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True)
            try:
                group = mx.distributed.init(strict=True, backend=spec.backend.value)
            finally:
                faulthandler.cancel_dump_traceback_later()
    except (RuntimeError, ValueError) as error:
        raise NotReadyError(
            f"the group of {', '.join(spec.hosts)} cannot be formed by {spec.backend.value}: {error}"
        ) from error
    if (group.rank(), group.size()) != (spec.rank, len(spec.hosts)):
        raise NotReadyError(
            f"the group has {group.size()} members, {len(spec.hosts)} were expected. Restart the worker."
        )
    return GroupCommunicator(group, exact=exact)


CHAIN = 32
"""Sums in a row of one measurement. Each needs the result of the one before, as in a pass through the layers."""

CHUNK_ROWS = 512
"""Rows of a prompt chunk."""


def measure_collectives(
    communicator: GroupCommunicator, hidden: int, dtype: mx.Dtype
) -> CollectiveFigures:
    """Measure sums of `[rows, hidden]`. Every member must call it at the same place."""

    def chain(rows: int, count: int) -> float:
        x = mx.ones((rows, hidden), dtype)
        mx.eval(communicator.sum(x))
        started = time.perf_counter()
        for _ in range(count):
            x = communicator.sum(x) * (1 / communicator.size)
        mx.eval(x)
        return (time.perf_counter() - started) / count

    return CollectiveFigures(chain(1, CHAIN), chain(CHUNK_ROWS, 2))
