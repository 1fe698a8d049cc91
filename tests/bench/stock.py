"""Stock mlx-lm's own servers: one process, and a pipeline over two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

START_SECONDS = 120.0
STOP_SECONDS = 10.0

MODEL = "default_model"
"""Model name in requests to the model of the command line. mlx-lm looks up any other name on the hub."""

_START = (sys.executable, "-m", "mlx_lm", "server")


@dataclass
class Stock:
    """A server with all its processes, stopped between measurements because its pipeline busy-waits when idle."""

    url: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @contextmanager
    def awake(self) -> Iterator[str]:
        """Resume its processes and give its URL. Stop them again afterwards."""
        family = self._family()
        for process in family:
            process.resume()
        try:
            yield self.url
        finally:
            for process in family:
                process.suspend()

    def end(self) -> None:
        """Kill all its processes."""
        family = self._family()
        for process in family:
            process.kill()
        psutil.wait_procs(family, STOP_SECONDS)
        for popen in self.started:
            popen.wait(STOP_SECONDS)

    def _family(self) -> list[psutil.Process]:
        """Return the started process and its children. mlx.launch leaves its ranks behind when it is killed."""
        own = [psutil.Process(popen.pid) for popen in self.started if popen.poll() is None]
        return [*own, *(child for process in own for child in process.children(recursive=True))]


@contextmanager
def one_process(folder: Path, model: Path, port: int, core: int) -> Iterator[Stock]:
    """Run `python -m mlx_lm server`, pinned to a core."""
    command = [*_START, *_arguments(model, port)]
    with _serving(port, folder / "stock.log", [(command, [core], {})]) as stock:
        yield stock


@contextmanager
def launched_pipeline(
    folder: Path, model: Path, port: int, cores: Sequence[int]
) -> Iterator[Stock]:
    """Run `mlx.launch -n 2 --backend ring -- python -m mlx_lm server --pipeline`, all of it on these cores."""
    launcher = str(Path(sys.executable).parent / "mlx.launch")
    command = [launcher, "-n", "2", "--backend", "ring", "--starting-port", str(port + 1), "--"]
    command += [*_START, *_arguments(model, port), "--pipeline"]
    with _serving(port, folder / "launched.log", [(command, cores, {})]) as stock:
        yield stock


@contextmanager
def pipeline(folder: Path, model: Path, port: int, cores: Sequence[int]) -> Iterator[Stock]:
    """Run the same two ranks without mlx.launch, which keeps one core busy. Each rank has its own core."""
    hosts = folder / "ring.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port + 1 + rank}"] for rank in range(len(cores))]))
    command = [*_START, *_arguments(model, port), "--pipeline"]
    ranks = [
        (command, [core], {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)})
        for rank, core in enumerate(cores)
    ]
    with _serving(port, folder / "ranks.log", ranks) as stock:
        yield stock


def _arguments(model: Path, port: int) -> list[str]:
    return ["--model", str(model), "--port", str(port), "--log-level", "WARNING"]


@contextmanager
def _serving(
    port: int, log: Path, commands: Sequence[tuple[Sequence[str], Sequence[int], Mapping[str, str]]]
) -> Iterator[Stock]:
    """Start these commands, each on its cores and with its environment. Stop the processes once they serve."""
    stock = Stock(f"http://127.0.0.1:{port}")
    with ExitStack() as stack:
        stack.callback(stock.end)
        output = stack.enter_context(log.open("wb"))
        for command, cores, env in commands:
            popen = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, cores)), *command],
                # Held open, because mlx.launch busy-waits at the end of its input.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **env},
            )
            stock.started.append(popen)
        _wait(stock, log)
        with stock.awake():
            pass
        yield stock


def _wait(stock: Stock, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            httpx.get(f"{stock.url}/health", timeout=1.0)
            return
        except httpx.TransportError:
            said = log.read_text(errors="replace")[-2000:]
            ended = [popen.returncode for popen in stock.started if popen.poll() is not None]
            assert not ended, f"mlx-lm ended with {ended}: {said}"
            assert time.monotonic() < deadline, f"mlx-lm does not serve: {said}"
            time.sleep(0.2)
