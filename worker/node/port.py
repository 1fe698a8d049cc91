"""The worker's port: its gRPC server behind a port that also accepts data connections."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proto.errors import UsageError
from proto.rpc.channels import add_port
from proto.rpc.shared_port import SharedPort
from worker.node.node import WorkerNode
from worker.node.service import STOP_SECONDS, make_server
from worker.node.socket_folder import socket_folder


@asynccontextmanager
async def served(node: WorkerNode, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the calls and the data connections of `node` at a bound `listener` while the block runs.

    Raises UsageError if the temporary directory cannot hold a socket.
    """
    with socket_folder() as folder:
        path = f"{folder}/grpc"
        server = make_server(node)
        try:
            add_port(server, f"unix:{path}", node.identity.trust)
        except RuntimeError as error:  # gRPC has logged the cause, such as a path above 103 bytes
            raise UsageError(
                f"{path}: no socket can be made there. Set TMPDIR to a shorter directory"
            ) from error
        await server.start()
        port = SharedPort(listener, path, node.tickets.accept)
        port.start()
        try:
            yield
        finally:
            await server.stop(STOP_SECONDS)
            await port.close()
