"""Prompts on disk in whole programs: they outlive killed workers, and serve another number of them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from tests.bench.texts import held_out_prompts
from tests.support.processes.processes import (
    as_worker,
    ending,
    launch_worker,
    running_cluster,
    serving,
)
from tests.support.processes.waits import wait_until
from worker.disk.block_file import SUFFIX

FLAGS = ("--prefix-disk", "1GB")
WRITE_SECONDS = 20.0


def ask(url: str, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of the prompt were known."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).json()
    usage = reply["usage"]["prompt_tokens_details"]
    return reply["choices"][0]["token_ids"], usage["cached_tokens"]


def wait_for_blocks(state: Path, count: int) -> None:
    """Wait until `count` blocks are written."""
    blocks = (state / "prefixes").glob
    wait_until(lambda: len([*blocks(f"*{SUFFIX}")]) >= count, "blocks of all", WRITE_SECONDS)


def long_prompt() -> list[int]:
    """Return a prompt of 400 tokens."""
    texts = held_out_prompts(Tokenizer.load(checkpoint_dir()), 8)
    return [token for text in texts for token in text][:400]


@pytest.mark.slow
def test_other_workers_start_from_the_prefixes_of_killed_ones(tmp_path: Path) -> None:
    """Two workers are killed, and three with other cuts answer the same prompt from the blocks, with equal tokens."""
    prompt, state = long_prompt(), tmp_path / "state"
    flags = ("--state-dir", str(state), *FLAGS)
    found = []
    for count in (2, 3):
        folder = tmp_path / str(count)
        folder.mkdir()
        with running_cluster(folder, "builtin", count, worker_flags=flags) as cluster:
            found.append(ask(cluster.url, prompt))
            wait_for_blocks(state, len(cluster.workers))
            for worker in cluster.workers:
                worker.kill()
    (cold, unknown), (warm, known) = found
    assert unknown == 0 and known >= 352
    assert warm == cold


def restarted(folder: Path, states: list[Path], *flags: str) -> tuple[list[int], int]:
    """Return what `ask` returns of new workers with these state directories, in the order of their addresses."""
    with ExitStack() as stack:
        workers = []
        for number, state in enumerate(states):
            own = ("--model", "builtin", "--state-dir", str(state), *FLAGS)
            workers.append(launch_worker(folder, f"w{number}", *own))
            stack.enter_context(ending(workers[-1]))
        addresses = [as_worker(worker).address for worker in workers]
        coordinator = stack.enter_context(serving(folder, "builtin", addresses, *flags))
        found = ask(coordinator.url, long_prompt())
        for state in states:
            wait_for_blocks(state, 1)
    return found


def test_workers_with_disks_of_their_own_keep_the_prefixes(tmp_path: Path) -> None:
    """Each machine gets the layers whose blocks it has, and a third one reads them from the others."""
    first, second, third = (tmp_path / f"state-{number}" for number in range(3))
    found = []
    for number, states in enumerate(([first, second], [second, first], [third, second, first])):
        (folder := tmp_path / str(number)).mkdir()
        found.append(restarted(folder, states))
    (cold, unknown), *warm = found
    assert unknown == 0
    assert [known >= 352 for _, known in warm] == [True, True]
    assert [tokens for tokens, _ in warm] == [cold, cold]


@pytest.mark.slow
def test_a_group_keeps_the_prefixes_of_its_shares(tmp_path: Path) -> None:
    """Each member reads the block of its share after a restart, and another number of machines finds none."""
    prompt, state = long_prompt(), tmp_path / "state"
    flags = ("--state-dir", str(state), *FLAGS)
    found = []
    for number, parallel in enumerate(("tensor", "tensor", "pipeline")):
        folder = tmp_path / str(number)
        folder.mkdir()
        group = ("--parallel", parallel, "--dtype", "float32")
        with running_cluster(folder, "builtin", 2, *group, worker_flags=flags) as cluster:
            found.append(ask(cluster.url, prompt))
            wait_for_blocks(state, len(cluster.workers))
    assert [known > 0 for _, known in found] == [False, True, False]
    assert found[0][0] == found[1][0] == found[2][0]
