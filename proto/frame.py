"""The frame: one message along the pipeline. A header, then, on middle hops, a hidden-state tensor.

On the wire: magic `b"MTPF"`, version u8, three zero bytes, header length u32 and a zero u32 (little
endian), the msgpack header, zero bytes up to a multiple of 16, the tensor's bytes. The header lists
state operations, applied in order, and segments: runs of tokens of one sequence each, laid one after
another in the tensor's first axis. All stages see the same frames in the same order, so the header
alone keeps them replicas of one state machine (DESIGN §3).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgpack

from proto.errors import ProtocolError, VersionError
from proto.operation import (
    Admit,
    Commit,
    DropPrefix,
    Evict,
    Op,
    RestorePrefix,
    SavePrefix,
    op_from_wire,
    op_to_wire,
)
from proto.params import MAX_LOGIT_BIAS
from proto.segment import (
    MAX_DRAFTS,
    Outcome,
    Segment,
    TokenLogprob,
    outcome_from_wire,
    outcome_to_wire,
    segment_from_wire,
    segment_to_wire,
)
from proto.wire import MAX_INT, check_int, check_list, check_str

__all__ = [
    "DTYPE_BYTES",
    "MAX_DRAFTS",
    "MAX_FRAME_TOKENS",
    "MAX_INT",
    "MAX_MESSAGE_BYTES",
    "VERSION",
    "Admit",
    "Commit",
    "DropPrefix",
    "Evict",
    "Frame",
    "Op",
    "Outcome",
    "RestorePrefix",
    "SavePrefix",
    "Segment",
    "TokenLogprob",
    "decode",
    "encode",
]

VERSION = 1
MAGIC = b"MTPF"
_PREFIX = struct.Struct("<4sB3xII")

ALIGNMENT = 16
"""The tensor starts at a multiple of this, so that it can be read in place by any vector load."""

MAX_HEADER_BYTES = 8 * 2**20
"""A header carries token ids: 262,144 of them are 1 MB; this leaves room, and no more."""

MAX_FRAME_TOKENS = 2**18
MAX_SEGMENTS = 1024
MAX_OPS = 4096
MAX_STAGES = 64
"""No model of the family has more layers."""

MAX_MESSAGE_BYTES = 2**31 - 1
"""gRPC's own limit, for the stream's channel options."""

MAX_TENSOR_BYTES = MAX_MESSAGE_BYTES - MAX_HEADER_BYTES - _PREFIX.size - ALIGNMENT

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_LIMITS: dict[str, Any] = {
    # msgpack reserves an array's declared length before it has seen one element, and once more for
    # each of up to 1024 nested ones. Long lists are therefore read element by element (see _many), and
    # no array that is read at once is longer than this.
    "max_array_len": 64,
    "max_map_len": MAX_LOGIT_BIAS,
    "max_str_len": 64,
    "max_bin_len": 4 * MAX_FRAME_TOKENS,
    "max_ext_len": 0,
    "strict_map_key": False,
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Frame:
    """A header and, between stages, the hidden states of its rows: `[rows, hidden_size]`.

    `number` grows by one a frame within an epoch, so a gap or a swap is noticed. `stage_us` collects
    each stage's compute time in microseconds. `outcomes` is filled by the last stage, in the order of
    `segments`.
    """

    epoch: int
    number: int
    ops: tuple[Op, ...] = ()
    segments: tuple[Segment, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    stage_us: tuple[int, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()
    tensor: memoryview | bytes = b""

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    def with_tensor(self, dtype: str, shape: tuple[int, ...], tensor: memoryview | bytes) -> Frame:
        return replace(self, dtype=dtype, shape=shape, tensor=tensor)


def encode(frame: Frame) -> bytes:
    """Bytes of a frame. Raises ProtocolError for one that `decode` would refuse."""
    _check_limits(frame)
    header: bytes = msgpack.packb(
        [
            check_int(frame.epoch, "epoch"),
            check_int(frame.number, "number"),
            [op_to_wire(op) for op in frame.ops],
            [segment_to_wire(s) for s in frame.segments],
            [outcome_to_wire(o) for o in frame.outcomes],
            [check_int(t, "stage time") for t in frame.stage_us],
            frame.dtype,
            [check_int(n, "shape") for n in frame.shape],
        ]
    )
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"frame header of {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header), 0)
    if not frame.dtype:
        return prefix + header
    return b"".join((prefix, header, bytes(_gap(len(header))), frame.tensor))


def decode(data: bytes) -> Frame:
    """Inverse of `encode`; the tensor is a view into `data`, not a copy.

    Raises VersionError for another protocol version and ProtocolError for anything malformed.
    Allocates no more than a small multiple of `len(data)`, whatever the bytes say.
    """
    end = _PREFIX.size + _header_bytes(data)
    try:
        frame = _read_header(memoryview(data)[_PREFIX.size : end])
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises many kinds; a peer's bytes may cause any of them
        raise ProtocolError(f"malformed frame header: {type(error).__name__}") from error
    if frame.dtype:
        start = end + _gap(end - _PREFIX.size)
        if data[end:start].strip(b"\0"):
            raise ProtocolError("malformed frame: no zeros between header and tensor")
        end = start
    frame = replace(frame, tensor=memoryview(data)[end:])
    _check_limits(frame)
    return frame


def _header_bytes(data: bytes) -> int:
    if len(data) < _PREFIX.size:
        raise ProtocolError(f"frame of {len(data)} bytes is shorter than its prefix")
    magic, version, header_bytes, zero = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("not a frame: wrong magic")
    if version != VERSION:
        raise VersionError(
            f"peer speaks frame version {version}, this one {VERSION}: "
            "install the same release of mtp-cluster on both"
        )
    fits = 0 < header_bytes <= min(MAX_HEADER_BYTES, len(data) - _PREFIX.size)
    if zero or not fits:
        raise ProtocolError(f"frame header of {header_bytes} bytes does not fit the message")
    return int(header_bytes)


def _gap(header_bytes: int) -> int:
    """Zero bytes between header and tensor."""
    return -(_PREFIX.size + header_bytes) % ALIGNMENT


def _read_header(header: memoryview) -> Frame:
    reader = msgpack.Unpacker(max_buffer_size=len(header), object_pairs_hook=_unique, **_LIMITS)
    reader.feed(header)
    if reader.read_array_header() != 8:
        raise ProtocolError("a frame header has 8 fields")
    frame = Frame(
        epoch=check_int(reader.unpack(), "epoch"),
        number=check_int(reader.unpack(), "number"),
        ops=_many(reader, "operations", MAX_OPS, op_from_wire),
        segments=_many(reader, "segments", MAX_SEGMENTS, segment_from_wire),
        outcomes=_many(reader, "outcomes", MAX_SEGMENTS, outcome_from_wire),
        stage_us=tuple(
            check_int(t, "stage time")
            for t in check_list(reader.unpack(), "stage times", MAX_STAGES)
        ),
        dtype=check_str(reader.unpack(), "dtype"),
        shape=tuple(check_int(n, "shape") for n in check_list(reader.unpack(), "shape", 2)),
    )
    if reader.tell() != len(header):
        raise ProtocolError("bytes after the last field of a frame header")
    return frame


def _many(
    reader: msgpack.Unpacker, name: str, most: int, from_wire: Callable[[Any], _T]
) -> tuple[_T, ...]:
    count = reader.read_array_header()
    if count > most:
        raise ProtocolError(f"{count} {name} in a frame, limit {most}")
    return tuple(from_wire(reader.unpack()) for _ in range(count))


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError("a map in a frame header names a key twice")
    return found


def _check_limits(frame: Frame) -> None:
    counts = (
        ("operations", len(frame.ops), MAX_OPS),
        ("segments", len(frame.segments), MAX_SEGMENTS),
        ("outcomes", len(frame.outcomes), MAX_SEGMENTS),
        ("stage times", len(frame.stage_us), MAX_STAGES),
        ("tokens", sum(s.width for s in frame.segments), MAX_FRAME_TOKENS),
    )
    for name, count, most in counts:
        if count > most:
            raise ProtocolError(f"{count} {name} in a frame, limit {most}")
    _check_tensor(frame)


def _check_tensor(frame: Frame) -> None:
    size = memoryview(frame.tensor).nbytes
    if frame.dtype == "":
        if size or frame.shape:
            raise ProtocolError(f"{size} bytes of tensor without a dtype")
        return
    if frame.dtype not in DTYPE_BYTES:
        raise ProtocolError(f"tensor dtype is one of {', '.join(DTYPE_BYTES)}")
    if len(frame.shape) != 2:
        raise ProtocolError(f"tensor of {len(frame.shape)} axes, expected [rows, hidden_size]")
    rows, hidden = frame.shape
    expected = DTYPE_BYTES[frame.dtype] * rows * hidden
    if expected != size or size > MAX_TENSOR_BYTES:
        raise ProtocolError(
            f"tensor {frame.shape} {frame.dtype} takes {expected} bytes, the message has {size} "
            f"(limit {MAX_TENSOR_BYTES})"
        )
    if rows != frame.rows:
        raise ProtocolError(f"tensor has {rows} rows, its segments {frame.rows}")
