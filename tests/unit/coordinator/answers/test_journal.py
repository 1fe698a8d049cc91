"""The journal: what it keeps, what it deletes, and what happens when the disk refuses."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.answers.journal import KEPT_SECONDS, Journal, Record

SECRET = "a prompt that nobody else may read"


def record(answer_id: str, *, created: int | None = None, text: str = SECRET) -> Record:
    """Return an answer in progress."""
    return Record(
        id=answer_id,
        owner="me",
        model="f",
        created=int(time.time()) if created is None else created,
        body=text,
        request={"prompt": [1, 2], "params": {"seed": 2**64 - 1, "logit_bias": {3: 0.5}}},
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal" / "answers.db"


@pytest.fixture
async def journal(file: Path) -> AsyncIterator[Journal]:
    journal = Journal(file)
    yield journal
    await journal.close()


def bytes_on_disk(file: Path) -> bytes:
    """Return the content of the database and of the files beside it."""
    return b"".join(one.read_bytes() for one in sorted(file.parent.iterdir()))


async def test_records_and_tokens_outlive_the_process(journal: Journal, file: Path) -> None:
    """A second journal over the same file has the record with all tokens; only the owner reads the files."""
    journal.save_answer(record("a"))
    journal.append_tokens("a", 0, (5, 6))
    journal.append_tokens("a", 2, (2**32 - 1,))
    schema = {"maximum": 10**40, "minimum": -(2**63) - 1, "half": "\ud800"}
    journal.save_answer(replace(record("b"), ended=True, result=schema, events=[b"1", b"2"]))
    await journal.close()
    modes = {stat.S_IMODE(one.stat().st_mode) for one in file.parent.iterdir()}
    assert modes == {0o600}
    again = Journal(file)
    (found,) = await again.unfinished()
    assert found == replace(record("a", created=found.created), tokens=(5, 6, 2**32 - 1))
    ended = await again.find("b")
    assert ended is not None
    assert (ended.result, ended.events, ended.tokens) == (schema, [b"1", b"2"], ())
    await again.close()


async def test_a_deleted_answer_leaves_no_byte(journal: Journal, file: Path) -> None:
    """The owner and the tokens of a deleted answer are neither in the database nor in its log."""
    owner = "an-owner-that-zlib-cannot-shrink-0123456789"
    journal.save_answer(replace(record("gone"), owner=owner))
    journal.append_tokens("gone", 0, (0x41424344,) * 8)
    assert await journal.find("gone") is not None
    assert b"DCBADCBA" in bytes_on_disk(file)
    await journal.delete("gone")
    assert await journal.find("gone") is None
    assert b"DCBADCBA" not in bytes_on_disk(file)
    assert b"gone" not in bytes_on_disk(file)


async def test_retention_by_age_and_size(file: Path) -> None:
    """Old answers are deleted, then the oldest ones above the size; one in progress stays."""
    now = int(time.time())
    journal = Journal(file, most=1000)
    long_ago = now - KEPT_SECONDS - 1
    journal.save_answer(record("in progress", created=long_ago))
    journal.save_answer(replace(record("old", created=long_ago, text=""), ended=True))
    journal.save_answer(replace(record("newer", created=now - 7200, text=""), ended=True))
    assert await journal.find("old") is None
    assert await journal.find("newer") is not None
    for number in range(4):
        content = random.Random(number).randbytes(300).hex()
        journal.save_answer(replace(record(f"n{number}", created=now + number, text=content), ended=True))
    found = [one for one in ("in progress", "n0", "n1", "n2", "n3") if await journal.find(one)]
    await journal.close()
    assert found[0] == "in progress"
    assert "n3" in found
    assert "n0" not in found


async def test_a_full_disk_ends_the_journal_but_not_the_answers(
    journal: Journal, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Later answers are kept in memory, and the log has one warning."""
    journal.save_answer(record("during"))
    assert await journal.find("during") is not None
    await journal._ask(lambda database: database.execute("PRAGMA max_page_count=1"))
    for number in range(3):
        large = random.Random(number).randbytes(20_000).hex()
        journal.save_answer(replace(record(f"after {number}", text=large), ended=True))
        assert await journal.find(f"after {number}") is not None
    journal.append_tokens("during", 0, (1,))
    journal.save_answer(replace(record("during"), ended=True, result={"done": 1}))
    found = await journal.find("during")
    assert found is not None
    assert found.result == {"done": 1}
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.message.partition(":")[0] for r in warnings] == ["journal off"]


def test_an_unusable_file_is_reported(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file, or one of a later release, is left alone."""
    file.parent.mkdir(parents=True)
    for content in (b"no database, just text" * 100, None):
        if content is None:
            file.unlink()
            with sqlite3.connect(file) as connection:
                connection.execute("PRAGMA user_version=99")
        else:
            file.write_bytes(content)
        before = file.read_bytes()
        asyncio.run(save_and_find(Journal(file)))
        assert file.read_bytes() == before
    assert caplog.text.count("journal off") == 2


async def save_and_find(journal: Journal) -> None:
    """Use a journal once."""
    journal.save_answer(record("a"))
    assert await journal.find("a") is not None
    await journal.close()


async def test_a_failed_transaction_changes_nothing(journal: Journal) -> None:
    """An error leaves none of the changes that were committed with it."""

    def fail(database: sqlite3.Connection) -> None:
        raise ZeroDivisionError

    journal.save_answer(record("a"))
    journal.append_tokens("a", 0, (1,))
    with pytest.raises(ZeroDivisionError):
        await journal._ask(fail)
    found = await journal.find("a")
    assert found is not None
    assert found.tokens == ()


async def test_the_total_of_the_stored_answers_is_exact(file: Path) -> None:
    """It follows ends, replacements, deletions, expiry, failed transactions and restarts."""

    async def check(journal: Journal) -> None:
        sums = "SELECT (SELECT coalesce(sum(size), 0) FROM answers WHERE ended), (SELECT bytes FROM total)"
        expected, found = await journal._ask(lambda database: database.execute(sums).fetchone())
        assert found == expected

    def fail(database: sqlite3.Connection) -> None:
        database.execute("DELETE FROM answers")
        raise ZeroDivisionError

    chance, now = random.Random(3), int(time.time())
    journal = Journal(file, most=9000)
    for number in range(120):
        name = f"n{chance.randrange(30)}"
        text = chance.randbytes(chance.randrange(600)).hex()
        created = now - chance.choice((0, 5, KEPT_SECONDS + 1))
        match chance.randrange(6):
            case 0:
                await journal.delete(name)
            case 1 if number % 5 == 0:
                await journal.close()
                journal = Journal(file, most=9000)
            case 2:
                with pytest.raises(ZeroDivisionError):
                    await journal._ask(fail)
            case kind:
                journal.save_answer(replace(record(name, created=created, text=text), ended=kind > 3))
        await check(journal)
    await journal.close()


async def seconds_of_one_more(entries: int) -> float:
    """Return the processor seconds of 60 answers, from start to deletion, over `entries` stored ones."""
    journal = Journal()
    rows = ((f"old {n}", int(time.time()) - n % 1000, 1, 10, b"") for n in range(entries))
    await journal._ask(lambda one: one.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?)", rows))
    best = float("inf")
    for attempt in range(4):
        began = time.process_time()
        for number in range(15):
            name = f"new {attempt} {number}"
            journal.save_answer(record(name))
            journal.append_tokens(name, 0, (1, 2, 3))
            journal.save_answer(replace(record(name), ended=True))
            assert await journal.find(name)
            if number % 2:
                await journal.delete(name)
        best = min(best, time.process_time() - began)
    await journal.close()
    return best


async def test_one_more_answer_costs_the_same_over_many_stored_ones() -> None:
    """Processor time does not grow with what is stored."""
    few, many = await seconds_of_one_more(100), await seconds_of_one_more(100_000)
    assert many <= 2 * few + 0.005
