"""Texts of failed gRPC calls are shown in plain words."""

from __future__ import annotations

import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import grpc
import grpc.aio
import pytest

from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.errors import ClusterError
from proto.rpc.status_codes import from_status, plain_text, printable


async def describe(address: str) -> ClusterError:
    """Return the error of a Describe call to `address`."""
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await pb_grpc.WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=10)
    error = failed.value
    return from_status(error.code().name, error.details(), error.trailing_metadata(), address)


async def test_an_http_server_is_named_as_another_program() -> None:
    """A coordinator's HTTP port given as a worker is explained, without the bytes it answered."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        text = str(await describe(f"127.0.0.1:{server.server_port}"))
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
    assert "another program listens there" in text
    assert "mtp-worker" in text
    assert "HTTP/2" not in text


def test_unknown_texts_are_bounded_and_printable() -> None:
    """Control characters of a peer reach no terminal, and a long text is cut."""
    assert plain_text("odd \x1b[31m\r\nthing") == "odd [31m thing"
    assert len(plain_text("x" * 10_000)) == 200
    assert printable("a\x00b" * 10**6, 5) == "a ba…"


def test_a_peer_cannot_send_control_characters_in_our_errors() -> None:
    """The text of an error class of ours is cleaned too, because any peer may claim it."""
    error = from_status("UNAVAILABLE", "bad \x1b[2J", [("mtp-error", "WorkerLostError")], "w")
    assert "\x1b" not in str(error)
