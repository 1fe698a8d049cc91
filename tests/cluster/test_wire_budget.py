"""The messages on the network: one per hop and step, and nothing large for a rollback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from proto import cluster_pb2 as pb
from proto.frame import Evict, Frame, decode
from proto.rpc.data_connection import FRAMES, RESULTS
from proto.wire import DTYPE_BYTES
from tests.cluster.conftest import Pool
from tests.support.processes.processes import serving
from tests.support.processes.tap import Message, tapped
from tests.support.processes.waits import wait_until

STAGES = 3
HIDDEN, VOCAB = 64, 512
"""Sizes of the toy model."""

GRPC_BYTES = 5 + 9
"""gRPC's prefix of a message and HTTP/2's of a frame."""

LOAD = "/mtpcluster.v1.Worker/Load"
SIGNALS = "/mtpcluster.v1.Worker/Signals"
READ_BACKUP = "/mtpcluster.v1.Worker/ReadBackup"
"""The coordinator's reading of states in the pauses of a stream. Neither a step nor a rollback needs it."""

TOKENS_BYTES = 48
"""Most that a message of relayed tokens takes for one sequence."""

DECODE_HEADER_BYTES = 256
"""Most that a decode step of one sequence takes besides its hidden states: tokens, drafts, a commit, times."""


@dataclass(frozen=True)
class Wire:
    """All messages of one request but backups, those before it, and the draft tokens its usage calls rejected.

    In `mode` filled, speculative windows of one token follow each other, and off continues windows with relayed tokens.
    Otherwise each waits for the one before it.
    """

    mode: str
    before: list[Message]
    messages: list[Message]
    rejected: int

    def frames(self, hop: int) -> list[Frame]:
        """Return the frames of a hop: hop 0 comes from the coordinator, the last hop has the results."""
        found = [
            m
            for m in self.messages
            if (m.method, m.inward, m.worker)
            == ((RESULTS, False, STAGES - 1) if hop == STAGES else (FRAMES, True, hop))
        ]
        frames = [decode(m.data) for m in found]
        return [frame for frame in frames if hop == STAGES or not frame.outcomes]

    def tokens(self) -> list[tuple[Frame, int]]:
        """Return the messages of relayed tokens to stage 0, with their bytes."""
        found = [m for m in self.messages if (m.method, m.inward, m.worker) == (FRAMES, True, 0)]
        return [(decode(m.data), len(m.data)) for m in found if decode(m.data).outcomes]

    def rollbacks(self, worker: int) -> list[tuple[pb.Rollback, int]]:
        """Return the rollback signals to a worker, with their size on the wire."""
        found = []
        for m in self.messages:
            if (m.method, m.inward, m.worker) == (SIGNALS, True, worker):
                signal = pb.Signal.FromString(m.data)
                if signal.WhichOneof("body") == "rollback":
                    found.append((signal.rollback, len(m.data) + GRPC_BYTES))
        return found


@pytest.fixture(scope="module", params=["2", "filled", "off"])
def wire(request: pytest.FixtureRequest, pool: Pool, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Wire:
    """Run one request over three workers with a random model, whose drafts are mostly wrong."""
    folder = tmp_path_factory.mktemp("wire")
    with (
        tapped(pool(STAGES)) as taps,
        serving(
            folder, toy, [tap.address for tap in taps], "--mtp", request.param, "--dtype", "float32"
        ) as coordinator,
    ):
        messages = taps[0].messages
        _hear_statuses(messages)
        before = len(messages)
        body = {"prompt": list(range(7, 40)), "max_tokens": 60, "ignore_eos": True, "seed": 1}
        reply = httpx.post(f"{coordinator.url}/v1/completions", json=body, timeout=60)
        usage = reply.json()["usage"]["completion_tokens_details"]
        wait_until(lambda: _over(messages[before:]), "the last frame came back")
        _hear_statuses(messages)
        numbered = _by_stage(messages)
        return Wire(
            request.param,
            numbered[:before],
            [m for m in numbered[before:] if m.method != READ_BACKUP],
            usage["rejected_prediction_tokens"],
        )


def _by_stage(messages: list[Message]) -> list[Message]:
    """Return the messages with workers numbered in the order of their layers."""
    starts = {m.worker: pb.LoadRequest.FromString(m.data).span.start for m in messages if m.inward and m.method == LOAD}
    order = sorted(starts, key=lambda worker: starts[worker])
    return [replace(m, worker=order.index(m.worker)) for m in messages]


def _statuses(messages: list[Message], worker: int) -> list[pb.WorkerStatus]:
    return [
        pb.WorkerStatus.FromString(m.data)
        for m in messages
        if (m.method, m.inward, m.worker) == (SIGNALS, False, worker)
    ]


def _hear_statuses(messages: list[Message]) -> None:
    """Wait for two more statuses of every worker: the second one began after this call."""
    start = len(messages)
    wait_until(
        lambda: all(len(_statuses(messages[start:], worker)) >= 2 for worker in range(STAGES)),
        "pulses of all",
    )


def _over(messages: list[Message]) -> bool:
    """Return whether all frames, the one with the eviction included, have passed every hop."""
    frames = [m for m in messages if m.method == FRAMES and not decode(m.data).outcomes]
    hops = [[m for m in frames if m.worker == worker] for worker in range(STAGES)]
    hops.append([m for m in messages if m.method == RESULTS and not m.inward])
    told = any(isinstance(op, Evict) for m in hops[0] for op in decode(m.data).ops)
    return told and len({len(hop) for hop in hops}) == 1


def test_a_step_is_one_message_a_hop(wire: Wire) -> None:
    """Every hop carries the same frames, each once and in order, and no call other than these and Signals is made."""
    numbers = [[frame.number for frame in wire.frames(hop)] for hop in range(STAGES + 1)]
    steps = len([f for f in wire.frames(STAGES) if f.segments])
    assert steps > 20
    assert all(n == list(range(numbers[0][0], numbers[0][0] + len(n))) for n in numbers)
    assert {m.method for m in wire.messages} == {FRAMES, RESULTS, SIGNALS}


def test_hidden_states_of_the_windows_rows_and_nothing_else(wire: Wire) -> None:
    """A middle hop carries one row per token; the first and the last hop carry no tensor."""
    for hop in range(STAGES + 1):
        for frame in wire.frames(hop):
            rows = sum(segment.width for segment in frame.segments if not segment.cancelled)
            middle = 0 < hop < STAGES and rows > 0
            assert frame.shape == ((rows, HIDDEN) if middle else ())
            assert len(frame.tensor) == (DTYPE_BYTES["float32"] * rows * HIDDEN if middle else 0)


def test_a_rejection_sends_the_signal_and_nothing_more(wire: Wire) -> None:
    """A rejection sends one signal of at most 128 bytes to every worker, for all invalidated windows.

    The next window begins after the accepted tokens, and nothing is sent again. Invalidated windows return without
    tokens. Plain decoding rejects nothing.
    """
    results = [(f.segments[0], f.outcomes[0]) for f in wire.frames(STAGES) if f.segments and f.segments[0].open]
    rejected = [
        (s.seq_id, s.window, s.width - o.accepted_length)
        for s, o in results
        if o.accepted_length < s.width and not o.cancelled
    ]
    assert len(rejected) > 5 if wire.mode != "off" else not rejected
    for worker in range(STAGES):
        told = wire.rollbacks(worker)
        assert [(r.seq_id, r.window, r.trim) for r, _ in told] == rejected
        assert max((size for _, size in told), default=0) <= 128, "promise 2 of DESIGN §1"
    void = [o for _, o in results if o.cancelled]
    assert len(void) > 5 if wire.mode == "filled" else not void
    assert all((o.accepted_length, o.token, o.drafts, o.logprobs) == (0, None, (), ()) for o in void)
    truth: int | None = None
    drafts: tuple[int, ...] = ()
    for (old, outcome), (new, _) in pairwise((s, o) for s, o in results if not o.cancelled):
        if outcome.token is not None:
            truth, drafts = outcome.token, outcome.drafts
        assert new.position == old.position + outcome.accepted_length
        if new.continues:
            assert new.tokens == () and wire.mode == "off"
        elif wire.mode != "filled":
            assert new.tokens == (truth, *outcome.drafts)
        elif outcome.accepted_length < old.width:
            assert new.tokens == (truth, *drafts)[: new.width]
    assert wire.rejected == sum(s.width - o.accepted_length for s, o in results)


def test_a_relayed_token_is_one_small_message(wire: Wire) -> None:
    """The last stage relays the token of every window that asks for it to stage 0, once and alone.

    Nearly all windows of plain decoding continue with one. Otherwise nothing is relayed.
    """
    results = [
        (frame.number, segment, outcome)
        for frame in wire.frames(STAGES)
        for segment, outcome in zip(frame.segments, frame.outcomes, strict=True)
    ]
    relayed = [(number, o.seq_id, o.window, o.token) for number, s, o in results if s.relay]
    found = [(message.number, *(o.seq_id, o.window, o.token)) for message, _ in wire.tokens() for o in message.outcomes]
    assert found == relayed
    assert all(size <= TOKENS_BYTES for _, size in wire.tokens())
    assert all(not (m.segments or m.ops or m.dtype) for m, _ in wire.tokens())
    continued = sum(segment.continues for _, segment, _ in results)
    assert continued > 50 if wire.mode == "off" else not (relayed or continued)


def test_no_logits_leave_the_last_worker(wire: Wire) -> None:
    """No message of the last worker is as long as one row of logits in half precision."""
    said = [len(m.data) for m in wire.messages if m.worker == STAGES - 1 and not m.inward]
    assert said
    assert max(said) < 2 * VOCAB
    steps = [m for m in wire.messages if m.method == RESULTS]
    assert max(len(m.data) for m in steps) <= DECODE_HEADER_BYTES


def test_workers_count_what_the_tap_sees(wire: Wire) -> None:
    """A worker's status has the bytes of its hops, which `status` and the metrics add up."""
    for worker in range(STAGES):
        first, last = _statuses(wire.before, worker)[-1], _statuses(wire.messages, worker)[-1]
        came = [m for m in wire.messages if m.method == FRAMES and m.worker == worker]
        assert last.bytes_in - first.bytes_in == sum(len(m.data) for m in came)
        ends = worker == STAGES - 1
        hop = (RESULTS, False, worker) if ends else (FRAMES, True, worker + 1)
        sent = sum(len(m.data) for m in wire.messages if (m.method, m.inward, m.worker) == hop)
        relayed = sum(size for _, size in wire.tokens()) if ends else 0
        assert last.bytes_out - first.bytes_out == sent + relayed
