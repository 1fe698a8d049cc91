"""The tokens of texts for embeddings, and the bounds of the process that computes them: time, places, its life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.text import embedder as module
from coordinator.text.embedder import Embedder
from coordinator.text.tokenizer import ContextLengthError
from proto.errors import CapacityError, CheckpointError, MemoryLimitError, NotReadyError, RequestError
from tests.support.api.stand_in_embedder import SLOW, stand_in_embedder


@pytest.fixture
async def embedder(tmp_path: Path) -> AsyncIterator[Embedder]:
    embedder = stand_in_embedder(tmp_path)
    await embedder.start()
    yield embedder
    embedder.close()


async def first_number(embedder: Embedder, tokens: list[int], client: str = "one") -> int:
    """Return the first token that the process got."""
    async with embedder.open_request(client):
        return round(float((await embedder.compute(tokens))[2]) / 0.8)


def test_long_texts_are_refused_or_cut_before_their_end_token(tmp_path: Path) -> None:
    """A text ends with the tokenizer's own end token, also one that is cut. The model's ids stay as they are."""
    embedder = stand_in_embedder(tmp_path)
    (short,) = embedder.tokenize(["Hello"], truncate=False)
    end = short[-1]
    (cut,) = embedder.tokenize(["Hello " * 50], truncate=True)
    assert len(cut) == 20 and cut[-1] == end and end not in cut[:-1]
    (given,) = embedder.tokenize([[1, 2]], truncate=False)
    assert given == [1, 2]
    with pytest.raises(ContextLengthError, match=r"input\[1\]: \d+ tokens exceed .* of 20 tokens"):
        embedder.tokenize(["Hello", "Hello " * 50], truncate=False)
    with pytest.raises(ContextLengthError):
        embedder.tokenize([[1] * 21], truncate=False)
    for wrong in ([-1], [10**6], []):
        with pytest.raises(RequestError, match=r"input\[0\]"):
            embedder.tokenize([wrong], truncate=True)


async def test_a_killed_process_is_replaced(embedder: Embedder) -> None:
    """A process that is killed costs the request whose input it computes, and no other one."""
    assert embedder.process is not None
    job = asyncio.create_task(first_number(embedder, [7] * SLOW))
    await asyncio.sleep(0.1)
    embedder.process.kill()
    with pytest.raises(NotReadyError, match="has ended"):
        await job
    assert await first_number(embedder, [3]) == 3
    embedder.process.kill()
    embedder.process.wait()
    assert await first_number(embedder, [4]) == 4


async def test_a_late_or_cancelled_job_gives_no_later_one_its_result(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends at its deadline with its process, and the next one gets its own vector."""
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.2)
    with pytest.raises(NotReadyError, match="took more than"):
        await first_number(embedder, [7] * SLOW)
    monkeypatch.undo()
    assert await first_number(embedder, [5]) == 5
    job = asyncio.create_task(first_number(embedder, [7] * SLOW))
    await asyncio.sleep(0.1)
    job.cancel()
    await asyncio.wait([job])
    assert await first_number(embedder, [6]) == 6


async def test_clients_take_turns(embedder: Embedder) -> None:
    """A client with many requests of many inputs delays one of another client by a single input."""
    order: list[str] = []

    async def ask(client: str, inputs: int) -> None:
        async with embedder.open_request(client):
            for number in range(inputs):
                await embedder.compute([number])
                order.append(client)

    await asyncio.gather(*(ask("many", 4) for _ in range(3)), ask("one", 2))
    assert order[:4] == ["many", "one", "many", "one"]
    assert order.count("many") == 12


async def test_places_are_bounded(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that fills its places gets 429, another one does not, and ended requests free their places."""
    monkeypatch.setattr(module, "MOST_OF_CLIENT", 1)
    async with embedder.open_request("one"):
        with pytest.raises(CapacityError):
            await first_number(embedder, [1])
        assert await first_number(embedder, [2], "another") == 2
    assert await first_number(embedder, [3]) == 3


async def test_a_model_that_cannot_be_loaded_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process reports why, or ends; without memory no process is started."""
    for program, cause in (('print(\'{"error": "no norm"}\')', "no norm"), ("", "has ended")):
        with pytest.raises(CheckpointError, match=cause):
            await stand_in_embedder(tmp_path, program).start()
    monkeypatch.setattr(module, "default_memory_limit", lambda: module.ROOM)
    with pytest.raises(MemoryLimitError, match="Use a smaller one"):
        stand_in_embedder(tmp_path)
