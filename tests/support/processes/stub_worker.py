"""A worker that only answers Describe, for releases and checkpoints that no real worker in a test can have."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from proto import cluster_pb2 as pb
from proto.frame import VERSION

SERVICE = "mtpcluster.v1.Worker"


@contextmanager
def stub_worker(name: str, *, version: int = VERSION, fingerprint: str = "") -> Iterator[str]:
    """Run a stub worker called `name` and give its address."""
    info = pb.WorkerInfo(
        protocol_version=version,
        worker_id=name,
        name=name,
        hardware=pb.Hardware(memory_limit=2**40, bytes_per_second=1e11),
        model="another-model",
        fingerprint=fingerprint,
        state=pb.WORKER_STATE_IDLE,
    )
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        describe = grpc.unary_unary_rpc_method_handler(
            lambda request, context: info,
            request_deserializer=pb.DescribeRequest.FromString,
            response_serializer=pb.WorkerInfo.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(SERVICE, {"Describe": describe})
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()
