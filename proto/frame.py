"""The frame, one message along the pipeline: a header and, on middle hops, a hidden-state tensor.

On the wire, a prefix of 16 bytes comes first: magic `b"MTPF"`, version u8, three zero bytes, header length u32, a zero
u32 (little endian). Then follow the msgpack header, zero bytes up to a multiple of 16, and the bytes of the tensor. The
header lists the state operations, which stages apply in order, and the segments. A segment is a run of tokens of one
sequence. Segments follow each other in the tensor's first axis. All stages process the same frames in the same order,
so the header alone keeps them replicas of one state machine (DESIGN §3).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from proto.dtype import DTYPE_BYTES
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
from proto.wire import MAX_INT, check_ints, check_list, check_row, check_str

__all__ = [
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
    "encode_head",
]

VERSION = 1
MAGIC = b"MTPF"
_PREFIX = struct.Struct("<4sB3xII")

ALIGNMENT = 16
"""Bytes. The tensor starts at a multiple of this, so that any vector load can read it in place."""

MAX_HEADER_BYTES = 8 * 2**20
"""Bounds a header. It carries token ids, and 262,144 of them take 1 MB; the rest is a margin."""

MAX_VOCABULARY_BYTES = 6 * 2**20
"""Bytes. Maximum size of the packed vocabulary in a header; 250,000 tokens take about 1.4 MB."""

MAX_FRAME_TOKENS = 2**18
MAX_SEGMENTS = 1024
MAX_OPS = 4096
MAX_STAGES = 64
"""Maximum stages of a plan. No model of the family has more layers."""

MAX_MESSAGE_BYTES = 2**31 - 1
"""Maximum bytes of a message: gRPC's own limit, for the channel options of a stream."""

MAX_TENSOR_BYTES = MAX_MESSAGE_BYTES - MAX_HEADER_BYTES - _PREFIX.size - ALIGNMENT

_LIMITS: dict[str, Any] = {
    # msgpack reserves an array's declared length before it reads the first element, and again for each
    # of up to 1024 nested arrays. Long lists are therefore read element by element (see _many), and
    # this bounds every array that is read at once.
    "max_array_len": 64,
    "max_map_len": MAX_LOGIT_BIAS,
    "max_str_len": 64,
    "max_bin_len": MAX_VOCABULARY_BYTES,
    "max_ext_len": 0,
    "strict_map_key": False,
}

SHORT_HEADER_BYTES = 448
"""Bytes. A header up to this length is read at once. No valid list in it has more than 64 elements, the limit below."""

_FRAME_NAMES = ("epoch", "number", "stage time or shape")


_packer = msgpack.Packer()
"""The packer of the headers of all threads. A new packer for each header would allocate a buffer of 256 KB.

A call holds Python's lock from its start to its end.
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and, between stages, the hidden states of its rows: `[rows, hidden_size]`.

    `number` grows by one with each frame of an epoch, so a stage detects a gap or a swap. `stage_us`
    collects the compute time of each stage in microseconds. The last stage fills `outcomes`, in the
    order of `segments`. Raises ProtocolError for values that `decode` would refuse.
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
    rows: int = field(init=False, compare=False, repr=False)
    """Number of rows of all segments."""
    continues: bool = field(init=False, compare=False, repr=False)
    """True if a segment continues with a token that the header does not carry."""

    def __post_init__(self) -> None:
        check_ints((self.epoch, self.number, *self.stage_us, *self.shape), _FRAME_NAMES)
        tokens = rows = continues = 0
        for segment in self.segments:
            width = len(segment.tokens) + segment.continues
            tokens += width
            continues |= segment.continues
            rows += 0 if segment.cancelled else width
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "continues", continues != 0)
        most = max(len(self.ops), len(self.segments), len(self.outcomes), len(self.stage_us))
        if most > MAX_STAGES or tokens > MAX_FRAME_TOKENS:
            _check_counts(self, tokens)
        if self.dtype or self.shape or len(self.tensor):
            _check_tensor(self)

    def with_tensor(self, dtype: str, shape: tuple[int, ...], tensor: memoryview | bytes) -> Frame:
        """Return this frame with the hidden states `tensor` of `shape`."""
        return replace(self, dtype=dtype, shape=shape, tensor=tensor)


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame. Raises ProtocolError for a header above MAX_HEADER_BYTES."""
    head = encode_head(frame)
    return b"".join((head, frame.tensor)) if frame.dtype else head


def encode_head(frame: Frame) -> bytes:
    """Return the bytes of a frame before its tensor. Raises ProtocolError as `encode` does."""
    header: bytes = _packer.pack(
        (
            frame.epoch,
            frame.number,
            tuple(map(op_to_wire, frame.ops)),
            tuple(map(segment_to_wire, frame.segments)),
            tuple(map(outcome_to_wire, frame.outcomes)),
            frame.stage_us,
            frame.dtype,
            frame.shape,
        )
    )
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"frame header of {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header), 0)
    if not frame.dtype:
        return prefix + header
    return prefix + header + bytes(_gap(len(header)))


def decode(data: bytes | bytearray) -> Frame:
    """Invert `encode`. The tensor is a view into `data`, not a copy.

    Raises VersionError for another protocol version and ProtocolError for malformed bytes. Allocates at
    most a small multiple of `len(data)` for any input.
    """
    end = _PREFIX.size + _header_bytes(data)
    try:
        return _read_frame(data, end)
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises many kinds; a peer's bytes may cause any of them
        raise ProtocolError(f"malformed frame header: {type(error).__name__}") from error


def _header_bytes(data: bytes | bytearray) -> int:
    if len(data) < _PREFIX.size:
        raise ProtocolError(f"frame of {len(data)} bytes is shorter than its prefix")
    magic, version, header_bytes, zero = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("not a frame: wrong magic")
    if version != VERSION:
        raise VersionError(
            f"the peer uses frame version {version}, this process uses {VERSION}. "
            "Install the same release of mtp-cluster on both"
        )
    fits = 0 < header_bytes <= min(MAX_HEADER_BYTES, len(data) - _PREFIX.size)
    if zero or not fits:
        raise ProtocolError(f"frame header of {header_bytes} bytes does not fit the message")
    return int(header_bytes)


def _gap(header_bytes: int) -> int:
    """Return the number of zero bytes between header and tensor."""
    return -(_PREFIX.size + header_bytes) % ALIGNMENT


def _read_frame(data: bytes | bytearray, end: int) -> Frame:
    """Return the frame of `data`, whose header ends at byte `end`."""
    view = memoryview(data)
    header = view[_PREFIX.size : end]
    read = _read_short if len(header) <= SHORT_HEADER_BYTES else _read_long
    epoch, number, ops, segments, outcomes, stage_us, dtype, shape = read(header)
    check_str(dtype, "dtype")
    start = end
    if dtype:
        start += _gap(len(header))
        if data[end:start].strip(b"\0"):
            raise ProtocolError("malformed frame: no zeros between header and tensor")
    return Frame(
        epoch,
        number,
        tuple(map(op_from_wire, check_list(ops, "operations", MAX_OPS))),
        tuple(map(segment_from_wire, check_list(segments, "segments", MAX_SEGMENTS))),
        tuple(map(outcome_from_wire, check_list(outcomes, "outcomes", MAX_SEGMENTS))),
        tuple(check_list(stage_us, "stage times", MAX_STAGES)),
        dtype,
        tuple(check_list(shape, "shape", 2)),
        view[start:],
    )


def _read_short(header: memoryview) -> list[Any]:
    """Return the fields of a header of at most SHORT_HEADER_BYTES."""
    fields = msgpack.unpackb(header, object_pairs_hook=_unique, **_LIMITS)
    return check_row(fields, "frame header", 8)


def _read_long(header: memoryview) -> list[Any]:
    """Return the fields of a header of any length. The lists of operations, segments and outcomes may be long."""
    reader = msgpack.Unpacker(max_buffer_size=len(header), object_pairs_hook=_unique, **_LIMITS)
    reader.feed(header)
    if reader.read_array_header() != 8:
        raise ProtocolError("a frame header has 8 fields")
    fields = [reader.unpack(), reader.unpack()]
    fields += [
        _many(reader, "operations", MAX_OPS),
        _many(reader, "segments", MAX_SEGMENTS),
        _many(reader, "outcomes", MAX_SEGMENTS),
    ]
    fields += [reader.unpack(), reader.unpack(), reader.unpack()]
    if reader.tell() != len(header):
        raise ProtocolError("bytes after the last field of a frame header")
    return fields


def _many(reader: msgpack.Unpacker, name: str, most: int) -> list[Any]:
    count = reader.read_array_header()
    if count > most:
        raise ProtocolError(f"{count} {name} in a frame, limit {most}")
    return [reader.unpack() for _ in range(count)]


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError("a map in a frame header names a key twice")
    return found


def _check_counts(frame: Frame, tokens: int) -> None:
    counts = (
        ("operations", len(frame.ops), MAX_OPS),
        ("segments", len(frame.segments), MAX_SEGMENTS),
        ("outcomes", len(frame.outcomes), MAX_SEGMENTS),
        ("stage times", len(frame.stage_us), MAX_STAGES),
        ("tokens", tokens, MAX_FRAME_TOKENS),
    )
    for name, count, most in counts:
        if count > most:
            raise ProtocolError(f"{count} {name} in a frame, limit {most}")


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
