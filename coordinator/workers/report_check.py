"""The check of a worker's report about itself. A broken or hostile worker is left out, and the others serve."""

from __future__ import annotations

from proto import cluster_pb2 as pb
from proto.rpc.grpc_text import printable
from proto.rpc.hop_probe import HopFigures

MAX_SPEED = 1e15
"""Bytes per second. Far above any memory, and small enough for exact planning."""

MAX_MEMORY = 2**50
"""Bytes. One pebibyte: far above any machine, and small enough for sums."""

MAX_NAME = 64
"""Characters of a name in logs and status."""

MAX_HOP_US = 60e6
"""Microseconds of one hop. A hop that takes a minute has failed by the timeout before."""

MAX_ID = 128
"""Characters of a worker id. Our workers send 16."""


def shown_name(info: pb.WorkerInfo, address: str) -> str:
    """Return the worker's name without control characters, cut to MAX_NAME characters, or its address."""
    return printable(info.name, MAX_NAME) or address


def report_problem(info: pb.WorkerInfo, num_layers: int) -> str:
    """Return what is wrong with a report for a model of `num_layers` layers, or an empty string."""
    hardware = info.hardware
    if not info.worker_id or len(info.worker_id) > MAX_ID or not info.worker_id.isprintable():
        return "reports an invalid worker id"
    if not 0 <= hardware.bytes_per_second <= MAX_SPEED:  # not for NaN either
        return f"reports an invalid speed of {hardware.bytes_per_second:g} bytes/s"
    if not 0 < hardware.memory_limit <= MAX_MEMORY:
        return f"reports an invalid memory limit of {hardware.memory_limit} bytes"
    if info.HasField("pinned"):
        start, end = info.pinned.start, info.pinned.end
        if start >= end:
            return f"pins the layers {start} to {end}, which are none"
        if end > num_layers:
            return (
                f"is pinned to layers {start}-{end - 1}, and the model has {num_layers} (0-{num_layers - 1}). "
                "Restart it with other --layers"
            )
    return ""


def reported_hop(reply: pb.ConnectReply) -> HopFigures | None:
    """Return the figures of a worker's hop to the next stage, or None for a stage without one or invalid figures."""
    if not 0 < reply.link_us <= MAX_HOP_US or not 0 <= reply.link_bytes_per_second <= MAX_SPEED:
        return None
    kind = printable(reply.link_kind, MAX_NAME)
    return HopFigures(reply.link_us / 1e6, reply.link_bytes_per_second, kind)
