"""The frame, the one message of the data plane: a header of operations, segments and outcomes, and a tensor.

A frame travels as the length of its header, the header in msgpack, and the bytes of the tensor.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

import msgpack

from proto.backup import KEY_BYTES
from proto.errors import ProtocolError
from proto.images import ImageSpan, check_images
from proto.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from proto.wire import (
    DTYPE_BYTES,
    MAX_TOKEN,
    check_float,
    check_int,
    check_ints,
    check_list,
    check_row,
    check_tokens,
    check_type,
    pack_tokens,
    unpack_tokens,
)


class Operation:
    """A change of a stage's state. Its fields are integers, except where a subclass says otherwise."""

    __slots__ = ()
    __match_args__: tuple[str, ...]
    """The names of the fields, in wire order."""
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_ints(self.to_wire()[1:], self.__match_args__)

    def to_wire(self) -> tuple[Any, ...]:
        """Return the row that msgpack encodes."""
        return self.kind, *(getattr(self, name) for name in self.__match_args__)


@dataclass(frozen=True, slots=True)
class Admit(Operation):
    """The creation of an empty sequence that holds at most `capacity` tokens.

    The first `prompt` tokens are the user's. Presence and frequency penalties do not count them, and grammars do not
    read them. `vocabulary` is the tokenizer's vocabulary, packed. The first sequence of an epoch that has a grammar
    brings it, because the last stage has no tokenizer. `images` are those of the prompt, in order.
    """

    kind: ClassVar[str] = "admit"
    seq_id: int
    capacity: int
    prompt: int
    params: SamplingParams = field(default_factory=SamplingParams)
    vocabulary: bytes = b""
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        check_ints((self.seq_id, self.capacity, self.prompt), self.__match_args__)
        check_type(self.vocabulary, bytes, "vocabulary")
        if self.images:
            check_images(self.images, self.prompt)

    def to_wire(self) -> tuple[Any, ...]:
        numbers = self.seq_id, self.capacity, self.prompt
        images = pack_tokens(tuple(n for i in self.images for n in (i.start, i.rows, i.columns)))
        return self.kind, *numbers, self.params.to_wire(), self.vocabulary, images


@dataclass(frozen=True, slots=True)
class Commit(Operation):
    """The commit of the first `accepted_length` tokens of the open window `window`.

    An `accepted_length` below the window's width also drops the window's other tokens and every later
    window. Applying a commit twice changes nothing.
    """

    kind: ClassVar[str] = "commit"
    seq_id: int
    window: int
    accepted_length: int

    def to_wire(self) -> tuple[Any, ...]:
        # Nearly all operations are commits, so this one is written out.
        return "commit", self.seq_id, self.window, self.accepted_length


@dataclass(frozen=True, slots=True)
class Evict(Operation):
    """The removal of a sequence and of everything it holds."""

    kind: ClassVar[str] = "evict"
    seq_id: int


@dataclass(frozen=True, slots=True)
class SavePrefix(Operation):
    """The saving of the fully committed sequence `seq_id` as prefix `entry`. On disk its name is `key`."""

    kind: ClassVar[str] = "save"
    seq_id: int
    entry: int
    key: bytes = b""

    def __post_init__(self) -> None:
        check_ints((self.seq_id, self.entry), self.__match_args__)
        check_type(self.key, bytes, "key")
        if len(self.key) not in (0, KEY_BYTES):
            raise ProtocolError(f"a prefix key of {len(self.key)} bytes")


@dataclass(frozen=True, slots=True)
class RestorePrefix(Operation):
    """The start of the newly admitted, empty sequence `seq_id` from prefix entry `entry`."""

    kind: ClassVar[str] = "restore"
    seq_id: int
    entry: int


@dataclass(frozen=True, slots=True)
class DropPrefix(Operation):
    """The removal of prefix entry `entry`."""

    kind: ClassVar[str] = "drop"
    entry: int


@dataclass(frozen=True, slots=True)
class BackUp(Operation):
    """The backup of the fully committed sequence `seq_id`, whose first `start` tokens an earlier backup has."""

    kind: ClassVar[str] = "back_up"
    seq_id: int
    start: int


@dataclass(frozen=True, slots=True)
class RestoreBackup(Operation):
    """The start of the newly admitted, empty sequence `seq_id` from its backup of `length` tokens."""

    kind: ClassVar[str] = "restore_backup"
    seq_id: int
    length: int


Op = Admit | Commit | Evict | SavePrefix | RestorePrefix | DropPrefix | BackUp | RestoreBackup

_OPERATIONS: dict[str, type[Op]] = {operation.kind: operation for operation in get_args(Op)}


def op_from_wire(wire: Any) -> Op:
    """Invert `Operation.to_wire`. Raises ProtocolError for a malformed operation."""
    kind, *values = check_list(wire, "operation", 8) or [None]
    if not isinstance(kind, str) or kind not in _OPERATIONS:
        raise ProtocolError("operation of an unknown kind")
    operation = _OPERATIONS[kind]
    if len(values) != (count := len(operation.__match_args__)):
        raise ProtocolError(f"{kind} takes {count} values, got {len(values)}")
    if operation is Admit:
        values[3] = SamplingParams.from_wire(values[3])
        numbers = unpack_tokens(values[5], "images")
        if len(numbers) % 3:
            raise ProtocolError("an image has a start, rows and columns")
        values[5] = tuple(ImageSpan(*numbers[i : i + 3]) for i in range(0, len(numbers), 3))
    return operation(*values)


MAX_DRAFTS = 32
"""Maximum drafts after one token. Acceptance falls to a quarter at the fifth draft (MTP_HEAD.md)."""

_SEGMENT_NAMES = ("seq_id", "window", "position", "source")
_OUTCOME_NAMES = ("seq_id", "window", "accepted_length")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one sequence.

    `window` counts the sequence's segments from 0 and is never reused. `position` is the position of `tokens[0]` in the
    sequence. The tokens of a prompt chunk are permanent, so it is not `open`. An open window waits for its Commit.
    `sample` asks the last stage for the next token, and `drafts` for that number of drafts after it. A `cancelled`
    segment builds on a rejected window; stages forward it without rows. A segment that `continues` is an open window of
    one token: the target's choice after the window before it, which the last stage knows and the header does not carry.
    `relay` asks the last of several stages to send the next token to the first stage too, for a segment that continues
    this one. `source` counts the windows back to the one whose outcome brought the drafts; 0 where the ratio rule does
    not apply, and for drafts of the text. Raises ProtocolError for a value out of range.
    """

    seq_id: int
    window: int
    position: int
    tokens: tuple[int, ...]
    open: bool = False
    sample: bool = False
    drafts: int = 0
    cancelled: bool = False
    continues: bool = False
    relay: bool = False
    source: int = 0

    def __post_init__(self) -> None:
        if self.continues and (self.tokens or not self.open):
            raise ProtocolError("a segment that continues is an open window without tokens")
        check_ints((self.seq_id, self.window, self.position, self.source), _SEGMENT_NAMES)
        check_int(self.drafts, "drafts", MAX_DRAFTS)
        if self.tokens:
            check_tokens(self.tokens, "tokens")

    @property
    def width(self) -> int:
        """Number of tokens."""
        return len(self.tokens) + self.continues

    @property
    def rows(self) -> int:
        """Number of this segment's rows in the frame's tensor."""
        return 0 if self.cancelled else self.width


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of an emitted token, and of the `top` most likely tokens, under the target model."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if len(self.top) > MAX_LOGPROBS:
            raise ProtocolError(f"{len(self.top)} alternatives to a token, limit {MAX_LOGPROBS}")
        for token, logprob in ((self.token, self.logprob), *self.top):
            check_int(token, "token", MAX_TOKEN)
            check_float(logprob, "logprob")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last stage's decision about one segment.

    `accepted_length` is the number of accepted tokens; all tokens of a prompt chunk are accepted. `token` is
    the target's choice after the last accepted token, or None when nothing was sampled. `drafts` follow
    `token`. `logprobs` has one entry for each token that this outcome emits: the accepted drafts, then
    `token`. It is empty unless the request asked for it. Raises ProtocolError for a value out of range.
    """

    seq_id: int
    window: int
    accepted_length: int
    token: int | None = None
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cancelled: bool = False

    def __post_init__(self) -> None:
        check_ints((self.seq_id, self.window, self.accepted_length), _OUTCOME_NAMES)
        if self.token is not None:
            check_int(self.token, "token", MAX_TOKEN)
        if len(self.drafts) > MAX_DRAFTS or len(self.logprobs) > MAX_DRAFTS + 1:
            raise ProtocolError(f"outcome with more than {MAX_DRAFTS} drafts")
        if self.drafts:
            check_tokens(self.drafts, "drafts")


_FLAGS = [tuple(flags >> bit & 1 != 0 for bit in range(5)) for flags in range(32)]
"""The values of `open`, `sample`, `cancelled`, `continues` and `relay` for each byte of flags."""


def _segment_to_wire(s: Segment) -> tuple[Any, ...]:
    flags = s.open + 2 * s.sample + 4 * s.cancelled + 8 * s.continues + 16 * s.relay
    return s.seq_id, s.window, s.position, flags, s.drafts, pack_tokens(s.tokens), s.source


def _segment_from_wire(wire: Any) -> Segment:
    seq_id, window, position, flags, drafts, packed, source = check_row(wire, "segment", 7)
    check_int(flags, "segment flags", len(_FLAGS) - 1)
    stays_open, sample, cancelled, continues, relay = _FLAGS[flags]
    tokens = unpack_tokens(packed, "tokens")
    return Segment(seq_id, window, position, tokens, stays_open, sample, drafts, cancelled, continues, relay, source)


def _outcome_to_wire(o: Outcome) -> tuple[Any, ...]:
    logprobs = [(p.token, p.logprob, p.top) for p in o.logprobs]
    drafts = pack_tokens(o.drafts)
    return o.seq_id, o.window, o.accepted_length, o.token, drafts, logprobs, o.cancelled


def _outcome_from_wire(wire: Any) -> Outcome:
    seq_id, window, accepted, token, packed, logprobs, cancelled = check_row(wire, "outcome", 7)
    check_list(logprobs, "logprobs", MAX_DRAFTS + 1)
    check_type(cancelled, bool, "cancelled")
    drafts = unpack_tokens(packed, "drafts")
    found = tuple(map(_logprob_from_wire, logprobs))
    return Outcome(seq_id, window, accepted, token, drafts, found, cancelled)


def _logprob_from_wire(wire: Any) -> TokenLogprob:
    token, logprob, top = check_row(wire, "logprob", 3)
    found = check_list(top, "alternatives", MAX_LOGPROBS)
    pairs = (check_row(pair, "alternative", 2) for pair in found)
    return TokenLogprob(token, logprob, tuple((one, p) for one, p in pairs))


VERSION = 5
"""Version of the protocol, which Describe and Hello compare."""

_PREFIX = struct.Struct("<I")

ALIGNMENT = 16
"""Bytes. The tensor starts at a multiple of this, so that any vector load can read it in place."""

MAX_HEADER_BYTES = 8 * 2**20
"""Bytes. Bounds a header, in which 262,144 token ids take 1 MB."""

MAX_VOCABULARY_BYTES = 6 * 2**20
"""Bytes. Maximum size of the packed vocabulary in a header; 250,000 tokens and their merges take about 2.5 MB."""

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
    # of up to 1024 nested arrays. Long lists are therefore read element by element (see _read_long), and
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
"""The packer of the headers of all threads, since a new one would allocate 256 KB. A call holds Python's lock."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and, between stages, the hidden states of its rows: `[rows, hidden_size]`.

    On the way to the first stage the tensor has the rows of images, and zeros for text. `number` grows by one with each
    frame of an epoch. `stage_us` are the compute times of the stages in microseconds. The last stage fills `outcomes`,
    in the order of `segments`. Raises ProtocolError for values that `decode` would refuse.
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
        if tokens > MAX_FRAME_TOKENS:
            raise ProtocolError(f"{tokens} tokens in a frame, limit {MAX_FRAME_TOKENS}")
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
            tuple(op.to_wire() for op in frame.ops),
            tuple(map(_segment_to_wire, frame.segments)),
            tuple(map(_outcome_to_wire, frame.outcomes)),
            frame.stage_us,
            frame.dtype,
            frame.shape,
        )
    )
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"frame header of {len(header)} bytes, limit {MAX_HEADER_BYTES}")
    gap = bytes(_gap(len(header))) if frame.dtype else b""
    return _PREFIX.pack(len(header)) + header + gap


def decode(data: bytes | bytearray) -> Frame:
    """Invert `encode`. The tensor is a view into `data`, not a copy. Raises ProtocolError.

    Allocates at most a small multiple of `len(data)` for any input.
    """
    try:
        return _read_frame(data)
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises many kinds; a peer's bytes may cause any of them
        raise ProtocolError(f"malformed frame header: {type(error).__name__}") from error


def _gap(header_bytes: int) -> int:
    """Return the number of zero bytes between header and tensor."""
    return -(_PREFIX.size + header_bytes) % ALIGNMENT


def _read_frame(data: bytes | bytearray) -> Frame:
    view = memoryview(data)
    (header_bytes,) = _PREFIX.unpack_from(data)
    end = _PREFIX.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or end > len(data):
        raise ProtocolError(f"frame header of {header_bytes} bytes does not fit the message")
    header = view[_PREFIX.size : end]
    if header_bytes <= SHORT_HEADER_BYTES:
        fields = check_row(msgpack.unpackb(header, **_LIMITS), "frame header", 8)
    else:
        fields = _read_long(header)
    epoch, number, ops, segments, outcomes, stage_us, dtype, shape = fields
    check_type(dtype, str, "dtype")
    start = end
    if dtype:
        start += _gap(header_bytes)
        if data[end:start].strip(b"\0"):
            raise ProtocolError("malformed frame: no zeros between header and tensor")
    return Frame(
        epoch,
        number,
        tuple(map(op_from_wire, check_list(ops, "operations", MAX_OPS))),
        tuple(map(_segment_from_wire, check_list(segments, "segments", MAX_SEGMENTS))),
        tuple(map(_outcome_from_wire, check_list(outcomes, "outcomes", MAX_SEGMENTS))),
        tuple(check_list(stage_us, "stage times", MAX_STAGES)),
        dtype,
        tuple(check_list(shape, "shape", 2)),
        view[start:],
    )


def _read_long(header: memoryview) -> list[Any]:
    """Return the fields of a header whose lists of operations, segments and outcomes may be long."""
    reader = msgpack.Unpacker(max_buffer_size=len(header), **_LIMITS)
    reader.feed(header)
    if reader.read_array_header() != 8:
        raise ProtocolError("a frame header has 8 fields")
    fields = [reader.unpack(), reader.unpack()]
    for _ in ("operations", "segments", "outcomes"):
        fields.append([reader.unpack() for _ in range(reader.read_array_header())])
    fields += [reader.unpack(), reader.unpack(), reader.unpack()]
    if reader.tell() != len(header):
        raise ProtocolError("bytes after the last field of a frame header")
    return fields


def _check_tensor(frame: Frame) -> None:
    size = memoryview(frame.tensor).nbytes
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
