"""The frame codec: frames survive the wire, and malformed bytes raise ProtocolError."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import frame as codec
from proto.errors import ProtocolError
from proto.frame import (
    MAX_DRAFTS,
    Admit,
    BackUp,
    Commit,
    DropPrefix,
    Evict,
    Frame,
    Op,
    Outcome,
    RestoreBackup,
    RestorePrefix,
    SavePrefix,
    Segment,
    TokenLogprob,
    decode,
    encode,
)
from proto.params import MAX_LOGPROBS, SamplingParams
from proto.wire import DTYPE_BYTES, MAX_INT

PREFIX = struct.Struct("<I")

# ---- valid frames

integers = st.integers(0, MAX_INT)
tokens = st.integers(0, 2**32 - 1)
logprobs = st.floats(max_value=0, allow_nan=False)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
)
operations: st.SearchStrategy[Op] = st.one_of(
    st.builds(Admit, integers, integers, integers, params),
    st.builds(Commit, integers, integers, integers),
    st.builds(Evict, integers),
    st.builds(SavePrefix, integers, integers),
    st.builds(RestorePrefix, integers, integers),
    st.builds(DropPrefix, integers),
    st.builds(BackUp, integers, integers),
    st.builds(RestoreBackup, integers, integers),
)
segments = st.builds(
    Segment,
    integers,
    integers,
    integers,
    st.lists(tokens, max_size=8).map(tuple),
    open=st.booleans(),
    sample=st.booleans(),
    drafts=st.integers(0, MAX_DRAFTS),
    cancelled=st.booleans(),
)
alternatives = st.lists(st.tuples(tokens, logprobs), max_size=3).map(tuple)
outcomes = st.builds(
    Outcome,
    integers,
    integers,
    integers,
    token=st.none() | tokens,
    drafts=st.lists(tokens, max_size=4).map(tuple),
    logprobs=st.lists(st.builds(TokenLogprob, tokens, logprobs, alternatives), max_size=3).map(tuple),
    cancelled=st.booleans(),
)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    frame = Frame(
        epoch=draw(integers),
        number=draw(integers),
        ops=tuple(draw(st.lists(operations, max_size=4))),
        segments=tuple(draw(st.lists(segments, max_size=4))),
        outcomes=tuple(draw(st.lists(outcomes, max_size=3))),
        stage_us=tuple(draw(st.lists(integers, max_size=4))),
    )
    dtype = draw(st.sampled_from(["", *DTYPE_BYTES]))
    if not dtype:
        return frame
    shape = (frame.rows, draw(st.integers(0, 5)))
    size = DTYPE_BYTES[dtype] * shape[0] * shape[1]
    return frame.with_tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@given(frames())
def test_what_is_encoded_is_decoded(frame: Frame) -> None:
    """decode(encode(f)) == f, with the same bytes again, for every operation, segment, outcome and tensor."""
    data = encode(frame)
    assert decode(data) == frame
    assert encode(decode(data)) == data


@given(frames())
def test_tensor_is_an_aligned_view_of_the_message(frame: Frame) -> None:
    """The tensor is not copied, and its start is aligned."""
    data = encode(frame)
    tensor = decode(data).tensor
    assert isinstance(tensor, memoryview)
    assert tensor.obj is data
    if frame.dtype:
        assert (len(data) - tensor.nbytes) % codec.ALIGNMENT == 0


# ---- frames that must not be sent


ONE_ROW = Frame(0, 0, segments=(Segment(0, 0, 0, (1,)),))
INVALID: dict[str, Callable[[], object]] = {
    "negative epoch": lambda: Frame(-1, 0),
    "number of 64 bits": lambda: Frame(0, 2**63),
    "negative sequence to evict": lambda: Evict(-1),
    "negative sequence to admit": lambda: Admit(-1, 1, 1),
    "capacity that is not an integer": lambda: Admit(1, 1.0, 1),  # type: ignore[arg-type]
    "negative window to commit": lambda: Commit(0, -1, 0),
    "accepted length of 64 bits": lambda: Commit(0, 0, 2**63),
    "negative entry to save": lambda: SavePrefix(0, -1),
    "negative entry to restore": lambda: RestorePrefix(0, -1),
    "negative entry to drop": lambda: DropPrefix(-1),
    "negative token": lambda: Segment(0, 0, 0, (-1,)),
    "token of 33 bits": lambda: Segment(0, 0, 0, (2**32,)),
    "negative position": lambda: Segment(0, 0, -1, (1,)),
    "too many drafts to make": lambda: Segment(0, 0, 0, (1,), drafts=MAX_DRAFTS + 1),
    "too many tokens": lambda: Frame(0, 0, segments=(Segment(0, 0, 0, (0,) * (codec.MAX_FRAME_TOKENS + 1)),)),
    "too many drafts": lambda: Outcome(0, 0, 0, drafts=(1,) * (MAX_DRAFTS + 1)),
    "negative draft": lambda: Outcome(0, 0, 0, drafts=(-1,)),
    "negative accepted length": lambda: Outcome(0, 0, -1),
    "sampled token of 33 bits": lambda: Outcome(0, 0, 0, 2**32),
    "NaN as log-probability": lambda: TokenLogprob(5, float("nan")),
    "too many alternatives": lambda: TokenLogprob(5, -1.0, ((1, -1.0),) * (MAX_LOGPROBS + 1)),
    "negative stage time": lambda: Frame(0, 0, stage_us=(-1,)),
    "unknown dtype": lambda: Frame(0, 0).with_tensor("float64", (0, 0), b""),
    "shape without dtype": lambda: Frame(0, 0).with_tensor("", (1,), b""),
    "tensor without dtype": lambda: Frame(0, 0).with_tensor("", (), b"0000"),
    "rows without a segment": lambda: Frame(0, 0).with_tensor("float32", (1, 1), b"0000"),
    "tensor too short": lambda: ONE_ROW.with_tensor("float32", (1, 1), b"00"),
    "tensor of one axis": lambda: ONE_ROW.with_tensor("float32", (1,), b"0000"),
    "tensor of two rows": lambda: ONE_ROW.with_tensor("float32", (2, 1), bytes(8)),
    "negative hidden size": lambda: Frame(0, 0).with_tensor("float32", (0, -1), b""),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_value_is_refused_where_it_is_made(name: str) -> None:
    """Constructors refuse what `decode` would refuse, also where no frame is ever encoded."""
    with pytest.raises(ProtocolError):
        INVALID[name]()


# ---- bytes that are no frame


def wrap(header: bytes, tensor: bytes = b"") -> bytes:
    return PREFIX.pack(len(header)) + header + tensor


def fields(**changed: object) -> bytes:
    """Return an encoded header with some of its fields replaced."""
    header: dict[str, object] = {
        "epoch": 1,
        "number": 2,
        "ops": [],
        "segments": [],
        "outcomes": [],
        "stage_us": [],
        "dtype": "",
        "shape": [],
    }
    return wrap(bytes(msgpack.packb(list((header | changed).values()), use_bin_type=True)))


MALFORMED = {
    "nothing": b"",
    "half a prefix": b"\x01",
    "another protocol": b"HTTP" + encode(Frame(0, 0))[4:],
    "header longer than the message": PREFIX.pack(100) + b"\x98",
    "header of 4 GB": PREFIX.pack(2**32 - 1) + bytes(64),
    "empty header": wrap(b""),
    "map instead of fields": wrap(msgpack.packb({"e": 1})),
    "too few fields": wrap(msgpack.packb([1, 2])),
    "bytes after the header": wrap(fields()[PREFIX.size :] + b"\x00"),
    "tensor without a dtype": fields() + bytes(16),
    "true as epoch": fields(epoch=True),
    "float as epoch": fields(epoch=1.0),
    "negative epoch": fields(epoch=-1),
    "epoch of 64 bits": fields(epoch=2**64 - 1),
    "operation of no kind": fields(ops=[[]]),
    "operation of an unknown kind": fields(ops=[["reboot", 1]]),
    "operation kind that cannot be hashed": fields(ops=[[["commit"], 1]]),
    "operation kind that is not text": fields(ops=[[7, 1]]),
    "commit of two values": fields(ops=[["commit", 1, 2]]),
    "commit with text": fields(ops=[["commit", 1, 2, "3"]]),
    "admit of nothing": fields(ops=[["admit"]]),
    "admit without parameters": fields(ops=[["admit", 1, 2, 3]]),
    "parameters as a list": fields(ops=[["admit", 1, 2, 3, []]]),
    "unknown parameter": fields(ops=[["admit", 1, 2, 3, {"beams": 4}]]),
    "parameter out of range": fields(ops=[["admit", 1, 2, 3, {"top_p": 2.0}]]),
    "parameter of another type": fields(ops=[["admit", 1, 2, 3, {"seed": 0.5}]]),
    "logit bias as a list": fields(ops=[["admit", 1, 2, 3, {"logit_bias": [1]}]]),
    "logit bias of text": fields(ops=[["admit", 1, 2, 3, {"logit_bias": {"a": 1.0}}]]),
    "segment of five": fields(segments=[[1, 2, 3, 4, 5]]),
    "segment with unknown flags": fields(segments=[[1, 2, 3, 8, 0, b""]]),
    "segment with odd tokens": fields(segments=[[1, 2, 3, 0, 0, b"123"]]),
    "segment with a list of tokens": fields(segments=[[1, 2, 3, 0, 0, [1]]]),
    "outcome with a number for cancelled": fields(outcomes=[[1, 2, 3, None, b"", [], 1]]),
    "outcome with NaN": fields(outcomes=[[1, 2, 3, 4, b"", [[4, float("nan"), []]], False]]),
    "outcome with many drafts": fields(outcomes=[[1, 2, 3, 4, bytes(4 * MAX_DRAFTS + 4), [], False]]),
    "stage times as text": fields(stage_us="fast"),
    "too many stage times": fields(stage_us=[1] * (codec.MAX_STAGES + 1)),
    "too many segments": fields(segments=[[1, 2, 3, 0, 0, b""]] * (codec.MAX_SEGMENTS + 1)),
    "dtype as a list": fields(dtype=[]),
    "unknown dtype": fields(dtype="float64", shape=[0, 0]),
    "shape of three": fields(dtype="float32", shape=[0, 0, 0]),
    "shape of 2^62": fields(dtype="float32", shape=[2**62, 2**62]),
    "missing tensor": fields(dtype="float32", shape=[1, 1], segments=[[1, 0, 0, 0, 0, bytes(4)]]),
    "too many operations": fields(ops=[["evict", 1]] * (codec.MAX_OPS + 1)),
    "four billion operations": wrap(b"\x98\x01\x02\xdd\xff\xff\xff\xff"),
    "four billion bytes of tokens": wrap(b"\x98\x01\x02\x90\x91\x96\x01\x02\x03\x00\x00\xc6" + b"\xff" * 4),
    "text of four billion bytes": wrap(b"\x98\x01\x02\x91\x91\xdb\xff\xff\xff\xff"),
    "map of four billion": wrap(b"\x98\x01\x02\x91\x91\xdf\xff\xff\xff\xff"),
    "arrays in arrays": wrap(b"\x98\x01\x02\x91" + b"\x91" * 100_000),
    "long arrays in arrays": wrap(b"\x98\x01\x02\x91" + b"\xdc\x00\x40" * 100_000),
    "huge arrays in arrays": wrap(b"\x98\x01\x02\x91" + b"\xdd\x00\x00\xff\xff" * 20_000),
    "maps in maps": wrap(b"\x98\x01\x02\x91" + b"\x81\x01" * 100_000),
    "text that is not UTF-8": wrap(b"\x98\x01\x02\x91\x92\xa2\xff\xfe\x01"),
    "timestamp": wrap(b"\x98\x01\x02\x91\x92\xd6\xff\x00\x00\x00\x01\x01"),
    "extension": wrap(b"\x98\xc7\x08\x05" + bytes(8)),
    "byte that msgpack never uses": wrap(b"\x98\xc1"),
    "a map as a key": wrap(b"\x98\x01\x02\x91\x95\xa5admit\x01\x02\x03\x81\x80\x01\x90\x90\x90\xa0\x90"),
}


def check_refused(data: bytes) -> None:
    """Check that `decode` refuses the bytes within its bounds of time and memory."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(ProtocolError) as caught:
            decode(data)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300
    assert peak < 20 * len(data) + 2**20


def test_gap_before_the_tensor_is_zero() -> None:
    """The bytes between header and tensor are checked, so that every byte of a message is read."""
    frame = Frame(1, 2, segments=(Segment(1, 0, 0, (9,)),)).with_tensor("float32", (1, 1), bytes(4))
    data = bytearray(encode(frame))
    (header_bytes,) = PREFIX.unpack_from(data)
    gap = -(PREFIX.size + header_bytes) % codec.ALIGNMENT
    assert gap
    data[PREFIX.size + header_bytes] = 1
    check_refused(bytes(data))


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_are_refused(name: str) -> None:
    """Malformed bytes raise ProtocolError with a short message, and memory is bounded by their size."""
    check_refused(MALFORMED[name])


@given(st.binary(max_size=300))
def test_random_header_is_refused(header: bytes) -> None:
    """Random msgpack after a valid prefix raises ProtocolError."""
    with pytest.raises(ProtocolError):
        decode(wrap(header))


def decode_step() -> Frame:
    """Return a frame with one token of one sequence on a middle hop, hidden size 5120 in bf16."""
    return Frame(
        epoch=3,
        number=1000,
        ops=(Commit(7, 41, 2),),
        segments=(Segment(7, 42, 1200, (1001, 1002), open=True, sample=True, drafts=1),),
        stage_us=(5200,),
    ).with_tensor("bfloat16", (2, 5120), bytes(2 * 2 * 5120))


@given(st.integers(0, 100))
def test_every_cut_is_refused(cut: int) -> None:
    """A truncated frame is refused, at any length."""
    data = encode(decode_step())
    with pytest.raises(ProtocolError):
        decode(data[: len(data) * cut // 101])


def test_long_prompt_decodes_in_memory_bounded_by_its_size() -> None:
    """A frame at its token limit decodes within a small multiple of its bytes."""
    width = codec.MAX_FRAME_TOKENS
    data = encode(Frame(1, 1, segments=(Segment(1, 0, 0, tuple(range(width))),)))
    assert len(data) < 4.1 * width
    tracemalloc.start()
    try:
        assert decode(data).segments[0].width == width
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(data)


def test_a_segment_that_continues_carries_no_token() -> None:
    """Its one row has a token that only a stage knows. Tokens beside it, or a chunk that continues, are refused."""
    segment = Segment(3, 2, 9, (), open=True, sample=True, continues=True, relay=True)
    frame = Frame(1, 4, segments=(segment,))
    assert decode(encode(frame)) == frame
    assert frame.continues and frame.rows == segment.width == 1
    for tokens, is_open in (((5,), True), ((), False)):
        with pytest.raises(ProtocolError, match="continues"):
            Segment(3, 2, 9, tokens, open=is_open, sample=True, continues=True)


@given(frames())
def test_short_headers_are_read_like_long_ones(frame: Frame) -> None:
    """The two readers of headers give the same fields, so a length decides nothing but speed."""
    data = encode(frame)
    for limit in (0, codec.MAX_HEADER_BYTES):
        with patch.object(codec, "SHORT_HEADER_BYTES", limit):
            assert decode(data) == frame


def test_threads_may_encode_at_the_same_time() -> None:
    """All threads share one packer, and none sees the bytes of another."""
    frames = [Frame(1, n, segments=(Segment(n, 0, 0, tuple(range(n % 400))),)) for n in range(800)]
    with ThreadPoolExecutor(4) as pool:
        assert [decode(data) for data in pool.map(encode, frames)] == frames
