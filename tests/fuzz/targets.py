"""The fuzz targets: each feeds bytes to one reader and lets only the reader's own errors pass."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from google.protobuf.message import DecodeError

from coordinator.serve.http_server import HostCheck
from mtp.checkpoint.format.shard import read_header
from proto import cluster_pb2 as pb
from proto.announcement import Announcement
from proto.control import check_signal
from proto.errors import ClusterError, ProtocolError, UsageError
from proto.frame import decode, encode
from proto.rpc.status_codes import from_status
from proto.trust.certificates import from_pem, requested_key
from proto.trust.joining import MAX_LINE_BYTES, JoinToken, read_message
from tests.fuzz.http_bodies import fuzz_http
from tests.fuzz.hub_answers import fuzz_hub

Target = Callable[[bytes], None]


def fuzz_frame(data: bytes) -> None:
    """Read a frame. A frame that is accepted encodes to the same bytes or is refused by the encoder."""
    try:
        frame = decode(data)
    except ProtocolError:
        return
    assert decode(encode(frame)) == frame


def fuzz_signal(data: bytes) -> None:
    """Read a signal of a coordinator."""
    with contextlib.suppress(DecodeError, ProtocolError):
        check_signal(pb.Signal.FromString(data))


def fuzz_announcement(data: bytes) -> None:
    """Read an mDNS record: pairs of key and value, separated by zero bytes."""
    parts = data.split(b"\0")
    record = {key: value if mark else None for key, mark, value in (part.partition(b"=") for part in parts)}
    with contextlib.suppress(ProtocolError):
        found = Announcement.from_txt(record, len(data))
        assert found.name and found.name.isprintable()
        assert len(found.instance.encode()) < 256
        found.to_txt()


def fuzz_join_token(data: bytes) -> None:
    """Read a join token."""
    text = data.decode("latin-1")
    with contextlib.suppress(UsageError):
        assert JoinToken.parse(text) == JoinToken.parse(str(JoinToken.parse(text)))


def fuzz_join_message(data: bytes) -> None:
    """Read a message of a join, and the certificate and the request in it."""

    async def read() -> None:
        """Read one message from a stream that ends."""
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        reader.feed_data(data)
        reader.feed_eof()
        await read_message(reader)

    with contextlib.suppress(ClusterError):
        _loop().run_until_complete(read())


def fuzz_certificate(data: bytes) -> None:
    """Read certificates and a signing request in PEM."""
    text = data.decode("latin-1")
    for reader in (from_pem, requested_key):
        with contextlib.suppress(ClusterError):
            reader(text)


def fuzz_status(data: bytes) -> None:
    """Read the status of a failed call, which never raises."""
    text = data.decode("latin-1")
    name, _, rest = text.partition(" ")
    kinds: tuple[tuple[str, str | None, str | bytes], ...] = (("UNKNOWN", text, name), (name, None, data))
    for code, details, kind in kinds:
        metadata = [("mtp-error", kind), ("mtp-retry-after", rest), ("mtp-public-bin", data)]
        assert str(from_status(code, details, metadata, "peer"))


def fuzz_host(data: bytes) -> None:
    """Check a Host header. Names that are not this server's are refused."""

    async def app(scope: object, receive: object, send: object) -> None:
        """Do nothing."""

    check = HostCheck(app, "server", ())
    text = data.decode("latin-1")
    if check.is_known(text):
        assert "evil.example" not in text.lower()


def fuzz_safetensors(data: bytes) -> None:
    """Read the header of a safetensors file."""
    file = _file()
    file.write_bytes(data)
    with contextlib.suppress(ClusterError):
        read_header(file)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all inputs share."""
    return asyncio.new_event_loop()


@cache
def _file() -> Path:
    """Return the file that all inputs share. Its folder ends with the process."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz")
    atexit.register(folder.cleanup)
    return Path(folder.name, "input.safetensors")


TARGETS: dict[str, Target] = {
    "frame": fuzz_frame,
    "signal": fuzz_signal,
    "announcement": fuzz_announcement,
    "join_token": fuzz_join_token,
    "join_message": fuzz_join_message,
    "certificate": fuzz_certificate,
    "status": fuzz_status,
    "host": fuzz_host,
    "safetensors": fuzz_safetensors,
    "http": fuzz_http,
    "hub": fuzz_hub,
}
