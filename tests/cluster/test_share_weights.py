"""Workers without files: real processes that receive exactly their span from the coordinator or a hub."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.membership import ManagerOptions
from coordinator.cluster.served_model import ServedModel
from coordinator.cluster.view import Settings
from coordinator.cluster.weight_provider import WeightProvider
from coordinator.depth.controller import Controller, MtpMode
from coordinator.pipeline.pipeline import Pipeline
from coordinator.pipeline.worker_client import WorkerClient
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.prompts import Limits
from coordinator.schedule.request import Finished, GenerationRequest, TokenChunk, generate
from coordinator.schedule.scheduler import Scheduler
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto.errors import NotReadyError, WorkerLostError
from proto.params import SamplingParams
from proto.span import Span
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.hub import Hub
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer
from tests.support.processes.processes import (
    Worker,
    as_worker,
    ending,
    launch_worker,
    serving,
    without_folder,
)

REPO = "someone/some-model"
REQUEST = GenerationRequest(tuple(range(40)), 24, SamplingParams())
ME = pb.Coordinator(id="test", name="test")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that only the coordinator's machine has."""
    return tmp_path_factory.mktemp("coordinator")


@pytest.fixture(scope="module")
def source(theirs: Path) -> Path:
    model = write_checkpoint(theirs / "model", shards=3, hidden=128, vocab=512)
    return write_tokenizer(model)


@pytest.fixture(scope="module")
def hub(source: Path) -> Iterator[Hub]:
    with Hub() as hub:
        hub.add(REPO, source)
        yield hub


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(scope="module")
def elsewhere(theirs: Path) -> tuple[str, ...]:
    return without_folder(theirs)


@pytest.fixture(scope="module")
def workers(homes: Path, hub: Hub, elsewhere: tuple[str, ...]) -> Iterator[list[Worker]]:
    """Start two workers with separate caches and without files; the second names a model that it would download."""
    sent = hub.sent.total()
    with ExitStack() as stack:
        launched = [
            launch_worker(homes, name, *flags, env=hub.environment(homes / name), prefix=elsewhere)
            for name, flags in (("a", ()), ("b", ("--model", REPO)))
        ]
        for process in launched:
            stack.enter_context(ending(process))
        workers = [as_worker(process) for process in launched]
        assert hub.sent.total() == sent
        yield workers


def served(checkpoint: Checkpoint, *, share: bool, hub: Hub | None = None) -> ServedModel:
    """Return the served model as in `mtp-coord serve`, without its path on this machine."""
    ref = pb.ModelRef(name="model", fingerprint=checkpoint.fingerprint())
    if hub is not None:
        ref.repo, ref.revision = REPO, hub.repos[REPO].commit
    return ServedModel(checkpoint, ref, None, 0, True, 1, share_weights=share)


async def answer(loop: GenerationLoop) -> list[int]:
    tokens: list[int] = []
    async for event in generate(loop, REQUEST):
        if isinstance(event, TokenChunk):
            tokens.extend(event.tokens)
        elif isinstance(event, Finished):
            assert event.reason == "length"
    return tokens


async def answer_from(model: ServedModel, workers: list[Worker], wait: float = 60.0) -> list[int]:
    """Return one answer of a cluster over these workers, or raise its error."""

    async def alone(epoch: int) -> Pipeline:
        raise NotReadyError("this test serves from workers alone")

    settings = Settings(
        nodes=len(workers),
        wait=wait,
        recovery_wait=5.0,
        why_not_alone="it serves nothing alone here",
    )
    options = ManagerOptions(ME, settings, tuple(worker.address for worker in workers))
    manager = ClusterManager(model, options, alone)
    loop = GenerationLoop(manager, Scheduler(Limits(1024, 256), Controller(MtpMode(2))))
    try:
        manager.start()
        await asyncio.wait_for(loop.start(), 100)
        return await asyncio.wait_for(answer(loop), 100)
    finally:
        await loop.close()
        await manager.close()


def forget(homes: Path) -> None:
    for file in homes.rglob("parts/*"):
        file.unlink()


def size_of(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def stored_files(home: Path) -> dict[str, int]:
    """Return the parts on a worker's disk and their sizes."""
    return {file.stem: file.stat().st_size for file in home.rglob("parts/*.safetensors")}


# ---- a whole cluster


@pytest.mark.parametrize("share", [True, False], ids=["from the coordinator", "from a hub"])
async def test_a_cluster_of_workers_without_files(
    source: Path, workers: list[Worker], homes: Path, hub: Hub, share: bool
) -> None:
    """Workers without files give the answer of one process. Each stores only its span, and requests it once."""
    checkpoint = Checkpoint.open(source)
    async with local_generator(checkpoint, mtp=MtpMode(2)) as local:
        expected = await answer(local)
    forget(homes)
    hub.sent.clear()
    model = served(checkpoint, share=share, hub=hub)
    assert await answer_from(model, workers) == expected
    first, second = stored_files(homes / "a"), stored_files(homes / "b")
    assert first.keys() & second.keys() == {"embed"}
    assert first.keys() | second.keys() == {
        *(part for part, size in checkpoint.part_bytes().items() if size)
    }
    sizes = checkpoint.part_bytes()
    needed = sum(sizes[part] for part in (*first, *second))
    assert sum(hub.sent.values()) == (0 if share else needed)
    hub.sent.clear()
    for worker in workers:
        assert len(worker.records("weights received")) > 0
    assert await answer_from(model, workers) == expected
    assert hub.sent.total() == 0
    assert [w.records("weights received")[-1]["received"] for w in workers] == ["0 B", "0 B"]


async def test_qwen3_next_over_two_workers(
    theirs: Path, workers: list[Worker], homes: Path
) -> None:
    """Two workers give the answer of one process, with drafts and rejections. Each fetches its span and no other."""
    path = write_checkpoint(theirs / "next", moe=True, qwen3_next=True, tie=False)
    checkpoint = Checkpoint.open(path)
    async with local_generator(checkpoint, mtp=MtpMode(2)) as local:
        expected = await answer(local)
    forget(homes)
    assert await answer_from(served(checkpoint, share=True), workers) == expected
    first, second = stored_files(homes / "a"), stored_files(homes / "b")
    assert first.keys() & second.keys() == {"embed"}
    assert first.keys() | second.keys() == checkpoint.part_bytes().keys()


@pytest.mark.parametrize("share", [True, False], ids=["--share-weights", "--model REPO"])
async def test_the_commands_people_type(
    source: Path,
    workers: list[Worker],
    homes: Path,
    theirs: Path,
    hub: Hub,
    elsewhere: tuple[str, ...],
    share: bool,
) -> None:
    """`mtp-coord serve` over workers with an empty disk downloads the whole repo, and each worker its span."""
    if not elsewhere:
        pytest.skip("hiding a folder from a process takes Linux's mount namespaces")
    forget(homes)
    hub.sent.clear()
    checkpoint = Checkpoint.open(source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    async with local_generator(checkpoint, mtp=MtpMode(2)) as local:
        expected = tokenizer.decode(await answer(local))
    model, flags = (str(source), ("--share-weights",)) if share else (REPO, ())
    addresses = [worker.address for worker in workers]
    env = hub.environment(theirs / "home")
    with serving(theirs, model, addresses, "--mtp", "2", *flags, env=env) as coordinator:
        asked = {
            "prompt": list(REQUEST.prompt),
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with httpx.AsyncClient(timeout=60) as client:
            said = await client.post(f"{coordinator.url}/v1/completions", json=asked)
    assert said.json()["choices"][0]["text"] == expected
    sizes = checkpoint.part_bytes()
    fetched = sum(sizes[part] for worker in workers for part in stored_files(homes / worker.name))
    assert fetched == sum(sizes.values()) + sizes["embed"]
    assert hub.weights_sent == (0 if share else size_of(source) + fetched)


# ---- one worker, and what happens to it


def silent(done: int, total: int) -> None:
    """Ignore the progress."""


class Counting(WeightProvider):
    """A provider that counts its bytes. After `hold_at` bytes it waits for `go`."""

    sent = 0
    hold_at = math.inf

    def __init__(self, checkpoint: Checkpoint, ref: pb.ModelRef, share: bool) -> None:
        super().__init__(checkpoint, ref, share)
        self.go = asyncio.Event()

    async def answer_request(
        self, offer: pb.WeightsOffer, wanted: pb.WantedTensors
    ) -> AsyncIterator[pb.Weights]:
        async for message in super().answer_request(offer, wanted):
            if self.sent >= self.hold_at:
                await self.go.wait()
            self.sent += len(message.piece)
            yield message


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def arrived(home: Path) -> int:
    """Return the bytes of weights on a worker's disk, with the headers of their files."""
    total = 0
    for file in home.rglob("parts/*"):
        with suppress(FileNotFoundError):  # it has just got its final name
            total += file.stat().st_size
    return total


def stage_bytes(checkpoint: Checkpoint, request: pb.LoadRequest) -> int:
    span = Span(request.span.start, request.span.end)
    parts = checkpoint.stage_parts(span, first=request.first, last=request.last)
    return sum(checkpoint.part_bytes()[part] for part in parts)


def stage_of(checkpoint: Checkpoint, span: Span, provider: WeightProvider) -> pb.LoadRequest:
    return pb.LoadRequest(
        coordinator=ME,
        epoch=1,
        model=provider.ref,
        span=pb.Span(start=span.start, end=span.end),
        first=span.start == 0,
        last=span.end == checkpoint.config.num_layers,
        mtp=True,
        lease_ms=20_000,
    )


async def test_a_kill_costs_what_was_under_way(
    source: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is killed during two calls and started again reads at most 1.1 times its layers in total."""
    checkpoint = Checkpoint.open(source)
    from_hub = served(checkpoint, share=False, hub=hub).provider
    shared = Counting(checkpoint, served(checkpoint, share=True).ref, True)
    quarter = stage_of(checkpoint, Span(4, 6), from_hub)
    begin = stage_of(checkpoint, Span(0, 3), shared)
    sizes = [stage_bytes(checkpoint, request) for request in (quarter, begin)]
    monkeypatch.setattr("coordinator.cluster.weight_provider.PIECE_BYTES", 20_000)
    hub.sent.clear()
    held = hub.faults.hold_at, shared.hold_at = 0.75 * sizes[0], 0.85 * sizes[1]
    home = tmp_path / "home"
    with ending(launch_worker(tmp_path, "killed", env=hub.environment(home))) as process:
        client = WorkerClient(as_worker(process).address, ME)
        calls = [
            asyncio.create_task(from_hub.provide_weights(client, quarter, silent)),
            asyncio.create_task(shared.provide_weights(client, begin, silent)),
        ]
        await asyncio.to_thread(
            wait_until,
            lambda: (
                hub.weights_sent >= held[0]
                and shared.sent >= held[1]
                and arrived(home) >= hub.weights_sent + shared.sent
            ),
        )
        assert not any(call.done() for call in calls)
        process.kill()
        hub.faults.hold_at = math.inf
        shared.go.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, WorkerLostError) for end in ends)
        await client.close()
    assert len(list(home.rglob("parts/*.part"))) == 2
    with ending(launch_worker(tmp_path, "again", env=hub.environment(home))) as process:
        client = WorkerClient(as_worker(process).address, ME)
        for provider, request, size in ((from_hub, quarter, sizes[0]), (shared, begin, sizes[1])):
            await provider.provide_weights(client, request, silent)
            assert (await client.load(request, silent)).weight_bytes == size
        await client.unload(1)  # or it would wait for our lease to end before it leaves
        await client.close()
    assert sizes[0] <= hub.weights_sent <= 1.1 * sizes[0]
    assert sizes[1] <= shared.sent <= 1.1 * sizes[1]
