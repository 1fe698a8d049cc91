"""The messages of a stage: who may send them, how many may wait, and which frames wait for relayed tokens."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import MagicMock, patch

import mlx.core as mx
import pytest

from proto import cluster_pb2 as pb
from proto.control import Rollback
from proto.errors import AccessError, ProtocolError
from proto.frame import Frame, Outcome, Segment, encode
from proto.frame_stamps import FrameStamps, StageStep, StampRing
from proto.rpc.data_connection import TOKEN_BYTES, StreamBinding
from proto.trust.certificates import NodeIdentity, Role
from tests.support.stages.token_stages import VOCAB, TokenStage
from worker.engine.engine_thread import EngineThread
from worker.engine.frame_engine import FrameEngine, to_bytes
from worker.engine.host import EngineHost
from worker.engine.state_codec import array_of, plain_array
from worker.node import binding
from worker.node.binding import MAX_QUEUED_FRAMES, Binding, Place, Traffic

TOKEN = b"t" * TOKEN_BYTES


@pytest.fixture
async def bound() -> Binding:
    """Return a binding over a host that does nothing."""
    return bind(Place(1, 0, 1, b"token"))


def bind(place: Place) -> Binding:
    """Return a binding over a host that does nothing."""
    host = MagicMock(stamps=StampRing())
    return Binding(place, host, Traffic(), lambda: None)


async def test_frames_are_counted(bound: Binding) -> None:
    """The number of queued frames is bounded; signals do not count."""
    for _ in range(2 * MAX_QUEUED_FRAMES):
        bound.apply_signal(pb.Signal(epoch=1, cancel=pb.Cancel(seq_id=0)))
    for _ in range(MAX_QUEUED_FRAMES):
        bound.enqueue_frame(b"frame")
    with pytest.raises(ProtocolError, match=f"{MAX_QUEUED_FRAMES} frames"):
        bound.enqueue_frame(b"frame")


async def test_bytes_are_counted(bound: Binding) -> None:
    """The bytes of queued frames are bounded; frames that the engine has started do not count."""
    with patch.object(binding, "MAX_QUEUED_BYTES", 100):
        bound.enqueue_frame(b"x" * 60)
        with pytest.raises(ProtocolError, match="60 bytes"):
            bound.enqueue_frame(b"x" * 60)
        bound._process(b"x" * 60, FrameStamps(0, StageStep))  # the engine has it
        bound.enqueue_frame(b"x" * 60)


def test_the_last_stage_alone_relays_tokens() -> None:
    """Stage 0 takes frames from the coordinator and tokens from the node of the last stage, and nothing else."""
    coordinator, last, other = (
        NodeIdentity("c" * 16, role, digit * 16)
        for role, digit in ((Role.COORDINATOR, "1"), (Role.WORKER, "2"), (Role.WORKER, "3"))
    )
    first = bind(Place(1, 0, 3, TOKEN, last.node))
    frames, tokens = (StreamBinding(1, hop, TOKEN) for hop in (0, 3))
    allowed = {(sender, stream) for sender, stream in ((coordinator, frames), (last, tokens))}
    for sender, stream in product((coordinator, last, other), (frames, tokens)):
        first.check_stream(stream)
        if (sender, stream) in allowed:
            first.check_sender(sender, stream)
            continue
        with pytest.raises(AccessError, match="another sender"):
            first.check_sender(sender, stream)
    assert first.receiver_of(tokens) == first.enqueue_tokens
    assert first.receiver_of(frames) == first.enqueue_frame
    for place in (Place(1, 1, 3, TOKEN), Place(1, 0, 1, TOKEN)):
        stage = bind(place)
        with pytest.raises(ProtocolError, match="is for stage"):
            stage.check_stream(StreamBinding(1, place.num_stages, TOKEN))


async def test_frames_wait_for_relayed_tokens() -> None:
    """A frame that continues waits for its token, the frames behind it wait too, and they begin in order."""
    first = bind(Place(1, 0, 2, TOKEN))
    engine = FrameEngine(TokenStage(), epoch=1, first=True, verifier=None)
    first.engine, started = engine, []
    run: Any = first._host.run_frame
    run.side_effect = lambda engine, frame, *_: started.append(frame.number)
    engine.sequences[0] = MagicMock()
    ahead = Segment(0, 4, 9, (), open=True, sample=True, continues=True)
    for frame in (Frame(1, 0, segments=(ahead,)), Frame(1, 1)):
        first._process(encode(frame), first._stamps.add_frame(0, StageStep))
    for window in (2, 3):
        assert started == []
        message = Frame(1, 0, outcomes=(Outcome(0, window, 1, token=7),))
        first._receive_tokens(encode(message), 5)
    assert started == [0, 1]
    relayed = first._stamps.find_frame(1, 0)
    assert relayed is not None and relayed.times[StageStep.TOKENS_RECEIVED] == 5
    first._receive_tokens(encode(Frame(1, 0, outcomes=(Outcome(0, 5, 1, token=VOCAB),))), 9)
    assert first.engine is None, "a token outside the vocabulary ends the plan"


async def test_a_signal_that_breaks_the_engine() -> None:
    """An error in a rollback, such as a lack of memory, ends the plan, but not the thread that the next plan needs."""
    failed = asyncio.Event()
    host = EngineHost()
    bound = Binding(Place(1, 0, 1, b"token"), host, Traffic(), failed.set)
    bound.engine = MagicMock()
    bound.engine.rollback.side_effect = MemoryError("none left")
    bound.apply_signal(Rollback(0, 0, 1).to_signal(1))
    async with asyncio.timeout(20):
        await failed.wait()
        assert await host.thread.call(lambda: "well") == "well"
        await host.thread.close()
    assert bound.fault is not None and "none left" in bound.fault.message


async def test_any_error_of_a_frame_ends_the_plan() -> None:
    """A bug outside the computation of a frame is a fault of the stage too, and the next plan has its thread."""
    failed = asyncio.Event()
    host = EngineHost()
    bound = Binding(Place(1, 0, 1, b"token"), host, Traffic(), failed.set)
    engine = MagicMock(failed=False)
    engine.lacks_tokens.side_effect = ZeroDivisionError("a bug")
    await host.thread.call(lambda: bound._take_engine(lambda: engine))
    bound.enqueue_frame(encode(Frame(1, 0)))
    async with asyncio.timeout(20):
        await failed.wait()
        assert await host.thread.call(lambda: "well") == "well"
        await host.close()
    assert bound.fault is not None and "a bug" in bound.fault.message
    assert engine.failed and bound.engine is None


async def test_a_rollback_comes_before_the_frames_that_wait() -> None:
    """Without the signal the stage would restore the state when the header of the next frame comes, and not before."""
    host, order, free = EngineHost(), list[object](), threading.Event()
    bound = Binding(Place(1, 0, 1, b"token"), host, Traffic(), lambda: None)
    engine = MagicMock(failed=False)
    engine.rollback.side_effect = lambda *rollback: order.append(rollback)

    def lacks_tokens(frame: Frame) -> bool:
        """Let the frame wait."""
        order.append(frame.number)
        return True

    engine.lacks_tokens.side_effect = lacks_tokens
    await host.thread.call(lambda: bound._take_engine(lambda: engine))
    busy = asyncio.create_task(host.thread.call(partial(free.wait, 20)))
    await asyncio.sleep(0)
    bound.enqueue_frame(encode(Frame(1, 0)))
    bound.apply_signal(Rollback(7, 5, 2).to_signal(1))
    free.set()
    await busy
    await host.thread.call(lambda: None)
    await host.close()
    assert order == [(1, 7, 5, 2), 0]


@pytest.mark.parametrize("at", ["the end of frame 0", "the beginning of frame 1"])
async def test_nothing_follows_the_first_fault(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frame 1 has begun when frame 0 fails, such as by the GPU's time-out. It is not sent, and hides no error."""
    monkeypatch.setattr(EngineThread, "queued", 1)
    host, errors, sent = EngineHost(), list[str](), list[int]()
    engine = MagicMock(failed=False)
    engine.group.size = 1

    def begin(frame: Frame, stamps: FrameStamps) -> Any:
        """Return a frame whose end is sent, or fails."""
        if frame.number == 1 and at.startswith("the beginning"):
            raise MemoryError("at 1")
        begun = MagicMock(engine=engine, frame=frame)
        begun.finish_frame.return_value = Frame(1, frame.number, stage_us=(1,))
        if frame.number == 0 and at.startswith("the end"):
            begun.finish_frame.side_effect = RuntimeError("[METAL] Timeout at 0")
        return begun

    engine.begin_frame.side_effect = begin

    def run() -> None:
        """Run three frames, of which each begins before the one before it ends."""
        for number in range(3):
            host.run_frame(
                engine,
                Frame(1, number),
                FrameStamps(0, StageStep),
                lambda out: sent.append(out.number),
                lambda error: errors.append(str(error)),
            )

    await host.thread.call(run)
    await host.thread.call(lambda: None)
    await host.thread.close()
    assert (errors, sent) == ((["[METAL] Timeout at 0"], []) if at.startswith("the end") else (["at 1"], [0]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "transposed", "every second column"])
def test_hidden_states_survive_the_hop(dtype: mx.Dtype, layout: str) -> None:
    """`array_of` gives the array of `to_bytes`, also if the array is not contiguous."""
    x = mx.random.normal((4, 6)).astype(dtype)
    x = {"rows": x, "transposed": x.T, "every second column": x[:, ::2]}[layout]
    name, shape, data = to_bytes(x, plain_array(x))
    assert data.nbytes == x.nbytes and shape == x.shape
    for received in (data, bytes(data)):
        y = array_of(name, shape, received)
        assert y.dtype == dtype
        assert mx.array_equal(x, y)
