"""Fixtures shared by the tests of this folder.

Worker processes are shared because each takes seconds to start. A coordinator that exits releases its workers.
"""

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
    """Return a function `pool(n)` that gives the addresses of n ready workers, always in the same order.

    The workers load any checkpoint that a coordinator names. A test that stops, pins or breaks a worker starts its own.
    """
    folder = tmp_path_factory.mktemp("workers")
    workers: list[Worker] = []
    with ExitStack() as stack:

        def take(count: int) -> list[str]:
            """Return the addresses of the first `count` workers. Start those that are missing."""
            numbers = range(len(workers), count)
            launched = [launch_worker(folder, f"pool-{i}") for i in numbers]
            for process in launched:
                stack.enter_context(ending(process))
            workers.extend(as_worker(process) for process in launched)
            return [worker.address for worker in workers[:count]]

        yield take
        for worker in workers:  # every worker gets the signal before the first wait
            worker.popen.terminate()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random checkpoint of 8 layers with an MTP head and a tokenizer.

    Its logits are nearly flat, so a step that is computed differently changes the answer.
    """
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("toy"), vocab=512))
