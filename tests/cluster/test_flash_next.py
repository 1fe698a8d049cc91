"""Families whose layers are our own over two workers without files: they fetch their layers, and one is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api.streams import tokens_of_stream
from tests.support.checkpoints.own_families import OWN_FAMILIES
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer
from tests.support.processes.processes import (
    Cluster,
    as_worker,
    ending,
    launch_coordinator,
    launch_worker,
    serving,
    without_folder,
)

pytest.importorskip("torch", reason="transformers needs torch")

VOCAB = 512
TOKENS = 120


@pytest.fixture(scope="module", params=OWN_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Return each family whose layers are this project's own."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a tokenizer into a folder of its own."""
    path = tmp_path_factory.mktemp("coordinator") / "model"
    end: Any = VOCAB - 1 if family == "flash-next" else [VOCAB - 1]
    return write_tokenizer(OWN_FAMILIES[family].write(path, vocab_size=VOCAB, eos_token_id=end))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Serve the model over workers that do not see its folder, with two drafts per window."""
    hidden = without_folder(model.parent)
    if not hidden:
        pytest.skip("hiding a folder from a process takes Linux's mount namespaces")
    folder = tmp_path_factory.mktemp("workers")
    how: dict[str, Any] = {"prefix": hidden, "env": {"HF_HOME": str(folder / "home")}}
    with ExitStack() as stack:
        launched = [launch_worker(folder, name, **how) for name in ("a", "b")]
        for process in launched:
            stack.enter_context(ending(process))
        workers = [as_worker(process) for process in launched]
        flags = ("--mtp", "2")
        with serving(folder, model, [w.address for w in workers], *flags) as coordinator:
            yield Cluster(workers, coordinator)


def test_exact_mode_is_refused_before_a_worker_loads(family: str, model: Path, tmp_path: Path) -> None:
    """The command ends, and names the family."""
    with ending(launch_coordinator(tmp_path, str(model), "--exact", "--nodes", "1")) as process:
        assert process.wait() == 2
        assert f"--exact is not supported for {OWN_FAMILIES[family].name}" in process.text()


def answer(cluster: Cluster, kill: bool = False) -> list[int]:
    """Return the tokens of a greedy answer. With `kill` the last worker is killed after 20 tokens."""
    prompt = [(7 * i) % 250 for i in range(90)]
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    after = 20 if kill else TOKENS + 1
    url = f"{cluster.url}/v1/completions"
    return tokens_of_stream(url, body, after, cluster.workers[-1].kill)


@pytest.mark.slow
def test_a_killed_worker_changes_no_token(cluster: Cluster) -> None:
    """The worker that is left fetches the other layers, and the answer goes on as it would have."""
    expected = answer(cluster)
    assert len(expected) == TOKENS
    assert answer(cluster, kill=True) == expected
    status = httpx.get(f"{cluster.url}/status", timeout=60).json()
    assert status["recoveries"] >= 1
