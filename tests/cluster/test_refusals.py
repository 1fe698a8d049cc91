"""Refused command lines, clusters and calls: one line, the right status, and no process left behind."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from coordinator.pipeline.worker_client import WorkerClient
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.errors import ClusterError, StaleEpochError, UsageError
from proto.frame import VERSION, Frame, decode, encode
from proto.rpc.data_connection import FRAMES, RESULTS, TOKEN_BYTES, StreamBinding, TicketOffer, dial
from proto.rpc.link import FrameWriter, LoopFrameReader
from proto.span import Span
from tests.cluster.conftest import Pool
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.processes.faulty_worker import ARITHMETIC
from tests.support.processes.processes import (
    SHARED_MEMORY,
    Process,
    as_coordinator,
    as_worker,
    ending,
    launch,
    launch_coordinator,
    launch_worker,
)
from tests.support.processes.reserved_port import reserved_port

REFUSED_SECONDS = 90.0
"""Seconds. Deadline for a program that cannot start. An idle machine needs about two."""


def refusal(process: Process) -> tuple[int, str]:
    """Return the exit status and last line of a program that ends by itself, and leaves no process."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # it may end at any moment
        children = psutil.Process(process.pid).children(recursive=True) if process.running else []
    try:
        status = process.wait(REFUSED_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{process.name} continues: {process.text()[-1000:]}") from None
    assert not any(child.is_running() for child in children)
    text = process.text()
    assert "Traceback" not in text, text
    return status, text.strip().splitlines()[-1]


def in_turn(*launches: Callable[[], Process]) -> Iterator[tuple[int, str]]:
    """Yield the refusals of programs that are started together."""
    with ExitStack() as stack:
        started = [stack.enter_context(ending(launch())) for launch in launches]
        yield from (refusal(process) for process in started)


# ---- command lines


@pytest.mark.parametrize(
    ("launch", "program", "cases"),
    [
        (
            launch_worker,
            "mtp-worker",
            {
                "--insecure": ("--listen", "0.0.0.0:0"),
                "--listen 127.0.0.1:PORT: another program listens there": (
                    "--listen",
                    "127.0.0.1:PORT",
                ),
                "no-such-model": ("--model", "no-such-model"),
                "Its addresses are 127.0.0.1": ("--listen", "203.0.113.1:7103", "--insecure"),
                "--data-port PORT: another program listens there": ("--data-port", "PORT"),
            },
        ),
        (
            lambda folder, name, *flags: launch_coordinator(folder, *flags, name=name),
            "mtp-coord",
            {
                "--insecure": ("--host", "0.0.0.0", "--tls-cert", "a", "--tls-key", "b"),
                "--port PORT: another program listens there": ("--port", "PORT"),
                "no-such-model": ("--model", "no-such-model"),
                "--single-node": ("--single-node", "--nodes", "2"),
                "Its addresses are 127.0.0.1": ("--host", "203.0.113.1", "--insecure"),
            },
        ),
    ],
    ids=["worker", "coordinator"],
)
def test_a_program_that_cannot_start(
    launch: Callable[..., Process], program: str, cases: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    """Wrong addresses, ports, models and contradicting flags end with status 2 and a line that names the flag."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        lines = [[flag.replace("PORT", port) for flag in flags] for flags in cases.values()]
        found = in_turn(*(partial(launch, tmp_path, f"p{i}", *flags) for i, flags in enumerate(lines)))
        for (status, line), words in zip(found, cases, strict=True):
            assert status == 2, line
            assert line.startswith(f"{program}: ")
            assert words.replace("PORT", port) in line


def test_a_second_coordinator_in_a_state_directory(tmp_path: Path) -> None:
    """It ends and names the process of the first. The end of that process frees the directory, however it ends."""
    flags = ("--model", "builtin", "--single-node", "--state-dir", str(tmp_path / "state"))
    with ending(launch_coordinator(tmp_path, *flags, name="first")) as first:
        as_coordinator(first)
        ((status, line),) = in_turn(lambda: launch_coordinator(tmp_path, *flags, name="second"))
        assert status == 2
        assert "--state-dir" in line
        assert f"the coordinator with process id {first.pid} uses it" in line
        assert first.running
        first.kill()
    with ending(launch_coordinator(tmp_path, *flags, name="third")) as third:
        as_coordinator(third)


# ---- calls


@pytest.fixture
def worker(pool: Pool) -> str:
    return pool(1)[0]


ME = pb.Coordinator(id="test", name="a test")


def status_of(call: Callable[[grpc.Channel], object], address: str) -> tuple[grpc.StatusCode, str]:
    """Return the status code and details of a refused call."""
    with grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            call(channel)
        return refused.value.code(), refused.value.details() or ""


def test_another_protocol_version_is_refused(worker: str) -> None:
    """The first call of a coordinator of another release is refused with both versions."""

    def describe(channel: grpc.Channel) -> object:
        stub = pb_grpc.WorkerStub(channel)
        return stub.Describe(pb.DescribeRequest(protocol_version=VERSION + 1), timeout=10)

    def signals(channel: grpc.Channel) -> object:
        hello = pb.Hello(coordinator=ME, protocol_version=VERSION + 1, status_interval_ms=100)
        return list(pb_grpc.WorkerStub(channel).Signals(iter([pb.Signal(hello=hello)]), timeout=10))

    for call in (describe, signals):
        code, details = status_of(call, worker)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"version {VERSION + 1}, this process uses {VERSION}" in details


async def load(client: WorkerClient, model: Path, *, span: Span, epoch: int = 1, **fields: Any) -> pb.LoadResult:
    request = pb.LoadRequest(
        coordinator=ME,
        epoch=epoch,
        model=pb.ModelRef(name="toy", path=str(model), fingerprint=Checkpoint.open(model).fingerprint()),
        span=pb.Span(start=span.start, end=span.end),
        first=True,
        last=True,
        lease_ms=5000,
        **fields,
    )
    return await client.load(request, lambda done, total: None)


async def test_an_impossible_load_is_refused(worker: str, toy: Path, tmp_path: Path) -> None:
    """Wrong checkpoints, layers and types are errors of their own, and the worker loads the next stage."""
    other = write_checkpoint(tmp_path / "other", seed=1, vocab=512)
    client = WorkerClient(worker, ME)
    whole = Span(0, 8)
    try:
        wrong = pb.ModelRef(name="toy", path=str(other), fingerprint="0" * 64)
        with pytest.raises(UsageError, match="no checkpoint here is toy"):
            await client.load(
                pb.LoadRequest(coordinator=ME, epoch=1, model=wrong, span=pb.Span(start=0, end=8)),
                lambda done, total: None,
            )
        for fields, problem in (
            ({"span": Span(5, 9)}, "the model has 8 layers"),
            ({"span": whole, "kv_bits": 3}, "--kv-bits 3"),
            ({"span": whole, "dtype": "float31"}, "float31"),
        ):
            with pytest.raises(UsageError, match=problem):
                await load(client, toy, **fields)
            info = await client.describe()
            assert info.state == pb.WORKER_STATE_IDLE
        await load(client, toy, span=whole)
        assert (await client.describe()).state == pb.WORKER_STATE_LOADED
        with pytest.raises(StaleEpochError):
            await load(client, toy, span=whole, epoch=0)
    finally:
        await client.call(client.stub.Unload, pb.UnloadRequest(coordinator=ME, epoch=1))
        await client.close()


async def data_connection(address: str, call: Any) -> socket.socket:
    """Return the data connection of a call."""
    offer = TicketOffer.from_metadata(await call.initial_metadata())
    return (await asyncio.to_thread(dial, address, None, "", offer, 10.0))[0]


GARBAGE = {
    "no frame": b"GET / HTTP/1.1",
    "empty": b"",
    "half a frame": encode(Frame(1, 0))[:-3],
    "a frame of another plan": encode(Frame(7, 0)),
    "a frame out of order": encode(Frame(1, 5)),
}


@pytest.mark.parametrize("bytes_sent", GARBAGE.values(), ids=GARBAGE)
async def test_a_malformed_frame_ends_the_plan_and_not_the_worker(worker: str, toy: Path, bytes_sent: bytes) -> None:
    """The results end with the reason. The worker keeps its weights and serves the next plan."""
    client = WorkerClient(worker, ME)
    try:
        token = bytes(TOKEN_BYTES)
        await load(client, toy, span=Span(0, 8))
        for epoch in (1, 2):
            connect = pb.ConnectRequest(
                coordinator=ME, epoch=epoch, num_stages=1, plan_token=token, hop_timeout_ms=1000
            )
            await client.connect(connect)
            metadata = StreamBinding(epoch, 0, token).to_metadata()
            async with grpc.aio.insecure_channel(worker) as channel:
                back: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
                hop: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
                back, hop = channel.unary_stream(RESULTS), channel.stream_stream(FRAMES)
                results = back(b"", metadata=metadata, timeout=10)
                frames = hop(metadata=metadata, timeout=10)
                received: asyncio.Queue[bytes | bytearray] = asyncio.Queue()
                reader = LoopFrameReader(await data_connection(worker, results), received.put_nowait)
                errors: list[ClusterError] = []
                connection = await data_connection(worker, frames)
                writer = FrameWriter(connection, worker, 10.0, errors.append)
                try:
                    if epoch == 1:
                        writer.send(bytes_sent, lambda: None)
                        assert await results.code() is grpc.StatusCode.UNAVAILABLE
                        assert "failed: " in (await results.details() or "")
                        assert (await client.describe()).state == pb.WORKER_STATE_FAILED
                    else:
                        writer.send(encode(Frame(epoch, 0)), lambda: None)
                        async with asyncio.timeout(10):
                            assert decode(await received.get()).number == 0
                finally:
                    reader.close()
                    writer.close()
    finally:
        await client.call(client.stub.Unload, pb.UnloadRequest(coordinator=ME, epoch=2))
        await client.close()


def test_a_stream_that_belongs_to_no_plan(worker: str) -> None:
    """A stream without binding, with a wrong token or for a missing stage is refused before a byte is read."""

    def frames(*metadata: tuple[str, str | bytes]) -> Callable[[grpc.Channel], object]:
        def call(channel: grpc.Channel) -> object:
            method: grpc.StreamStreamMultiCallable[bytes, bytes]
            method = channel.stream_stream(FRAMES)
            return list(method(iter([b"x"]), metadata=metadata, timeout=10))

        return call

    bound = StreamBinding(3, 0, bytes(TOKEN_BYTES)).to_metadata()
    for metadata, expected in (
        ((), grpc.StatusCode.INVALID_ARGUMENT),
        (bound[:-1], grpc.StatusCode.INVALID_ARGUMENT),
        (bound, grpc.StatusCode.ABORTED),
    ):
        code, details = status_of(frames(*metadata), worker)
        assert code is expected
        assert details


def test_a_machine_that_rounds_in_another_way_is_named(tmp_path: Path) -> None:
    """While an exact cluster waits for it, both programs say why it is not used, and so does the API.

    The first plan takes machines that are alike.
    """
    program, flags = "tests.support.processes.faulty_worker", ("--listen", "127.0.0.1:0", "--no-mdns", *SHARED_MEMORY)
    arithmetics = {"a": "", "b": "metal applegpu_g13s, mlx 0.0.1"}
    with ExitStack() as stack:
        launched = [
            stack.enter_context(ending(launch(tmp_path, name, program, flags, env={ARITHMETIC: arithmetic})))
            for name, arithmetic in arithmetics.items()
        ]
        workers = {worker.address: worker for worker in map(as_worker, launched)}
        port, later = (stack.enter_context(reserved_port()) for _ in range(2))
        named = [flag for address in (*workers, f"127.0.0.1:{later}") for flag in ("--worker", address)]
        model = ("--model", "builtin", "--exact", "--nodes", "2", "--port", str(port))
        coordinator = stack.enter_context(ending(launch_coordinator(tmp_path, *model, *named)))
        refused = coordinator.wait_for("worker refused")
        worker = workers[refused["address"]]
        reason = worker.wait_for("a coordinator does not use this worker")["reason"]
        assert refused["reason"] == reason and "--exact needs equal machines" in reason
        detail = httpx.get(f"http://127.0.0.1:{port}/status").json()["detail"]
        assert "waiting for workers: 1 of 2" in detail and reason in detail
        body = {"prompt": "a", "max_tokens": 1}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 503 and reason in reply.json()["error"]["message"]
        time.sleep(2.5)
        assert len(worker.records("a coordinator does not use this worker")) == 1
        # A second machine like the refused one is enough for the plan, whichever of the others answered first.
        third = ("--listen", f"127.0.0.1:{later}", *flags[2:])
        stack.enter_context(ending(launch(tmp_path, "c", program, third, env={ARITHMETIC: arithmetics[worker.name]})))
        coordinator.wait_for("serving")
        nodes = httpx.get(f"http://127.0.0.1:{port}/status").json()["nodes"]
        (unused,) = [node for node in nodes if not node["span"]]
        assert unused["health"] == "refused" and unused["address"] != worker.address
        assert "than " in unused["detail"] and "Name only equal ones" in unused["detail"]
