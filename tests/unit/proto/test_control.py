"""Control messages: signals, their size, stream bindings, and errors that cross a wire."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from hypothesis import given
from hypothesis import strategies as st

from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto import errors
from proto.cluster_pb2_grpc import WorkerServicer
from proto.control import Rollback, check_signal
from proto.errors import (
    CapacityError,
    ClusterError,
    DeadlineError,
    ProtocolError,
    VersionError,
    WorkerLostError,
)
from proto.frame import MAX_FRAME_TOKENS, VERSION
from proto.rpc.data_connection import TOKEN_BYTES, StreamBinding
from proto.rpc.status_codes import from_status, plain_text, printable, to_status
from proto.wire import MAX_INT

GRPC_OVERHEAD = 5 + 9
"""Bytes of a message's length prefix and of the header of its HTTP/2 DATA frame."""

integers = st.integers(0, MAX_INT)
rollbacks = st.builds(Rollback, integers, integers, st.integers(0, MAX_FRAME_TOKENS))


@given(st.integers(1, MAX_INT), rollbacks)
def test_what_is_sent_is_received(epoch: int, rollback: Rollback) -> None:
    """A rollback survives the wire unchanged."""
    signal = pb.Signal.FromString(rollback.to_signal(epoch).SerializeToString())
    check_signal(signal)
    r = signal.rollback
    assert (signal.epoch, Rollback(r.seq_id, r.window, r.trim)) == (epoch, rollback)


@given(st.integers(1, MAX_INT), rollbacks)
def test_a_rollback_is_small(epoch: int, rollback: Rollback) -> None:
    """A rejected draft sends at most 128 bytes over the network, framing included."""
    data = rollback.to_signal(epoch).SerializeToString()
    assert len(data) + GRPC_OVERHEAD <= 128


@pytest.mark.parametrize(
    "message",
    [
        pb.Signal(epoch=1),
        pb.Signal(epoch=2**63, heartbeat=pb.Heartbeat()),
        pb.Signal(epoch=0, rollback=pb.Rollback(seq_id=1, window=1, trim=1)),
        pb.Signal(epoch=0, cancel=pb.Cancel(seq_id=1)),
        pb.Signal(epoch=1, rollback=pb.Rollback(seq_id=1, window=1, trim=2**32 - 1)),
        pb.Signal(epoch=1, rollback=pb.Rollback(seq_id=1, window=1, trim=2**18 + 1)),
        pb.Signal(epoch=1, rollback=pb.Rollback(seq_id=2**63, window=1, trim=1)),
        pb.Signal(epoch=1, cancel=pb.Cancel(seq_id=2**64 - 1)),
        pb.Signal(hello=pb.Hello(coordinator=pb.Coordinator(id="a"), protocol_version=VERSION)),
    ],
)
def test_a_signal_out_of_range_is_refused(message: pb.Signal) -> None:
    """Invalid values are a ProtocolError before they change any state."""
    with pytest.raises(ProtocolError):
        check_signal(message)


# ---- stream bindings


@given(integers, integers, st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))
def test_a_binding_survives_its_metadata(epoch: int, stage: int, token: bytes) -> None:
    """A server reads the binding that the client sent, also among other metadata."""
    binding = StreamBinding(epoch, stage, token)
    assert StreamBinding.from_metadata((("user-agent", "grpc"), *binding.to_metadata())) == binding


MALFORMED = [None, "", "-1", "1e3", "²", "9" * 30, b"short", b"x" * (TOKEN_BYTES + 1)]


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for n in ("mtp-epoch", "mtp-stage", "mtp-token-bin") for v in MALFORMED],
)
def test_a_malformed_binding_is_refused(name: str, value: str | bytes | None) -> None:
    """Each entry missing or of another form is a ProtocolError."""
    metadata = dict(StreamBinding(1, 2, bytes(TOKEN_BYTES)).to_metadata())
    if value is None:
        del metadata[name]
    else:
        metadata[name] = value
    with pytest.raises(ProtocolError):
        StreamBinding.from_metadata(tuple(metadata.items()))


# ---- errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ClusterError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_its_class_over_the_wire(kind: type[ClusterError]) -> None:
    """Every class of the tree survives the wire and names the peer; its public form does not."""
    status = to_status(kind("layer 3 is missing"))
    error = from_status(status.code, status.details, status.metadata, "mac-2:50051")
    assert type(error) is kind
    assert "layer 3 is missing" in str(error)
    assert "mac-2" in str(error)
    assert error.public == "layer 3 is missing"


def test_a_public_message_survives() -> None:
    """A public message keeps its text."""
    status = to_status(errors.CheckpointError("/srv/model has no config", public="no such model"))
    assert from_status(status.code, status.details, status.metadata, "w").public == "no such model"


def test_a_foreign_exception_tells_its_class_only() -> None:
    """The text of an unexpected exception stays in the log of its own process."""
    status = to_status(KeyError("/home/me/secret"))
    assert status.code == "INTERNAL"
    assert "secret" not in status.details
    assert "KeyError" in status.details


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNAVAILABLE", WorkerLostError),
        ("CANCELLED", WorkerLostError),
        ("UNKNOWN", WorkerLostError),
        ("DEADLINE_EXCEEDED", DeadlineError),
        ("UNIMPLEMENTED", VersionError),
        ("UNAUTHENTICATED", errors.AccessError),
        ("RESOURCE_EXHAUSTED", ProtocolError),
        ("DATA_LOSS", ClusterError),
    ],
)
def test_grpcs_own_statuses_have_a_meaning(code: str, kind: type[ClusterError]) -> None:
    """A status without our metadata is mapped by its code, and its public form names no address."""
    error = from_status(code, "failed to connect to 10.0.0.7:1", None, "10.0.0.7:1")
    assert type(error) is kind
    assert "10.0.0.7" in str(error)
    assert "10.0.0.7" not in error.public


@pytest.mark.parametrize("text", ["x" * 9000, "é" * 9000, "😀" * 9000, "\udc80" * 9000, ""])
def test_a_status_stays_within_grpcs_header_limit(text: str) -> None:
    """Message and metadata together fit the 8 KB limit of gRPC for any text."""
    error = CapacityError(text)
    error.public = text + "!"
    status = to_status(error)
    metadata = sum(len(k) + len(v) * 4 // 3 + 32 for k, v in status.metadata)
    assert len(status.details.encode()) * 3 + metadata < 8000


# ---- generated code


def test_generated_code_is_current(tmp_path: Path) -> None:
    """The committed code describes proto/cluster.proto as it is today; `make proto` renews it."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools, a development dependency, is missing")
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(root)]
    out = tmp_path / "cluster.bin"
    subprocess.run([*command, f"--descriptor_set_out={out}", "proto/cluster.proto"], check=True, timeout=60)
    (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    messages = [*file.message_type, *(n for m in file.message_type for n in m.nested_type)]
    for field in (field for message in messages for field in message.field):
        field.ClearField("json_name")  # only a descriptor set spells these out
    assert file == FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    methods = {method.name for method in file.service[0].method}
    assert methods <= set(vars(WorkerServicer))


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
