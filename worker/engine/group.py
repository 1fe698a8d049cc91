"""The group of processes that hold a stage together, and the time of a sum over its members.

MLX keeps a backend until its process ends. So a process joins one group, and a worker starts a new process for each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mtp.device import this_device
from mtp.layers.communicator import GroupCommunicator
from proto.announcement import parse_address
from proto.control import Backend
from proto.errors import NotReadyError, UsageError
from proto.rpc.meeting import accept_callers, call_until_accepted

JOIN_SECONDS = 30.0
"""Seconds. Bound of the wait for the other members, which start at the same time."""

LISTEN_SECONDS = 0.05
"""Seconds after which the other members listen for the last one in MLX. They have begun to join."""


@dataclass(frozen=True)
class GroupSpec:
    """The place `rank` among the `hosts` of a group, host:port of each member, and for jaccl their RDMA devices."""

    rank: int
    hosts: tuple[str, ...]
    backend: Backend = Backend.ring
    rdma: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.hosts) < 2 or not 0 <= self.rank < len(self.hosts):
            raise UsageError(f"member {self.rank} of a group of {len(self.hosts)} does not exist")
        if self.backend is Backend.jaccl and not (len(self.hosts) == len(self.rdma) == 2):
            raise UsageError("jaccl joins two machines, each with its RDMA device")

    def environment(self, file: Path) -> dict[str, str]:
        """Return the variables with which MLX forms the group, and write what they name to `file`."""
        host, _, port = self.hosts[0].rpartition(":")
        rank = {"MLX_RANK": str(self.rank)}
        if self.backend is Backend.ring:
            file.write_text(json.dumps([[host] for host in self.hosts]))
            return rank | {"MLX_HOSTFILE": str(file)}
        if self.backend is Backend.jaccl:
            own, other = self.rdma
            file.write_text(json.dumps([[None, own], [other, None]]))
            return rank | {"MLX_IBV_DEVICES": str(file), "MLX_JACCL_COORDINATOR": self.hosts[0]}
        size = str(len(self.hosts))
        return rank | {"MLX_WORLD_SIZE": size, "NCCL_HOST_IP": host.strip("[]"), "NCCL_PORT": port}


def await_members(spec: GroupSpec) -> None:
    """Wait until all members of a ring are here. Raises NotReadyError after JOIN_SECONDS.

    In MLX's ring the last member connects first, and then the others. One that is refused sleeps for 1 s, then 2 s and
    4 s, and holds Python's lock. So the last member waits, where it will listen, for a connection of each other one.
    """
    address, due = parse_address("--direct", spec.hosts[-1]), time.monotonic() + JOIN_SECONDS
    try:
        if spec.rank == len(spec.hosts) - 1:
            accept_callers(address, spec.rank, due)
            time.sleep(LISTEN_SECONDS)
        else:
            call_until_accepted(address, due)
    except OSError as error:
        raise NotReadyError(
            f"the members of the group {', '.join(spec.hosts)} did not meet in {JOIN_SECONDS:g} s: {error}. "
            "Check the direct links of these machines."
        ) from error


def join_group(spec: GroupSpec, *, exact: bool) -> GroupCommunicator:
    """Join the group and return the communicator. Raises NotReadyError if it cannot be formed.

    Blocks until all members have come, and ends the process after JOIN_SECONDS. It can join no other group later.
    """
    if spec.backend is Backend.ring:
        await_members(spec)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= spec.environment(Path(folder) / "group.json")
            # MLX holds Python's lock while it waits for the others, so only a thread outside Python can end the wait.
            faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True)
            try:
                group = mx.distributed.init(strict=True, backend=spec.backend.value)
            finally:
                faulthandler.cancel_dump_traceback_later()
    except (RuntimeError, ValueError) as error:
        raise NotReadyError(
            f"the group of {', '.join(spec.hosts)} cannot be formed by {spec.backend.value}: {error}{_advice(error)}"
        ) from error
    if (group.rank(), group.size()) != (spec.rank, len(spec.hosts)):
        raise NotReadyError(
            f"the group has {group.size()} members, {len(spec.hosts)} were expected. Restart the worker."
        )
    # The CPU's stream of MLX, which has the sums of every backend but NCCL, has the products too if the CPU computes.
    beside = mx.new_stream(mx.cpu) if this_device().computes_on_host else None
    return GroupCommunicator(group, exact=exact, beside=beside)


_RDMA_ADVICE = {
    "2": "This Mac has no such RDMA device. Turn RDMA on in macOS Recovery with `rdma_ctl enable`, and see --rdma",
    "16": "The device has no queue pair left. Restart this Mac",
    "22": "Take the port out of the Thunderbolt Bridge, and compare --rdma on both Macs with `ibv_devinfo`",
    "60": "The other Mac does not answer on this cable. Compare --rdma on both Macs, and use one cable for the pair",
}
"""The advice for the error numbers that users of jaccl report (issues 3207, 3467 and 4209 of MLX)."""


def _advice(error: Exception) -> str:
    """Return a sentence for an error of jaccl that has a known cause, or an empty string."""
    number = re.search(r"\berrno (\d+)", str(error))
    advice = _RDMA_ADVICE.get(number[1]) if number and "[jaccl]" in str(error) else None
    return f". {advice}" if advice else ""


CHAINS = 4
"""Chains of a measurement. The first one compiles kernels."""

CHAIN = 32
"""Sums in a row of one measurement. Each needs the result of the one before, as in a pass through the layers."""


def measure_collective(communicator: GroupCommunicator, hidden: int, dtype: mx.Dtype) -> float:
    """Return the seconds of one sum of `[1, hidden]` in a chain. Every member must call it at the same place.

    The fastest of several chains counts, because other programs may disturb some of them.
    """
    ones = mx.ones((1, hidden), dtype)
    taken = list[float]()
    for _ in range(CHAINS):
        x, started = ones, time.perf_counter()
        for _ in range(CHAIN):
            x = communicator.sum(x) * (1 / communicator.size)
        mx.eval(x)
        taken.append(time.perf_counter() - started)
    return min(taken) / CHAIN
