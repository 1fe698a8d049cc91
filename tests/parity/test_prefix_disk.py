"""Prefixes on disk give the tokens of computed ones, after a restart, over other cuts, and never those of other models.

Each call of `answers` is a new engine, as after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from coordinator.schedule.request import GenerationRequest
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.layers.kv_cache import PairKV
from proto.backup import prefix_key
from proto.params import SamplingParams
from proto.span import Span
from tests.bench.texts import held_out_prompts
from tests.support.checkpoints.checkpoints import convert_checkpoint
from tests.support.stages.local_run import Answered, run
from worker.cache.sequence_cache import Border, PrefixEntry
from worker.disk.block_file import SUFFIX
from worker.disk.block_index import Block, BlockIndex
from worker.engine.engine_thread import EngineThread
from worker.engine.prefix_disk import WRITE_SHARE, StagePrefixes

COUNT = 8
LIMIT = 10**9

PARAMS = (SamplingParams(logprobs=0), SamplingParams(temperature=0.9, seed=3, logprobs=0))


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """Let a disk take longer than an answer may wait for it, because test machines are shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.schedule.backup_transfer.SHORTEST_LOAD", 30.0)
        patch.setattr("worker.engine.prefix_disk.CLOSE_SECONDS", 30.0)
        yield


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Return the turns of a chat, each with the text of the one before, greedy and sampled."""
    tokenizer = Tokenizer.load(checkpoint_dir())
    text = [token for one in held_out_prompts(tokenizer, 8) for token in one]
    turns = [tuple(text[:length]) for length in (150, 190, 230)]
    return [GenerationRequest(turn, COUNT, params) for turn, params in zip(turns, PARAMS + PARAMS, strict=False)]


def answers(asked: Sequence[GenerationRequest], state: Path | None, **options: Any) -> list[Answered]:
    """Return the answers of a new engine, with a disk if `state` is given."""
    options = {"path": checkpoint_dir(), "dtype": "float32", "mtp": "1", **options}
    disk: dict[str, Any] = {} if state is None else {"state": state, "prefix_disk": LIMIT}
    return run(requests=asked, one_by_one=True, **disk, **options)


class Engine:
    """An engine thread whose work goes on, or has ended."""

    def __init__(self, *, busy: bool) -> None:
        self._busy, self._us = busy, 0

    @property
    def busy_us(self) -> int:
        """Microseconds of work."""
        self._us += self._busy
        return self._us

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)


@pytest.mark.parametrize(("busy", "least", "most"), [(True, 0.165, 10.0), (False, 0.0, 0.165)])
async def test_writing_leaves_the_machine_to_frames(busy: bool, least: float, most: float) -> None:
    """Writing takes WRITE_SHARE of the time while frames come, and all of it when none does."""
    prefixes = StagePrefixes(cast(Any, None), "", Span(0, 1), cast(Any, Engine(busy=busy)))
    started = time.monotonic()
    await prefixes._rest(0.2 * WRITE_SHARE)
    assert least < time.monotonic() - started < most


async def test_what_waits_for_the_disk_is_held_by_the_stage_alone() -> None:
    """Entries of any size wait, and one that the stage drops before its turn is gone."""
    prefixes = StagePrefixes(cast(Any, None), "", Span(0, 1), cast(Any, Engine(busy=False)))
    entries = [PrefixEntry(Border(bytes([i]), 100), []) for i in range(3)]
    for entry in entries:
        prefixes.save_soon(entry, None)
    del entries[1], entry
    waiting = [saved.entry() for saved in prefixes._queue]
    assert [one is None for one in waiting] == [False, True, False]
    prefixes._queue.clear()


async def test_an_entry_that_the_stage_drops_leaves_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing beside frames pauses for long. It ends soon after the entry is dropped, and the block is whole."""
    monkeypatch.setattr("worker.engine.prefix_disk.WRITE_SHARE", 1e-4)
    thread, index = EngineThread(), BlockIndex(tmp_path / "prefixes", LIMIT)
    prefixes = StagePrefixes(index, "model", Span(0, 3), thread)
    before = mx.get_active_memory()
    caches = [PairKV() for _ in range(3)]
    for cache in caches:
        cache.append(mx.ones((2, 8, 512, 512)))
        mx.eval(cache.arrays())
    border = Border(prefix_key([1] * 512), 512)
    entry = PrefixEntry(border, [*caches])
    dropped = weakref.ref(entry)
    del caches, cache

    async def frames() -> None:
        while True:
            thread.submit(lambda: time.sleep(0.005))
            await asyncio.sleep(0.006)

    busy = asyncio.create_task(frames())
    prefixes.save_soon(entry, None)
    started, began = time.monotonic(), list[Path]()
    while not began:
        began = [*(tmp_path / "prefixes").glob("*.part")]
        await asyncio.sleep(0.01)
        assert time.monotonic() - started < 10.0, "the writing does not begin"
    del entry
    while prefixes._queued or mx.get_active_memory() > before + 2**20:
        await asyncio.sleep(0.05)
        assert time.monotonic() - started < 20.0, "the writing holds the entry"
    assert dropped() is None and len(files(tmp_path)) == 1 and not began[0].exists()
    busy.cancel()
    await prefixes.close()
    await thread.close()


async def test_a_cancelled_writing_leaves_no_file_without_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that ends between the rename of a file and its entry leaves both, and a failed entry neither."""
    thread, index = EngineThread(), BlockIndex(tmp_path / "prefixes", LIMIT)
    add, adding = index.add_block, threading.Event()

    def slow(block: Block, nbytes: int) -> bool:
        adding.set()
        time.sleep(0.3)
        return add(block, nbytes)

    monkeypatch.setattr(index, "add_block", slow)
    prefixes = StagePrefixes(index, "model", Span(0, 1), thread)
    cache = PairKV()
    cache.append(mx.ones((2, 1, 200, 8)))
    mx.eval(cache.arrays())
    tokens = [1] * 200
    entry = PrefixEntry(Border(prefix_key(tokens), 200), [cache])
    prefixes.save_soon(entry, None)
    await asyncio.to_thread(adding.wait, 10)
    assert prefixes._writer is not None
    prefixes._writer.cancel()
    await asyncio.gather(prefixes._writer, return_exceptions=True)
    assert index.held("model", [*tokens, 1]) == {200: {0}} and len(files(tmp_path)) == 1
    await thread.close()


def compare(found: Sequence[Answered], expected: Sequence[Answered]) -> None:
    """Check that tokens and log-probabilities are equal."""
    assert [(a.tokens, a.logprobs) for a in found] == [(a.tokens, a.logprobs) for a in expected]


def cached(found: Sequence[Answered]) -> list[int]:
    """Return the tokens of each prompt that were not computed."""
    return [one.stats.cached_tokens for one in found]


def files(state: Path) -> list[Path]:
    """Return the blocks in the folder."""
    return sorted((state / "prefixes").glob(f"*{SUFFIX}"))


@pytest.fixture(scope="module")
def expected(requests: list[GenerationRequest]) -> list[Answered]:
    """Return the answers without a disk."""
    return answers(requests, None)


@pytest.fixture(scope="module")
def first_turn(tmp_path_factory: pytest.TempPathFactory, requests: list[GenerationRequest]) -> Path:
    """Return a state directory with the blocks of the first turn, for copies."""
    state = tmp_path_factory.mktemp("first")
    answers(requests[:1], state)
    return state


@pytest.fixture
def state(tmp_path: Path, first_turn: Path) -> Path:
    """Return a state directory of its own with the blocks of the first turn."""
    return shutil.copytree(first_turn, tmp_path / "state")


def test_a_restart_and_other_cuts_keep_the_prefixes(
    tmp_path: Path, requests: list[GenerationRequest], expected: list[Answered]
) -> None:
    """The last turn starts from the blocks of the one before, on one stage and on two and three others."""
    compare(answers(requests[:2], tmp_path), expected[:2])
    assert len(files(tmp_path)) >= 2
    assert all(os.stat(file).st_mode & 0o077 == 0 for file in files(tmp_path))
    for stages in (1, 2, 3):
        found = answers(requests[2:], tmp_path, stages=stages)
        compare(found, expected[2:])
        assert cached(found)[0] >= 160, f"{stages} stages"


def test_prefixes_that_wait_at_the_end_are_written(
    tmp_path: Path, requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop while the disk is slow loses no prefix whose turn has not come."""
    monkeypatch.setattr("worker.disk.block_file.os.fsync", lambda _: time.sleep(0.3))
    answers(requests[:2], tmp_path)
    assert cached(answers(requests[2:], tmp_path)) == [160]


def test_blocks_continue_each_other(
    tmp_path: Path,
    requests: list[GenerationRequest],
    expected: list[Answered],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A longer prefix writes only what is new, from engine to engine, in many pieces, and is whole afterwards."""
    for module in ("state_codec", "prefix_disk"):
        monkeypatch.setattr(f"worker.engine.{module}.PIECE_BYTES", 4096)
    for request, wanted in zip(requests[:3], expected, strict=False):
        compare(answers([request], tmp_path, stages=2), [wanted])
    again = answers(requests, tmp_path)
    compare(again, expected)
    assert all(cached(again))


@pytest.mark.parametrize(
    "other",
    [{"kv_bits": 8}, {"dtype": "bfloat16"}, {"exact": True}],
    ids=["kv bits", "dtype", "exact"],
)
def test_another_arithmetic_finds_nothing(
    state: Path, requests: list[GenerationRequest], other: dict[str, Any]
) -> None:
    """A prefix of other keys and values is never used. The other setting has its own ones."""
    found = answers(requests[:1], state, **other)
    assert cached(found) == [0]
    again = answers(requests[:1], state, **other)
    assert cached(again)[0] > 0
    compare(again, found)


def test_another_checkpoint_finds_nothing(tmp_path: Path, state: Path, requests: list[GenerationRequest]) -> None:
    """The prefixes of a model are not those of another one in its place."""
    other = convert_checkpoint(checkpoint_dir(), tmp_path / "other", quantize=4)
    assert cached(answers(requests[:1], state, path=other)) == [0]


def damage_file(file: Path, fault: str) -> None:
    """Change a block as the fault does, if it is one of files."""
    data = bytearray(file.read_bytes())
    if fault == "gone":
        file.unlink()
    elif fault == "short":
        file.write_bytes(data[: len(data) // 2])
    elif fault == "a bit":
        data[-5] ^= 1
        file.write_bytes(data)


def fill(descriptor: int) -> None:
    """Fail as a full disk does."""
    raise OSError(28, "No space left on device")


FSYNC: dict[str, Callable[[int], None]] = {"full": fill, "slow": lambda _: time.sleep(0.3)}


@pytest.mark.parametrize("damage", ["a bit", "short", "gone"])
def test_a_damaged_block_is_computed_again(
    state: Path, requests: list[GenerationRequest], expected: list[Answered], damage: str
) -> None:
    """The answer is that of a computed prompt, and the block is replaced."""
    for file in files(state):
        damage_file(file, damage)
    found = answers(requests[:1], state)
    compare(found, expected[:1])
    assert cached(found) == [0]
    assert cached(answers(requests[:1], state))[0] > 0


def test_a_folder_that_fails_costs_no_answer(
    tmp_path: Path,
    requests: list[GenerationRequest],
    expected: list[Answered],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file in place of the folder is reported once, and answers are computed."""
    (tmp_path / "prefixes").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        compare(answers(requests[:1], tmp_path), expected[:1])
    assert "no prefixes on disk" in caplog.text


def test_a_full_disk_stops_the_writing(
    tmp_path: Path,
    requests: list[GenerationRequest],
    expected: list[Answered],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failure is reported, the answer is whole, and no file is left."""
    monkeypatch.setattr("worker.disk.block_file.os.fsync", fill)
    with caplog.at_level(logging.WARNING):
        compare(answers(requests[:2], tmp_path), expected[:2])
    assert "prefix not written" in caplog.text
    assert [f.name for f in (tmp_path / "prefixes").iterdir() if not f.name.startswith("index")] == []


FAULTS = ("none", "a bit", "short", "gone", "slow", "full")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_tokens_beside_bad_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of chats, over any cut, with faults of the disk before each engine, have the tokens of computed prompts."""
    drawn, compared = random.Random(8), 0
    text = [t for one in held_out_prompts(Tokenizer.load(checkpoint_dir()), 40) for t in one]
    while compared < 10_000:
        start, lengths = drawn.randrange(len(text) - 400), drawn.sample(range(130, 400), 4)
        sampled = SamplingParams(temperature=0.9, seed=compared, logprobs=0)
        asked = [
            GenerationRequest(tuple(text[start : start + length]), 64, params)
            for length, params in zip(sorted(lengths), (PARAMS[0], sampled) * 2, strict=True)
        ]
        expected = answers(asked, None)
        for _ in range(2):
            fault = drawn.choice(FAULTS)
            for file in files(tmp_path):
                if drawn.random() < 0.5:
                    damage_file(file, fault)
            with monkeypatch.context() as patch:
                patch.setattr("worker.disk.block_file.os.fsync", FSYNC.get(fault, os.fsync))
                compare(answers(asked, tmp_path, stages=drawn.choice((1, 2, 3))), expected)
            compared += sum(len(answer.tokens) for answer in expected)
