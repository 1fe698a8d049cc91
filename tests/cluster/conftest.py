"""Workers that all tests of this folder share: they cost seconds to start, and a coordinator that leaves frees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer
from tests.support.processes.processes import Worker, as_worker, ending, launch_worker

Pool = Callable[[int], list[str]]


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """`pool(n)`: the addresses of n ready workers, always the same ones first.

    They read whatever checkpoint a coordinator names. Not for tests that stop, pin or break a worker.
    """
    folder = tmp_path_factory.mktemp("workers")
    workers: list[Worker] = []
    with ExitStack() as stack:

        def take(count: int) -> list[str]:
            numbers = range(len(workers), count)
            launched = [launch_worker(folder, f"pool-{i}") for i in numbers]
            for process in launched:
                stack.enter_context(ending(process))
            workers.extend(as_worker(process) for process in launched)
            return [worker.address for worker in workers[:count]]

        yield take
        for worker in workers:  # all hear of it before the first one is waited for
            worker.popen.terminate()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of 8 layers with head and tokenizer: every argument of its answers is a toss-up, so that
    a step computed otherwise shows."""
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("toy"), vocab=512))
