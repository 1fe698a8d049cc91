"""The frame: one message along the pipeline. A header, then, on middle hops, a hidden-state tensor.

On the wire: magic `b"MTPF"`, version u8, header length u32 (little endian), msgpack header, tensor bytes.
The header lists state operations, applied in order, and segments: runs of tokens of one sequence each,
laid one after another in the tensor's first axis. All stages see the same frames in the same order, so the
header alone keeps them replicas of one state machine (DESIGN §3).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgpack

from proto.errors import ProtocolError, VersionError
from proto.params import SamplingParams

VERSION = 1
MAGIC = b"MTPF"
_PREFIX = struct.Struct("<4sBI")

MAX_INT = 2**63 - 1
"""Of every integer but a seed: msgpack and SQLite, JSON and Swift clients all hold it signed."""

MAX_HEADER_BYTES = 8 * 2**20
"""A header carries token ids: 262,144 of them are 1.3 MB; this leaves room, and no more."""

MAX_FRAME_TOKENS = 2**18
MAX_SEGMENTS = 1024
MAX_OPS = 4096
MAX_TENSOR_BYTES = 2**31 - 2**20
"""Just under gRPC's own limit of 2 GiB a message."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


# ---- operations: what a header does to a stage's sequences, in order


@dataclass(frozen=True)
class Admit:
    """Create an empty sequence. `capacity` is the most tokens it will ever hold.

    The first `prompt` of them are the user's: presence and frequency penalties leave those out.
    """

    kind: ClassVar[str] = "admit"
    seq_id: int
    capacity: int
    prompt: int
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Commit:
    """Make the first `kept` tokens of open window `window` permanent.

    Fewer than its width also drops the rest and every window opened after it. Saying it again changes nothing.
    """

    kind: ClassVar[str] = "commit"
    seq_id: int
    window: int
    kept: int


@dataclass(frozen=True)
class Evict:
    """Forget a sequence and all it holds."""

    kind: ClassVar[str] = "evict"
    seq_id: int


@dataclass(frozen=True)
class SavePrefix:
    """Keep what sequence `seq_id` holds now, all its windows committed, as prefix entry `entry`."""

    kind: ClassVar[str] = "save"
    seq_id: int
    entry: int


@dataclass(frozen=True)
class RestorePrefix:
    """Start the just admitted, empty sequence `seq_id` from prefix entry `entry`."""

    kind: ClassVar[str] = "restore"
    seq_id: int
    entry: int


@dataclass(frozen=True)
class DropPrefix:
    """Forget prefix entry `entry`."""

    kind: ClassVar[str] = "drop"
    entry: int


Op = Admit | Commit | Evict | SavePrefix | RestorePrefix | DropPrefix
_OPS: dict[str, type[Op]] = {
    op.kind: op for op in (Admit, Commit, Evict, SavePrefix, RestorePrefix, DropPrefix)
}


# ---- segments, and what the last stage says of them


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one sequence.

    `window` counts the sequence's segments from 0 and is never reused. `position` is where `tokens[0]`
    stands in the sequence. A prompt chunk is not `open`: its tokens are permanent. An open window waits
    for its Commit. `sample` asks the last stage for the token after it, `drafts` for that many drafts after
    that. `cancelled` marks a segment that builds on a rejected window; a stage passes it on with no rows.
    """

    seq_id: int
    window: int
    position: int
    tokens: tuple[int, ...]
    open: bool = False
    sample: bool = False
    drafts: int = 0
    cancelled: bool = False

    @property
    def width(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        """How many rows of the frame's tensor are its."""
        return 0 if self.cancelled else len(self.tokens)


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of an emitted token, and of the `top` most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What the last stage decided about one segment.

    `kept` of its tokens were right (all, for a prompt chunk). `token` is the target's choice after the last
    kept one, None when nothing was sampled. `drafts` follow `token`. `logprobs` has one entry for each
    token this outcome emits: the kept drafts, then `token`; empty when not asked for.
    """

    seq_id: int
    window: int
    kept: int
    token: int | None = None
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cancelled: bool = False


@dataclass(frozen=True)
class Frame:
    """A header and, between stages, the hidden states of its rows: `[rows, hidden_size]`.

    `number` grows by one a frame within an epoch, so a gap or a swap is noticed. `stage_us` collects each
    stage's compute time in microseconds. `outcomes` is filled by the last stage, in the order of `segments`.
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


# ---- codec


def encode(frame: Frame) -> bytes:
    """Bytes of a frame. Raises ProtocolError when it breaks a limit."""
    header = msgpack.packb(
        {
            "e": frame.epoch,
            "n": frame.number,
            "o": [_op_to_wire(op) for op in frame.ops],
            "s": [_segment_to_wire(s) for s in frame.segments],
            "r": [_outcome_to_wire(o) for o in frame.outcomes],
            "t": list(frame.stage_us),
            "d": frame.dtype,
            "h": list(frame.shape),
        }
    )
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"frame header of {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    _check_tensor(frame)
    return b"".join((_PREFIX.pack(MAGIC, VERSION, len(header)), header, frame.tensor))


def decode(data: bytes) -> Frame:
    """Inverse of `encode`; the tensor is a view into `data`, not a copy.

    Raises VersionError for another protocol version and ProtocolError for anything malformed. Allocates
    no more than a small multiple of `len(data)`, whatever the bytes say.
    """
    if len(data) < _PREFIX.size:
        raise ProtocolError(f"frame of {len(data)} bytes is shorter than its prefix")
    magic, version, header_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("not a frame: wrong magic")
    if version != VERSION:
        raise VersionError(
            f"peer speaks frame version {version}, this one {VERSION}: install the same release on both"
        )
    end = _PREFIX.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or end > len(data):
        raise ProtocolError(f"frame header of {header_bytes} bytes does not fit the message")
    try:
        wire = msgpack.unpackb(
            memoryview(data)[_PREFIX.size : end],
            strict_map_key=False,
            max_array_len=MAX_FRAME_TOKENS,
            max_map_len=MAX_OPS,
            max_str_len=1024,
            max_bin_len=0,
            max_ext_len=0,
        )
        frame = Frame(
            epoch=_int(wire["e"], "epoch"),
            number=_int(wire["n"], "number"),
            ops=tuple(_op_from_wire(o) for o in _list(wire["o"], "ops", MAX_OPS)),
            segments=tuple(
                _segment_from_wire(s) for s in _list(wire["s"], "segments", MAX_SEGMENTS)
            ),
            outcomes=tuple(
                _outcome_from_wire(o) for o in _list(wire["r"], "outcomes", MAX_SEGMENTS)
            ),
            stage_us=tuple(_int(t, "stage time") for t in _list(wire["t"], "stage times", 1024)),
            dtype=_str(wire["d"], "dtype"),
            shape=tuple(_int(n, "shape") for n in _list(wire["h"], "shape", 4)),
            tensor=memoryview(data)[end:],
        )
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises many kinds; a peer's bytes may cause any of them
        raise ProtocolError(f"malformed frame header: {type(error).__name__}: {error}") from error
    if sum(s.width for s in frame.segments) > MAX_FRAME_TOKENS:
        raise ProtocolError(f"a frame holds at most {MAX_FRAME_TOKENS} tokens")
    _check_tensor(frame)
    return frame


def _check_tensor(frame: Frame) -> None:
    size = len(frame.tensor)
    if not frame.dtype:
        if size or frame.shape:
            raise ProtocolError(f"{size} bytes of tensor without a dtype")
        return
    if frame.dtype not in DTYPE_BYTES:
        raise ProtocolError(f"tensor dtype {frame.dtype!r}: one of {', '.join(DTYPE_BYTES)}")
    if len(frame.shape) != 2:
        raise ProtocolError(f"tensor shape {frame.shape}: [rows, hidden_size] is expected")
    expected = DTYPE_BYTES[frame.dtype] * frame.shape[0] * frame.shape[1]
    if expected != size or size > MAX_TENSOR_BYTES:
        raise ProtocolError(f"tensor {frame.shape} {frame.dtype} needs {expected} bytes, has {size}")
    if frame.shape[0] != frame.rows:
        raise ProtocolError(f"tensor has {frame.shape[0]} rows, its segments {frame.rows}")


def _op_to_wire(op: Op) -> list[Any]:
    match op:
        case Admit(seq_id, capacity, prompt, params):
            return [op.kind, seq_id, capacity, prompt, params.to_wire()]
        case Commit(seq_id, window, kept):
            return [op.kind, seq_id, window, kept]
        case Evict(seq_id):
            return [op.kind, seq_id]
        case SavePrefix(seq_id, entry) | RestorePrefix(seq_id, entry):
            return [op.kind, seq_id, entry]
        case DropPrefix(entry):
            return [op.kind, entry]


def _op_from_wire(wire: Any) -> Op:
    kind, *values = _list(wire, "operation", 8)
    if kind == Admit.kind:
        seq_id, capacity, prompt, params = values
        return Admit(
            _int(seq_id, "seq_id"),
            _int(capacity, "capacity"),
            _int(prompt, "prompt"),
            SamplingParams.from_wire(params),
        )
    if kind not in _OPS:
        raise ProtocolError(f"unknown operation {kind!r}")
    return _OPS[kind](*(_int(v, kind) for v in values))


_OPEN, _SAMPLE, _CANCELLED = 1, 2, 4


def _segment_to_wire(s: Segment) -> list[Any]:
    flags = _OPEN * s.open + _SAMPLE * s.sample + _CANCELLED * s.cancelled
    return [s.seq_id, s.window, s.position, flags, s.drafts, list(s.tokens)]


def _segment_from_wire(wire: Any) -> Segment:
    seq_id, window, position, flags, drafts, tokens = _list(wire, "segment", 6)
    flags = _int(flags, "flags")
    return Segment(
        seq_id=_int(seq_id, "seq_id"),
        window=_int(window, "window"),
        position=_int(position, "position"),
        tokens=tuple(_int(t, "token") for t in _list(tokens, "tokens", MAX_FRAME_TOKENS)),
        open=bool(flags & _OPEN),
        sample=bool(flags & _SAMPLE),
        cancelled=bool(flags & _CANCELLED),
        drafts=_int(drafts, "drafts"),
    )


def _outcome_to_wire(o: Outcome) -> list[Any]:
    logprobs = [[p.token, p.logprob, [list(t) for t in p.top]] for p in o.logprobs]
    return [o.seq_id, o.window, o.kept, o.token, list(o.drafts), logprobs, o.cancelled]


def _outcome_from_wire(wire: Any) -> Outcome:
    seq_id, window, kept, token, drafts, logprobs, cancelled = _list(wire, "outcome", 7)
    return Outcome(
        seq_id=_int(seq_id, "seq_id"),
        window=_int(window, "window"),
        kept=_int(kept, "kept"),
        token=None if token is None else _int(token, "token"),
        drafts=tuple(_int(d, "draft") for d in _list(drafts, "drafts", MAX_FRAME_TOKENS)),
        logprobs=tuple(
            TokenLogprob(
                _int(t, "token"),
                float(p),
                tuple((_int(i, "token"), float(q)) for i, q in _list(top, "top", 64)),
            )
            for t, p, top in _list(logprobs, "logprobs", MAX_FRAME_TOKENS)
        ),
        cancelled=bool(cancelled),
    )


def _int(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProtocolError(f"{name} is a non-negative integer, got {value!r:.60}")
    return value


def _str(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is a string, got {type(value).__name__}")
    return value


def _list(value: Any, name: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ProtocolError(f"{name} is a list of at most {most}")
    return value
