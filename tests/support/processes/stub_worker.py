"""Workers that answer only Describe and Signals, for releases, checkpoints and moments that no real worker has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from proto import cluster_pb2 as pb
from proto.frame import VERSION

SERVICE = "mtpcluster.v1.Worker"


def _open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass
class StubMember:
    """A worker with the files of the checkpoint with `fingerprint`, whose messages the test can hold back."""

    name: str
    fingerprint: str
    address: str = ""
    described: int = 0
    """Number of Describe calls that arrived."""
    watchers: int = 0
    """Number of open Signals streams."""
    may_answer: threading.Event = field(default_factory=_open_gate)
    """Describe calls wait for it."""
    may_report: threading.Event = field(default_factory=_open_gate)
    """The first status waits for it."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the description that differ from those of the usual one."""

    def describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.WorkerInfo:
        """Return the description, with the fingerprint if the request names the checkpoint of this worker."""
        self.described += 1
        self.may_answer.wait(GATE_SECONDS)
        known = request.model.fingerprint == self.fingerprint
        usual: dict[str, Any] = {
            "protocol_version": VERSION,
            "worker_id": self.name,
            "name": self.name,
            "hardware": pb.Hardware(memory_limit=2**40, bytes_per_second=2e11),
            "fingerprint": self.fingerprint if known else "",
            "state": pb.WORKER_STATE_IDLE,
        }
        return pb.WorkerInfo(**usual | self.fields)

    def signals(self, requests: Iterator[pb.Signal], context: grpc.ServicerContext) -> Iterator[pb.WorkerStatus]:
        """Answer every heartbeat with a status."""
        self.watchers += 1
        context.add_callback(self._end_watch)
        for _ in requests:
            if self.may_report.is_set():
                yield pb.WorkerStatus(state=pb.WORKER_STATE_IDLE)

    def _end_watch(self) -> None:
        self.watchers -= 1


GATE_SECONDS = 30.0
"""Seconds. Longest wait of a Describe call, so that a failed test ends."""


@contextmanager
def stub_members(*members: StubMember) -> Iterator[None]:
    """Run these workers, and set their addresses."""
    with ThreadPoolExecutor(4 * len(members)) as threads:
        servers = []
        for member in members:
            server = grpc.server(threads)
            describe = grpc.unary_unary_rpc_method_handler(
                member.describe,
                request_deserializer=pb.DescribeRequest.FromString,
                response_serializer=pb.WorkerInfo.SerializeToString,
            )
            signals = grpc.stream_stream_rpc_method_handler(
                member.signals,
                request_deserializer=pb.Signal.FromString,
                response_serializer=pb.WorkerStatus.SerializeToString,
            )
            handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
                "Describe": describe,
                "Signals": signals,
            }
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
            member.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            server.start()
            servers.append(server)
        try:
            yield
        finally:
            for member in members:
                member.may_answer.set()
            for server in servers:
                server.stop(0).wait()
