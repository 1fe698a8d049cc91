"""Workers without files: real processes that receive exactly their span from the coordinator or a hub."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.membership import ManagerOptions
from coordinator.cluster.served_model import ServedModel
from coordinator.cluster.view import Settings
from coordinator.drafts.controller import Controller, MtpMode
from coordinator.pipeline.pipeline import Pipeline
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.prompts import Limits
from coordinator.schedule.request import GenerationRequest
from coordinator.schedule.scheduler import Scheduler
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto.errors import NotReadyError
from proto.params import SamplingParams
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
from tests.support.stages import local_run

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


def served(checkpoint: Checkpoint) -> ServedModel:
    """Return the served model as in `mtp-coord serve --share-weights`, without its path on this machine."""
    ref = pb.ModelRef(name="model", fingerprint=checkpoint.fingerprint())
    return ServedModel(checkpoint, ref, None, 0, True, 1, 16, share_weights=True)


async def answer(loop: GenerationLoop) -> list[int]:
    found = await local_run.answer(loop, REQUEST)
    assert found.reason == "length"
    return list(found.tokens)


async def answer_from(model: ServedModel, workers: list[Worker]) -> list[int]:
    """Return one answer of a cluster over these workers, or raise its error."""

    async def alone(epoch: int) -> Pipeline:
        raise NotReadyError("this test serves from workers alone")

    settings = Settings(
        nodes=len(workers),
        wait=60.0,
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


async def test_qwen3_next_over_two_workers(
    theirs: Path, workers: list[Worker], homes: Path
) -> None:
    """Two workers give the answer of one process, with drafts and rejections. Each fetches only its span, once."""
    path = write_checkpoint(theirs / "next", moe=True, qwen3_next=True, tie=False)
    checkpoint = Checkpoint.open(path)
    async with local_generator(checkpoint, mtp=MtpMode(2)) as local:
        expected = await answer(local)
    forget(homes)
    for received in (True, False):
        assert await answer_from(served(checkpoint), workers) == expected
        found = [worker.records("weights received")[-1]["received"] for worker in workers]
        assert [amount != "0 B" for amount in found] == [received] * 2
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
