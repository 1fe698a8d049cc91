"""Workers without files: real processes that receive exactly their span from the coordinator or a hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load
from tokenizers import Tokenizer

from coordinator.schedule.request import GenerationRequest
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto.params import SamplingParams
from proto.terminal.progress import format_size
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.hub import Hub
from tests.support.checkpoints.nextn import NextN
from tests.support.checkpoints.smollm2 import smollm2
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


# ---- models of mlx-lm


def smollm2_and_answer(folder: Path) -> tuple[Path, list[int]]:
    """Return a model whose embedding is its lm_head, and mlx-lm's own tokens after REQUEST."""
    model, *_ = load(str(smollm2()))
    steps = generate_step(mx.array(REQUEST.prompt), model, max_tokens=REQUEST.max_tokens)
    return Path(shutil.copytree(smollm2(), folder / "model")), [int(token) for token, _ in steps]


def step_and_answer(folder: Path) -> tuple[Path, list[int]]:
    """Return a converted model with a NextN head that has an lm_head of its own, and mlx-lm's tokens.

    Workers read a publisher's tensors from copies of their own.
    """
    model = NextN("step3p5", vocab_size=512)
    path = write_tokenizer(model.write(folder / "model", model.converted()))
    return path, model.greedy(REQUEST.prompt, REQUEST.max_tokens)


@pytest.mark.thorough
@pytest.mark.parametrize("made", [step_and_answer, pytest.param(smollm2_and_answer, marks=pytest.mark.slow)])
def test_each_worker_fetches_its_own_bytes_of_a_model_of_mlx_lm(
    made: Callable[[Path], tuple[Path, list[int]]], tmp_path: Path
) -> None:
    """`pull` gets the repo once. Workers then get their parts from the hub, or from the coordinator's copy."""
    theirs, name = tmp_path / "coordinator", "someone/of-mlx-lm"
    theirs.mkdir()
    if not (elsewhere := without_folder(theirs)):
        pytest.skip("hiding a folder from a process takes Linux's mount namespaces")
    source, tokens = made(theirs)
    sizes = {part: size for part, size in Checkpoint.open(source).part_bytes().items() if size}
    expected = Tokenizer.from_file(str(source / "tokenizer.json")).decode(tokens)
    with Hub() as hub, ExitStack() as stack:
        hub.add(name, source)
        how: dict[str, Any] = {"env": hub.environment(theirs / "home")}
        pull = [sys.executable, "-c", "from coordinator.cli import main; main()", "pull", name]
        assert subprocess.run(pull, env={**os.environ, **how["env"]}, timeout=60, check=False).returncode == 0
        assert hub.weights_sent == sum(file.stat().st_size for file in source.glob("*.safetensors"))
        launched = [
            launch_worker(tmp_path, worker, env=hub.environment(tmp_path / worker), prefix=elsewhere) for worker in "ab"
        ]
        workers = [as_worker(stack.enter_context(ending(process))) for process in launched]
        asked = {"prompt": list(REQUEST.prompt), "max_tokens": REQUEST.max_tokens, "temperature": 0, "ignore_eos": True}
        for flags in (["--no-share-weights"], []):
            hub.sent.clear()
            with serving(theirs, name, [worker.address for worker in workers], *flags, **how) as coordinator:
                said = httpx.post(f"{coordinator.url}/v1/completions", json=asked, timeout=60)
            assert said.json()["choices"][0]["text"] == expected
            first, second = stored_files(tmp_path / "a"), stored_files(tmp_path / "b")
            assert first.keys() & second.keys() == {"embed"}
            assert first.keys() | second.keys() == sizes.keys()
            assert hub.weights_sent == (sum(sizes.values()) + sizes["embed"] if flags else 0)
            received = [worker.records("weights received")[-1]["received"] for worker in workers]
            assert received == [format_size(sum(sizes[part] for part in parts)) for parts in (first, second)]
            for file in tmp_path.glob("[ab]/**/parts/*"):
                file.unlink()
