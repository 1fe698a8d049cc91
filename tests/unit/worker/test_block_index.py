"""The index of blocks: chains over cuts, the bound of the folder, and folders of other programs."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proto.backup import prefix_key
from proto.errors import ProtocolError
from proto.span import Span
from tests.support.checkpoints.small_disk import small_disk
from worker.disk.block_file import FORMER_SUFFIX, BlockWriter, Piece
from worker.disk.block_index import STALE_SECONDS, VERSION, Block, BlockIndex
from worker.engine.prefix_disk import layer_bytes, namespace_of

TOKENS = tuple(range(1000))
ALL = Span(0, 8)


def lengths(index: BlockIndex, layers: Span = ALL, tokens: tuple[int, ...] = TOKENS) -> list[int]:
    """Return the prefixes whose state of all `layers` is there, the longest first."""
    held = index.held("model", tokens)
    return sorted((n for n, here in held.items() if here.issuperset(layers)), reverse=True)


class Folder:
    """A folder of blocks whose files have one byte."""

    def __init__(self, path: Path, limit: int = 10**6) -> None:
        self.path = path
        self.now = 1e9
        self.index = BlockIndex(path, limit, self.clock)

    def clock(self) -> float:
        """Return the time, which moves on with each look as on a real machine."""
        self.now += 1e-3
        return self.now

    def add(self, length: int, start: int = 0, layers: Span = ALL, nbytes: int = 100) -> bool:
        """Add a block of the first `length` tokens, which continues that of `start`."""
        self.now += 1
        key, parent = prefix_key(TOKENS[:length]), prefix_key(TOKENS[:start]) if start else b""
        file = f"{length}-{layers.start}-{layers.end}.block"
        (self.path / file).touch()
        return self.index.add_block(Block("model", key, layers, start, length, parent, file), nbytes)

    def find(self, layers: Span = ALL, tokens: tuple[int, ...] = TOKENS) -> list[int]:
        return lengths(self.index, layers, tokens)

    @property
    def files(self) -> set[str]:
        return {path.stem for path in self.path.glob("*.block")}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "prefixes")


def test_any_cut_finds_its_layers(folder: Folder) -> None:
    """Blocks of one cut serve another one, if together they have all of its layers."""
    for layers in (Span(0, 3), Span(3, 8)):
        assert folder.add(128, layers=layers)
    assert folder.add(256, 128, Span(0, 3))
    assert folder.find() == [128]
    assert folder.find(Span(1, 3)) == [256, 128]
    assert folder.add(256, 0, Span(3, 8))  # another process, which had lost the first 128 tokens
    for layers in (ALL, Span(2, 5), Span(0, 1)):
        assert folder.find(layers) == [256, 128]
    chains = folder.index.chains("model", Span(2, 5), prefix_key(TOKENS[:256]))
    assert [(chain.layers, [b.length for b in chain.blocks]) for chain in chains] == [
        (Span(2, 3), [128, 256]),
        (Span(3, 5), [256]),
    ]


def test_a_prefix_is_proper_and_has_its_own_tokens(folder: Folder) -> None:
    """The whole prompt is no prefix of itself, and other tokens or another model have none."""
    assert folder.add(128)
    assert folder.find(tokens=TOKENS[:128]) == []
    assert folder.find(tokens=TOKENS[:129]) == [128]
    assert folder.find(tokens=(7, *TOKENS[1:])) == []
    assert folder.index.held("another", TOKENS) == {}


def test_the_least_recently_used_block_goes_first(folder: Folder) -> None:
    """A chain is used together, so its end goes before its beginning."""
    folder.index.limit = 300
    assert folder.add(128) and folder.add(256, 128) and folder.add(900)
    folder.now += 1
    chain = folder.index.chains("model", ALL, prefix_key(TOKENS[:256]))[0]
    folder.index.touch(chain.blocks)
    assert folder.add(600)
    assert folder.files == {"128-0-8", "256-0-8", "600-0-8"}
    assert folder.add(700)
    assert folder.files == {"128-0-8", "600-0-8", "700-0-8"}
    assert folder.find() == [700, 600, 128]


def test_a_block_keeps_what_it_continues(folder: Folder) -> None:
    """The beginning counts as used with the block, and a block whose beginning must go for it is refused."""
    folder.index.limit = 300
    assert folder.add(128) and folder.add(900) and folder.add(256, 128)
    assert folder.add(300, 256)
    assert folder.files == {"128-0-8", "256-0-8", "300-0-8"}
    assert not folder.add(400, 300)
    assert folder.find()[-1] == 128 and "400-0-8" not in folder.files


def test_the_end_of_a_chain_goes_first(folder: Folder) -> None:
    """What is left of a prompt after a full disk is readable, also where other prompts have used its beginning."""
    folder.index.limit = 500
    assert folder.add(128) and folder.add(256, 128) and folder.add(300, 256)
    assert folder.add(700) and folder.add(800) and folder.add(900)
    assert folder.find() == [900, 800, 700, 256, 128]
    assert folder.add(290, 256)
    assert folder.find() == [900, 800, 290, 256, 128]


def test_a_block_is_written_again_after_its_beginning_was_lost(folder: Folder) -> None:
    """The new file stays, although the entry of the old one would have been the first to go."""
    folder.index.limit = 250
    assert folder.add(128) and folder.add(256, 128)
    folder.index.remove(folder.index.chains("model", ALL, prefix_key(TOKENS[:128]))[0].blocks[0])
    assert folder.find() == []
    assert folder.add(900) and folder.add(256, nbytes=150)
    assert folder.files == {"256-0-8", "900-0-8"} and folder.find() == [900, 256]


def test_a_full_disk_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program that starts while no byte is free finds what is there, and adds nothing."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        before = Folder(disk / "prefixes")
        assert before.add(128) and before.add(256, 128)
        before.index.close()
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        full = Folder(disk / "prefixes")
        assert full.find() == [256, 128]
        with pytest.raises(sqlite3.Error):
            full.add(300, 256)
        assert full.find() == [256, 128]
        full.index.close()


def test_a_block_that_another_process_dropped_is_no_damage(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """It is a miss without a warning. Other bytes are one."""
    assert folder.add(128)
    block = folder.index.chains("model", ALL, prefix_key(TOKENS[:128]))[0].blocks[0]
    for gone in (False, True):
        (folder.path / block.file).touch()
        if gone:
            (folder.path / block.file).unlink()
        caplog.clear()
        with pytest.raises(OSError, match=r"gone|other bytes"), folder.index.removing(block):
            raise FileNotFoundError("gone") if gone else ProtocolError("other bytes")
        assert bool(caplog.records) != gone


def test_a_block_without_its_beginning_is_refused(folder: Folder) -> None:
    """A block that continues a dropped one, or that exceeds the whole folder, is removed."""
    assert not folder.add(256, 128)
    assert not folder.add(256, nbytes=2 * 10**6)
    assert folder.files == set() and folder.find() == []


def test_a_block_is_not_found_once_its_beginning_is_gone(folder: Folder) -> None:
    """A damaged beginning takes the blocks that continue it, for its own layers only."""
    for layers in (Span(0, 3), Span(3, 8)):
        assert folder.add(128, layers=layers) and folder.add(256, 128, layers)
    first = folder.index.chains("model", Span(0, 3), prefix_key(TOKENS[:128]))[0].blocks[0]
    folder.index.remove(first)
    assert folder.find() == folder.find(Span(2, 4)) == []
    assert folder.find(Span(3, 8)) == [256, 128]


def test_two_processes_share_a_folder(folder: Folder) -> None:
    """Each finds what the other has written, and a damaged block is gone for both."""
    other = BlockIndex(folder.path, 10**6)
    assert folder.add(128)
    assert lengths(other) == [128]
    other.remove(other.chains("model", ALL, prefix_key(TOKENS[:128]))[0].blocks[0])
    assert folder.find() == []


def test_a_newer_folder_is_not_used(folder: Folder) -> None:
    """The error has both versions."""
    database = sqlite3.connect(folder.path / "index.sqlite")
    database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    with pytest.raises(OSError, match=f"of version {VERSION + 1}, and this program knows {VERSION}"):
        BlockIndex(folder.path, 10**6)


def test_what_a_killed_process_left_is_removed(folder: Folder) -> None:
    """An old file without an entry goes, and so does an entry without a file. A new file may belong to a writer."""
    assert folder.add(128) and folder.add(300)
    for name in ("old.part", "new.part", "old.block"):
        (folder.path / name).touch()
    for name in ("old.part", "old.block"):
        os.utime(folder.path / name, (folder.now - 2 * STALE_SECONDS,) * 2)
    os.utime(folder.path / "new.part", (folder.now,) * 2)
    (folder.path / "128-0-8.block").unlink()
    index = BlockIndex(folder.path, 10**6, lambda: folder.now)
    assert lengths(index) == [300]
    assert {path.name for path in folder.path.iterdir() if "old" in path.name} == set()
    assert (folder.path / "new.part").exists()


@pytest.mark.parametrize("fails", ["insert", "commit"])
def test_a_block_that_is_not_added_leaves_no_file(folder: Folder, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """No limit would count the file of a block without an entry."""
    assert folder.add(128)
    inner = folder.index._database

    class Failing:
        def __enter__(self) -> object:
            return inner.__enter__()

        def __exit__(self, *error: Any) -> Any:
            if fails == "commit" and error[0] is None:
                inner.__exit__(OSError, OSError(), None)
                raise sqlite3.OperationalError("database or disk is full")
            return inner.__exit__(*error)

        def execute(self, query: str, *values: Any) -> Any:
            if fails == "insert" and query.startswith("INSERT"):
                raise sqlite3.OperationalError("database or disk is full")
            return inner.execute(query, *values)

        executemany = inner.executemany

    monkeypatch.setattr(folder.index, "_database", Failing())
    with pytest.raises(sqlite3.OperationalError):
        folder.add(256, 128)
    monkeypatch.undo()
    assert folder.files == {"128-0-8"} and folder.find() == [128]


def test_a_killed_process_leaves_nothing_that_no_limit_counts(folder: Folder) -> None:
    """At the next start a file that was renamed and not entered goes, whatever its age, and so does half of one."""
    assert folder.add(128)
    (folder.path / "300-0-8.block").touch()
    dead = subprocess.Popen(["true"])
    dead.wait()
    ours = BlockWriter(folder.path / "ours.block")
    ours.write_pieces([Piece(0, True, b"1234")])
    (folder.path / f"300-0-8-{dead.pid}-0.part").touch()
    earlier = folder.path / f"300-0-8-{os.getpid()}-9.part"  # of an earlier process with the same number
    earlier.touch()
    os.utime(earlier, (time.time() - 3000,) * 2)
    index = BlockIndex(folder.path, 10**6)
    assert lengths(index) == [128] and folder.files == {"128-0-8"}
    assert len([*folder.path.glob("*.part")]) == 1
    ours.close()


def test_a_smaller_limit_acts_at_the_start(folder: Folder) -> None:
    """Blocks above the limit are removed, the least recently used first."""
    assert folder.add(128) and folder.add(900) and folder.add(800)
    assert lengths(BlockIndex(folder.path, 250)) == [900, 800]
    assert folder.files == {"900-0-8", "800-0-8"}


@pytest.mark.parametrize("fault", ["an earlier version", "no database", "cut off"])
def test_an_index_that_cannot_be_read_begins_anew(folder: Folder, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    """Its blocks are dropped with a line in the log, and no file is left that no limit counts."""
    assert folder.add(128) and folder.add(256, 128)
    folder.index.close()
    path = folder.path / "index.sqlite"
    if fault == "an earlier version":
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA user_version = 2")
        (folder.path / f"128-0-8{FORMER_SUFFIX}").touch()
    else:
        data = path.read_bytes()
        path.write_bytes(b"?" * 5000 if fault == "no database" else data[: len(data) // 2])
    anew = Folder(folder.path)
    assert "prefixes on disk dropped" in caplog.text
    assert anew.files == set() and anew.find() == [] and not [*folder.path.glob(f"*{FORMER_SUFFIX}")]
    assert anew.add(128) and anew.find() == [128]


def filled_index(path: Path, count: int) -> BlockIndex:
    """Return an index with `count` blocks of prompts that share their first 200 tokens with TOKENS."""
    index, layers = BlockIndex(path, 10**12), Span(0, 8)
    start = Block("model", prefix_key(TOKENS[:200]), layers, 0, 200, b"", "start")
    rows = [(start.key, 0, 200, b"", "start")]
    for number in range(count - 1):
        tokens = (*TOKENS[:200], *[5] * (number % 700), number)
        rows.append((prefix_key(tokens), 200, len(tokens), start.key, str(number)))
    with index._database as database:
        database.execute("BEGIN")
        database.executemany("INSERT INTO blocks VALUES ('model', ?, 0, 8, ?, ?, ?, 100, 0, ?)", rows)
    return index


def operations(index: BlockIndex) -> dict[str, Callable[[], object]]:
    """Return one more of each operation."""
    long = tuple(range(130_000))
    key, layers = prefix_key(TOKENS[:200]), Span(0, 8)
    chain = index.chains("model", layers, key)[0].blocks
    new = Block("model", prefix_key(long), layers, 200, len(long), key, "new")
    (index.folder / "new").touch()

    def add_to_full() -> None:
        with index._lock:
            index.limit = int(index._database.execute("SELECT TOTAL(bytes) FROM sums").fetchone()[0])
        assert index.add_block(replace(new, file="other"), 100)

    return {
        "find": lambda: index.held("model", long),
        "chains": lambda: index.chains("model", layers, key),
        "touch": lambda: index.touch(chain),
        "add": lambda: index.add_block(new, 100),
        "remove": lambda: index.remove(new),
        "add to a full one": add_to_full,
        "layers": lambda: index.layer_bytes("mod"),
    }


def test_no_operation_reads_every_block(tmp_path: Path) -> None:
    """With 100,000 blocks each takes at most twice the processor time that it takes with 100."""

    def seconds(index: BlockIndex) -> dict[str, float]:
        found = {}
        for name, run in operations(index).items():
            times = []
            for _ in range(5):
                began = time.process_time()
                run()
                times.append(time.process_time() - began)
            found[name] = min(times)
        return found

    few, many = (filled_index(tmp_path / str(count), count) for count in (100, 100_000))
    for _ in range(2):  # once more if other load disturbed it
        before, after = seconds(few), seconds(many)
        slower = {name: (n, before[name]) for name, n in after.items() if n > 2 * before[name] + 2e-4}
        if not slower:
            break
    assert slower == {}
    assert few.held("model", (*TOKENS[:200], 5)) == {200: set(range(8))}


def test_the_layers_of_a_model_are_summed(folder: Folder) -> None:
    """A plan asks for those of one checkpoint, whatever its arithmetic. Blocks that go no longer count."""
    for number, (model, layers) in enumerate([("a", ALL), ("a", ALL), ("a", Span(0, 3)), ("b", ALL)]):
        name = f"{number}.block"
        (folder.path / name).touch()
        block = Block(namespace_of(model, number), prefix_key(TOKENS[:200]), layers, 0, 200, b"", name)
        assert folder.index.add_block(block, 100) and folder.index.add_block(block, 100)
    assert layer_bytes(folder.index, "a") == [(Span(0, 3), 100), (ALL, 200)]
    folder.index.remove(block)
    assert layer_bytes(folder.index, "b") == []
    assert layer_bytes(BlockIndex(folder.path, 10**6), "a") == [(Span(0, 3), 100), (ALL, 200)]
