"""The limits of a host take effect on its processes, and its repair ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.host import (
    Host,
    hosts,
    why_no_limits,
    why_no_memory_group,
    why_no_small_disk,
)

PROGRAM = """
import resource, sys, time
from tests.support.processes.moved_clock import follow_moved_clock, right_time
follow_moved_clock()
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except (OSError, MemoryError) as error:
        print(type(error).__name__, flush=True)
"""


class Victim:
    """A Python process on a host that evaluates lines."""

    def __init__(self, host: Host) -> None:
        command = [*host.place.prefix, sys.executable, "-c", PROGRAM]
        env = {**os.environ, **host.place.env}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def evaluate(self, line: str) -> str:
        """Return the value of an expression in the process, or nothing if it has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with hosts(tmp_path, 1) as (made,):
        yield made


@pytest.fixture
def victim(host: Host) -> Iterator[Victim]:
    victim = Victim(host)
    yield victim
    victim.process.kill()
    victim.process.communicate()


def test_the_wall_clock_moves_and_returns(host: Host, victim: Victim) -> None:
    """Both wall clocks of the process follow the host, and records of logs keep the right time."""
    host.move_clock(-3600)
    assert -3601 < float(victim.evaluate("time.time() - right_time()")) < -3599
    assert -3601 < float(victim.evaluate("time.time_ns() / 1e9 - right_time()")) < -3599
    log = "__import__('logging').makeLogRecord({}).created - right_time()"
    assert abs(float(victim.evaluate(log))) < 5
    host.repair(victim.process.pid)
    assert abs(float(victim.evaluate("time.time() - right_time()"))) < 5


def test_a_full_disk_takes_no_byte(host: Host) -> None:
    """A full disk refuses one more byte, and the repair empties it."""
    if reason := why_no_small_disk():
        pytest.skip(reason)
    host.fill_disk()
    with pytest.raises(OSError, match="No space left"):
        (host.disk / "more").write_bytes(b"x")
    host.repair(None)
    (host.disk / "more").write_bytes(b"x")


def test_descriptors_and_address_space_are_limited(host: Host, victim: Victim) -> None:
    """A process gets no descriptors beyond its limit, and no large allocation until the repair."""
    if reason := why_no_limits():
        pytest.skip(reason)
    assert victim.evaluate("len(list(map(open, ['/dev/null'] * 300)))") == "OSError"
    host.limit_address_space(victim.process.pid)
    assert victim.evaluate("len(bytes(10**8))") == "MemoryError"
    host.repair(victim.process.pid)
    assert victim.evaluate("len(bytes(10**8))") == str(10**8)


def test_memory_pressure_ends_a_process_that_grows(host: Host, victim: Victim) -> None:
    """The kernel ends a process that allocates more than its memory group allows."""
    if reason := why_no_memory_group():
        pytest.skip(reason)
    assert victim.evaluate("1 + 1") == "2"
    host.limit_memory()
    assert victim.evaluate("2 + 2") == "4"
    assert victim.evaluate("len(bytes(1) * 10**8)") == ""
