"""Measurement of a link between two machines over a gRPC stream like the one that carries frames."""

from __future__ import annotations

import asyncio
import json
import statistics
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import grpc.aio

from proto.errors import DeadlineError, ProtocolError

SERVICE = "mtpcluster.v1.LinkTest"

STREAM = f"/{SERVICE}/Stream"
"""Stream to stream: the receiver answers each message with its clock, seconds since 1970 as 8 bytes."""

REACH = f"/{SERVICE}/Reach"
"""Unary: a JSON object with `address` and `node`. The worker measures its link to that address and replies figures."""

SMALL_BYTES, SMALL_COUNT = 20_000, 200
"""The hidden state of one token of a large model, and the number of them in a measurement."""

LARGE_BYTES, LARGE_COUNT = 5_000_000, 10
"""The hidden states of a prompt chunk of a large model, and the number of them in a measurement."""

SECONDS = 30.0
"""Seconds. Longest measurement. A link of 2 MB/s needs 27 seconds."""

_CLOCK = struct.Struct("!d")


@dataclass(frozen=True)
class LinkFigures:
    """A link's round trip of 20 KB in seconds, its speed for 5 MB messages, and the receiver's clock offset.

    `clock_offset` is in seconds, positive for a receiver whose clock is ahead.
    """

    p50: float
    p99: float
    bytes_per_second: float
    clock_offset: float

    def encode(self) -> bytes:
        """Return the figures as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> LinkFigures:
        """Invert `encode`. Raises ProtocolError for anything else."""
        try:
            found = json.loads(data)
            return cls(**{name: float(found[name]) for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"the figures of a link are malformed: {error}") from error


async def acknowledge(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield this machine's clock for each message, for at most SECONDS. The receiver's side of `measure_link`."""
    try:
        async with asyncio.timeout(SECONDS):
            async for _ in messages:
                yield _CLOCK.pack(time.time())
    except TimeoutError:
        return


async def measure_link(
    channel: grpc.aio.Channel, *, small_count: int = SMALL_COUNT, large_count: int = LARGE_COUNT
) -> LinkFigures:
    """Measure the link behind `channel`.

    Raises grpc.aio.AioRpcError if the receiver is unreachable, ProtocolError if it ends the stream, and DeadlineError
    after SECONDS.
    """
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(STREAM)
    call = method()
    try:
        async with asyncio.timeout(SECONDS):
            await _round_trip(call, b"first")
            small = [await _round_trip(call, bytes(SMALL_BYTES)) for _ in range(small_count)]
            large = [await _round_trip(call, bytes(LARGE_BYTES)) for _ in range(large_count)]
            await call.done_writing()
    except TimeoutError:
        raise DeadlineError(f"measuring the link timed out after {SECONDS:g} s") from None
    finally:
        call.cancel()
    trips = sorted(seconds for seconds, _ in small)
    p50 = statistics.median(trips)
    transfer = statistics.median(seconds for seconds, _ in large)
    _, offset = min(small)  # the fastest round trip bounds the offset best
    return LinkFigures(p50, trips[int(0.99 * (len(trips) - 1))], LARGE_BYTES / transfer, offset)


async def _round_trip(
    call: grpc.aio.StreamStreamCall[bytes, bytes], data: bytes
) -> tuple[float, float]:
    """Send `data` and wait for the reply. Return seconds and the receiver's clock offset."""
    sent, started = time.time(), time.perf_counter()
    await call.write(data)
    reply = await call.read()
    seconds = time.perf_counter() - started
    if not isinstance(reply, bytes) or len(reply) != _CLOCK.size:
        raise ProtocolError("the receiver ended the link test")
    return seconds, _CLOCK.unpack(reply)[0] - (sent + seconds / 2)
