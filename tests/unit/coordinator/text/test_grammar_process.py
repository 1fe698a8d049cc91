"""The bounds of the process that compiles formats: time, memory, other clients, and its life."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import psutil
import pytest

from coordinator.text import grammars, side_process
from coordinator.text.grammars import GrammarProcess, OutputFormat
from proto.errors import CapacityError, NotReadyError, RequestError
from tests.unit.mtp.test_grammar import vocabulary

PATIENCE = 20.0
"""Seconds. Longest wait for a process to end."""


SHORT_WAIT = 0.5


@pytest.fixture
def compiler() -> Any:
    compiler = GrammarProcess(vocabulary())
    yield compiler
    compiler.close()


def schema(content: Any, param: str = "response_format") -> list[OutputFormat]:
    """Return the job of one schema."""
    return [OutputFormat("json_schema", content, param)]


def optional(count: int, prefix: str = "p") -> Any:
    """Return a valid schema whose preparation takes quadratic time."""
    names = [f"{prefix}{number}" for number in range(count)]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "additionalProperties": False,
    }


SMALL = schema({"type": "object", "properties": {"a": {"type": "integer"}}})
SLOW = schema(optional(8000))
PATTERNS = {"allOf": [{"type": "string", "pattern": f"a.*b{number}"} for number in range(30)]}


def pid_of(compiler: GrammarProcess) -> int:
    """Return the number of the process, which must run."""
    assert compiler.process is not None
    return compiler.process.pid


async def ended(pid: int) -> bool:
    """Wait until a process has ended."""
    for _ in range(int(PATIENCE / 0.05)):
        if not psutil.pid_exists(pid):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_slow_format_is_refused_within_its_time(compiler: GrammarProcess) -> None:
    """The refusal names the field and the limit. The next format is compiled, and the refusal is kept."""
    assert await compiler.compile(SMALL)
    first = pid_of(compiler)
    started = time.monotonic()
    with pytest.raises(RequestError, match="takes more than 2 s") as refused:
        await compiler.compile(SLOW)
    assert time.monotonic() - started < 4
    assert refused.value.param == "response_format"
    assert await ended(first)
    assert await compiler.compile(schema({"type": "string"}))
    second = pid_of(compiler)
    started = time.monotonic()
    with pytest.raises(RequestError, match="takes more than 2 s"):
        await compiler.compile(SLOW)
    assert time.monotonic() - started < 2, "it was compiled again"
    assert pid_of(compiler) == second


async def test_a_format_may_not_take_more_memory(compiler: GrammarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that grows beyond the bound ends with its process."""
    monkeypatch.setattr(grammars, "MAX_GROWTH", 2**20)
    with pytest.raises(RequestError, match="takes more than 1 MiB"):
        await compiler.compile(schema(optional(4000)))


async def test_a_format_that_overflows_the_stack_is_refused(compiler: GrammarProcess) -> None:
    """It ends the process, but neither the server nor the next format, and the refusal is kept."""
    chain = {f"d{n}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(2000)}
    deep = schema({"$defs": {**chain, "d2000": {"type": "null"}}, "$ref": "#/$defs/d0"})
    pids = []
    for _ in "12":
        with pytest.raises(RequestError, match=r"takes more than the stack\. Send a smaller format"):
            await compiler.compile(deep)
        assert await compiler.compile(SMALL)
        pids.append(pid_of(compiler))
    assert pids[0] == pids[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (PATTERNS, "cannot be compiled|takes more than"),
        (optional(1000), "max is 2000"),
        (optional(1600), "to prepare, and the limit is 0.2 s|a token takes|max is 2000"),
    ],
)
async def test_a_format_that_would_stop_other_streams_is_refused(
    compiler: GrammarProcess, content: Any, words: str
) -> None:
    """A trial of the preparation and of the masks finds it. The reason says which limit."""
    with pytest.raises(RequestError, match=words):
        await compiler.compile(schema(content))


@pytest.mark.slow
async def test_forty_slow_formats_leave_the_loop_and_each_other_alone(
    compiler: GrammarProcess,
) -> None:
    """All are answered within five seconds, and the event loop never waits."""
    assert await compiler.compile(SMALL)
    gap, running = 0.0, True

    async def watch() -> None:
        nonlocal gap
        while running:
            started = time.monotonic()
            await asyncio.sleep(0.01)
            gap = max(gap, time.monotonic() - started)

    watching = asyncio.create_task(watch())
    jobs = [schema(optional(7000, f"q{number}_")) for number in range(40)]
    started = time.monotonic()
    tasks = []
    for job in jobs:  # requests do not arrive in one step of the loop
        tasks.append(asyncio.create_task(compiler.compile(job)))
        await asyncio.sleep(0)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.monotonic() - started
    running = False
    await watching
    kinds = {type(answer) for answer in answers}
    assert kinds <= {RequestError, CapacityError}, answers
    assert seconds < 15  # five on an idle machine
    assert gap < 2  # one of these formats would stop it for ten


async def test_nobody_is_refused_for_the_start_of_the_process(
    compiler: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large vocabulary takes longer to read than a request waits for others. The first requests wait for it."""
    ask, starts = side_process._ask, list[float]()

    def slow(process: Any, data: bytes) -> bytes:
        if not starts:
            starts.append(1.0)
            time.sleep(2 * SHORT_WAIT)
        return ask(process, data)

    monkeypatch.setattr(grammars, "WAIT_SECONDS", SHORT_WAIT)
    monkeypatch.setattr(side_process, "_ask", slow)
    formats = [schema({"type": "string", "maxLength": n}) for n in (3, 4, 5)]
    found = await asyncio.gather(*(compiler.compile(one) for one in formats))
    assert all(found)
    assert starts == [1.0]


async def test_a_job_ends_with_its_client(compiler: GrammarProcess) -> None:
    """A cancelled job ends its process at once, and the next one starts another."""
    assert await compiler.compile(SMALL)
    first = pid_of(compiler)
    job = asyncio.create_task(compiler.compile(SLOW))
    await asyncio.sleep(0.3)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    assert await ended(first)
    assert await compiler.compile(schema({"type": "boolean"}))


async def test_a_process_that_was_killed_refuses_no_format(compiler: GrammarProcess) -> None:
    """The client may send its request again, and another process compiles the same format."""
    assert await compiler.compile(SMALL)
    psutil.Process(pid_of(compiler)).kill()
    again = schema({"type": "array", "items": {"type": "integer"}})
    with pytest.raises(NotReadyError, match="Try again"):
        await compiler.compile(again)
    assert await compiler.compile(again)


async def test_the_process_ends_with_its_owner() -> None:
    """A compiler that is forgotten leaves no process."""
    compiler = GrammarProcess(vocabulary())
    assert await compiler.compile(SMALL)
    pid = pid_of(compiler)
    del compiler
    gc.collect()
    assert await ended(pid)


async def test_the_cause_of_a_refused_call_is_named(compiler: GrammarProcess) -> None:
    """The error of a refused grammar of several tools names the tool's schema."""
    bad = OutputFormat("json_schema", {"type": "nothing"}, "tools[1].function.parameters")
    good = OutputFormat("json_schema", {"type": "object"}, "tools[0].function.parameters")
    with pytest.raises(RequestError) as refused:
        await compiler.compile([OutputFormat("lark", "start: broken", "tools"), good, bad])
    assert refused.value.param == "tools[1].function.parameters"
