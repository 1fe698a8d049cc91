"""Faults of one machine's resources: its wall clock, disk, descriptors and memory.

Every worker, and the coordinator, has a `Host`: the limits and folders that its processes start with.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.processes.moved_clock import CLOCK
from tests.support.processes.team import Place

DISK_BYTES = 4 * 2**20
"""Size of the file system of a host's state and cache directories."""

DESCRIPTORS = 256
"""Limit of descriptors. macOS gives this number to every process by default."""

CONNECTIONS = 300
"""Number of idle connections that exhaust DESCRIPTORS. Processes have that limit from their start."""

SPARE_BYTES = 4 * 2**20
"""Memory that a process under memory pressure may allocate beyond what it has."""

MONOTONIC_STEP = 100_000
"""Seconds. Difference of the monotonic clocks of two hosts, so that no process can use another one's times."""

CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
"""Folders in which a memory group can be made: version 2, and version 1."""

COMMAND_SECONDS = 10.0


class Host:
    """The limits of one process: `folder` for its files, a small file system, and a memory group where permitted."""

    def __init__(self, folder: Path, number: int, stack: ExitStack) -> None:
        self.clock = folder / f"clock-{number}"
        self.disk = folder / f"disk-{number}"
        self.disk.mkdir()
        self.group: Path | None = None
        self._connections: list[socket.socket] = []
        self._prefix = ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh"]
        if why_no_small_disk() is None:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.disk)]
            _run(*mount)
            stack.callback(_run, "umount", "--lazy", str(self.disk))
        for parent in CGROUPS:
            if group := _memory_group(parent / f"mtp-{os.getpid()}-{number}"):
                stack.callback(_remove_group, group)
                self.group = group
                self._prefix += ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
                break
        if number and (clock := _time_namespace(number * MONOTONIC_STEP, stack)):
            self._prefix += clock

    @property
    def place(self) -> Place:
        """The place of a process on this host."""
        env = {
            CLOCK: str(self.clock),
            "MTP_STATE_DIR": str(self.disk / "state"),
            "XDG_CACHE_HOME": str(self.disk / "cache"),
            "TMPDIR": str(self.disk),
        }
        return Place(prefix=tuple(self._prefix), env=env)

    # ---- faults

    def move_clock(self, seconds: float) -> None:
        """Move the wall clock of this host's processes."""
        new = self.clock.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self.clock)

    def fill_disk(self) -> None:
        """Write to the disk until it is full."""
        with (
            contextlib.suppress(OSError),
            (self.disk / "ballast").open("wb", buffering=0) as ballast,
        ):
            for size in (65536, 512, 1):
                with contextlib.suppress(OSError):
                    while ballast.write(bytes(size)):
                        pass

    def exhaust_descriptors(self, address: str) -> int:
        """Open idle connections to a process at `address` until it takes no more. Return their number."""
        host, _, port = address.rpartition(":")
        for _ in range(CONNECTIONS):
            with contextlib.suppress(OSError):
                self._connections.append(socket.create_connection((host, int(port)), 0.1))
        return len(self._connections)

    def limit_memory(self) -> None:
        """Allow this host's processes hardly more memory than they have, and no cache of files."""
        assert self.group is not None
        limit = self._used_memory() + SPARE_BYTES
        for _ in range(20):  # the kernel frees pages of files only in part at each write
            with contextlib.suppress(OSError):
                self._limit_file.write_text(str(limit))
                return
            time.sleep(0.05)

    def limit_address_space(self, pid: int) -> None:
        """Let most further allocations of a process fail."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (used + SPARE_BYTES, hard))

    def repair(self, pid: int | None) -> None:
        """End all faults. `pid` is the process if it still runs."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self.clock.unlink(missing_ok=True)
        (self.disk / "ballast").unlink(missing_ok=True)
        if self.group is not None:
            self._limit_file.write_text("max" if self._limit_file.name == "memory.max" else "-1")
        if pid is not None and why_no_limits() is None:
            _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))

    # ---- memory groups

    @property
    def _limit_file(self) -> Path:
        assert self.group is not None
        new = self.group / "memory.max"
        return new if new.exists() else self.group / "memory.limit_in_bytes"

    def _used_memory(self) -> int:
        """Return the bytes that cannot be freed: anonymous memory, without the cache of files."""
        assert self.group is not None
        words = (self.group / "memory.stat").read_text().split()
        values = dict(zip(words[::2], words[1::2], strict=True))
        return int(values.get("anon") or values["rss"])


def why_no_small_disk() -> str | None:
    """Return why this system permits no small file system, or None if it does."""
    if sys.platform == "linux" and os.geteuid() == 0:
        return None
    return "a file system in memory needs Linux and root"


def why_no_memory_group() -> str | None:
    """Return why this system permits no memory group, or None if it does."""
    for parent in CGROUPS:
        if group := _memory_group(parent / f"mtp-{os.getpid()}-try"):
            _remove_group(group)
            return None
    return "no writable control group limits memory"


def why_no_limits() -> str | None:
    """Return why the limits of other processes cannot be changed, or None if they can."""
    return None if hasattr(resource, "prlimit") else "prlimit needs Linux"


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[Host]]:
    """Yield `count` hosts. All their mounts and groups are removed when the block exits."""
    with ExitStack() as stack:
        yield [Host(folder, number, stack) for number in range(count)]


def _memory_group(group: Path) -> Path | None:
    """Make a memory group. Return None where this is not permitted."""
    try:
        group.mkdir()
    except OSError:
        return None
    if any((group / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
        return group
    with contextlib.suppress(OSError):
        group.rmdir()
    return None


def _remove_group(group: Path) -> None:
    """Remove a memory group whose processes have ended. The kernel may need a moment."""
    for _ in range(50):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return


def _time_namespace(seconds: int, stack: ExitStack) -> list[str]:
    """Return the command that runs another one with a monotonic clock ahead by `seconds`, or [] if that fails."""
    command = ["unshare", "--time", "--monotonic", str(seconds), "--fork", "--kill-child"]
    try:
        holder = subprocess.Popen([*command, "sleep", "infinity"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        return []
    stack.callback(holder.wait, COMMAND_SECONDS)
    stack.callback(holder.send_signal, signal.SIGKILL)
    prefix = ["nsenter", f"--time=/proc/{holder.pid}/ns/time_for_children"]
    script = f"import time; raise SystemExit(time.monotonic() < {seconds})"
    for _ in range(20):
        tried = subprocess.run([*prefix, sys.executable, "-c", script], capture_output=True, timeout=COMMAND_SECONDS)
        if tried.returncode == 0:
            return prefix
        time.sleep(0.1)
    return []


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_SECONDS)
