"""Workers without files: real processes that receive exactly their span from the coordinator or a hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from coordinator.schedule.request import GenerationRequest
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
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
    """Write a Qwen3-Next."""
    kind: dict[str, Any] = {"moe": True, "qwen3_next": True, "tie": False}
    model = write_checkpoint(theirs / "model", shards=3, hidden=128, vocab=512, **kind)
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


def stored_files(home: Path) -> dict[str, int]:
    """Return the parts on a worker's disk and their sizes."""
    return {file.stem: file.stat().st_size for file in home.rglob("parts/*.safetensors")}


@pytest.mark.parametrize(
    "share",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["--share-weights", "--no-share-weights"],
)
def test_the_commands_people_type(
    source: Path,
    workers: list[Worker],
    homes: Path,
    theirs: Path,
    hub: Hub,
    elsewhere: tuple[str, ...],
    share: bool,
) -> None:
    """`mtp-coord serve` over workers with an empty disk gives the answer of one process, with drafts.

    From a hub it downloads the whole repo. Each worker gets only its span, and gets it once.
    """
    if not elsewhere:
        pytest.skip("hiding a folder from a process takes Linux's mount namespaces")
    for file in homes.rglob("parts/*"):
        file.unlink()
    hub.sent.clear()
    checkpoint = Checkpoint.open(source)
    (answer,) = local_run.run(source, [REQUEST], mtp="2")
    expected = Tokenizer.from_file(str(source / "tokenizer.json")).decode(list(answer.tokens))
    model, flags = (str(source), ()) if share else (REPO, ("--no-share-weights",))
    how: dict[str, Any] = {"env": hub.environment(theirs / "home")}
    addresses = [worker.address for worker in workers]
    asked = {"prompt": list(REQUEST.prompt), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    for received in (True, False) if share else (True,):
        with serving(theirs, model, addresses, "--mtp", "2", *flags, **how) as coordinator:
            said = httpx.post(f"{coordinator.url}/v1/completions", json=asked, timeout=60)
        assert said.json()["choices"][0]["text"] == expected
        if share:
            found = [worker.records("weights received")[-1]["received"] for worker in workers]
            assert [amount != "0 B" for amount in found] == [received] * 2
    sizes = checkpoint.part_bytes()
    first, second = stored_files(homes / "a"), stored_files(homes / "b")
    assert first.keys() & second.keys() == {"embed"}
    assert first.keys() | second.keys() == sizes.keys()
    fetched = sum(sizes.values()) + sizes["embed"]
    whole = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert hub.weights_sent == (0 if share else whole + fetched)
