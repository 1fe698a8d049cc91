"""Models of real size on real hardware: this project beside stock mlx-lm, on one or two machines' worth of GPUs.

    python -m tests.bench.real_size --shape 27B

It writes a checkpoint of the shape (`tests.bench.dialled_model`), starts the programs one after the other and asks
each the same way: first token of a long prompt, one stream, eight streams. Stock mlx-lm runs in a process of its own
in between. On machines with two NVIDIA GPUs it also runs two workers, a GPU each.

The bound of a step is its weights' bytes over the measured bandwidth. `--root` runs another checkout of this project.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx

from tests.bench.dialled_model import BITS, FULL_BITS, NOISE, SHAPES, write_dialled_model
from tests.bench.machine import about
from tests.bench.report import bars, publish

LONG, SHORT = 2048, 16
"""Tokens of a prompt."""

STREAMS = 8

START_SECONDS = 400.0
"""Seconds. Longest wait until a program serves. Kernels that are not on disk yet take minutes to compile."""

STOCK = "stock mlx-lm"

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setup:
    """One row of the table: a coordinator with `--mtp mtp`, and workers with a GPU each, or none."""

    mtp: str
    workers: int = 0
    exact: bool = False

    @property
    def name(self) -> str:
        """The row's name."""
        where = f"{self.workers} workers" if self.workers else "one process"
        return f"{where}, --mtp {self.mtp}{' --exact' if self.exact else ''}"


# ---- programs


@dataclass(frozen=True)
class Program:
    """A running program and the file of its log."""

    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def program(
    folder: Path, name: str, root: Path, gpu: int | None, module: str, *arguments: str
) -> Iterator[Program]:
    """Run `main` of `module` in the checkout at `root`.

    It starts there: Python looks in the directory of a program given with -c before it looks in PYTHONPATH.
    """
    log = folder / f"{name}.log"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *_search_path()])}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    start = f"import sys; sys.modules['torch'] = None; from {module} import main; main()"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", start, *arguments],
            stdout=output,
            stderr=output,
            env=env,
            cwd=root,
        )
        try:
            yield Program(process, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _search_path() -> list[str]:
    """Return PYTHONPATH without this checkout."""
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(ROOT)]


@contextmanager
def serving(
    folder: Path, root: Path, model: Path, setup: Setup, port: int, gpu: int | None
) -> Iterator[str]:
    """Run what `setup` names. Yield its URL."""
    with ExitStack() as stack:
        flags = ["--nodes", str(setup.workers)] if setup.workers else ["--single-node"]
        for index in range(setup.workers):
            name, at = f"{setup.mtp}-worker-{index}", f"127.0.0.1:{port + 1 + index}"
            worker = ["--listen", at, "--model", str(model), "--name", name, "--no-mdns"]
            worker += ["--state-dir", str(folder / name)]
            stack.enter_context(program(folder, name, root, index, "worker.cli", *worker))
            flags += ["--worker", at]
        command = [
            "serve",
            str(model),
            "--mtp",
            setup.mtp,
            "--port",
            str(port),
            "--no-mdns",
            *flags,
            *(["--exact"] if setup.exact else []),
        ]
        name = f"{setup.mtp}-{setup.workers}{'-exact' if setup.exact else ''}"
        server = stack.enter_context(program(folder, name, root, gpu, "coordinator.cli", *command))
        url = f"http://127.0.0.1:{port}"
        wait_until_serving(url, server)
        yield url


def wait_until_serving(url: str, server: Program) -> None:
    """Wait until `server` answers at `url`. Raises AssertionError with the end of its log if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/ready", timeout=2.0).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{url} does not serve: {server.log.read_text()[-3000:]}")
        time.sleep(0.2)


# ---- what is asked


async def answer(
    client: httpx.AsyncClient, url: str, prompt: Sequence[int], tokens: int
) -> dict[str, Any]:
    """Return the times of the request, the first and the last piece of an answer, and its usage."""
    body = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    found: dict[str, Any] = {"asked": time.perf_counter(), "first": 0.0}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status_code == httpx.codes.OK, (await reply.aread())[:500]
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            found |= {"usage": event["usage"]} if event.get("usage") else {}
            if event.get("choices") and event["choices"][0].get("text"):
                found["last"] = time.perf_counter()
                found["first"] = found["first"] or found["last"]
    return found


async def measure(url: str, cycle: Sequence[int], seed: int, rounds: int) -> dict[str, float]:
    """Return medians: seconds to the first token, tokens a second of one stream and of eight."""
    drawn = random.Random(seed)
    firsts, ones, eights = [], [], []
    right = wrong = 0
    async with httpx.AsyncClient(timeout=600.0) as client:

        def prompt(tokens: int) -> list[int]:
            """Return random words."""
            return drawn.choices(cycle, k=tokens)

        for number in range(rounds + 1):
            long = await answer(client, url, prompt(LONG), 4)
            one = await answer(client, url, prompt(SHORT), 200 if number else 32)
            many = await asyncio.gather(
                *(answer(client, url, prompt(SHORT), 100 if number else 16) for _ in range(STREAMS))
            )
            if number == 0:
                continue
            firsts.append(long["first"] - long["asked"])
            tokens = one["usage"]["completion_tokens"]
            ones.append((tokens - 1) / (one["last"] - one["first"]))
            details = one["usage"].get("completion_tokens_details") or {}
            right += details.get("accepted_prediction_tokens", 0)
            wrong += details.get("rejected_prediction_tokens", 0)
            total = sum(a["usage"]["completion_tokens"] for a in many)
            eights.append(total / (max(a["last"] for a in many) - min(a["asked"] for a in many)))
    if right + wrong:
        print(f"{right} of {right + wrong} drafts right", flush=True)
    return {
        "first token, s": statistics.median(firsts),
        "one stream, tokens/s": statistics.median(ones),
        "8 streams, tokens/s": statistics.median(eights),
    }


_STOCK_PROGRAM = """
import json, random, statistics, sys, time
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import batch_generate, generate_step
path, words, rounds = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model, tokenizer = load(path)
drawn = random.Random(7)
def prompt(n): return drawn.choices(words, k=n)
def run(n, tokens):
    started, times = time.perf_counter(), []
    for _ in generate_step(mx.array(prompt(n)), model, max_tokens=tokens): times.append(time.perf_counter())
    return times[0] - started, (len(times) - 1) / (times[-1] - times[0]) if tokens > 1 else 0.0
def many(tokens):
    started = time.perf_counter()
    batch_generate(model, tokenizer, [prompt(16) for _ in range(8)], max_tokens=tokens)
    return 8 * tokens / (time.perf_counter() - started)
run(16, 32); run(2048, 2); many(16)
median = lambda values: statistics.median(list(values))
print(json.dumps({
    "first token, s": median(run(2048, 2)[0] for _ in range(rounds)),
    "one stream, tokens/s": median(run(16, 200)[1] for _ in range(rounds)),
    "8 streams, tokens/s": median(many(100) for _ in range(rounds)),
}))
"""


def measure_stock(model: Path, cycle: Sequence[int], rounds: int) -> dict[str, float]:
    """Return the same figures of stock mlx-lm in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _STOCK_PROGRAM, str(model), json.dumps(list(cycle)), str(rounds)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the bound


def bandwidth() -> float:
    """Return the bytes a second that this device reads: sums over 4 GB, the best of several."""
    parts = [mx.ones((2**28,), mx.float32) * i for i in range(4)]
    mx.eval(parts)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        mx.eval([part.sum() for part in parts])
        best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - started))
    return best


def weight_bytes(model: Path) -> int:
    """Return the bytes that a token reads, for a dense model: all weights but the embedding and the head."""
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    total = 0
    for file in sorted(set(index.values())):
        weights = mx.load(str(model / file))
        assert isinstance(weights, dict)
        total += sum(
            value.nbytes
            for name, value in weights.items()
            if not re.search(r"embed_tokens|\bmtp\.", name)
        )
    return total


# ---- the table


def table(found: dict[str, dict[str, float]]) -> str:
    """Return the figures, each with how many times as good as stock's it is."""
    columns = list(next(iter(found.values())))
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for name, row in found.items():
        cells = []
        for column in columns:
            ratio = row[column] / found[STOCK][column] if STOCK in found else 1.0
            better = 1 / ratio if column.endswith(", s") else ratio
            shown = "" if name == STOCK or STOCK not in found else f" ({better:.2f} x)"
            cells.append(f"{row[column]:.3g}{shown}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpus() -> int:
    """Return the number of NVIDIA GPUs, 0 on other backends."""
    if mx.default_device() == mx.Device(mx.cpu) or mx.metal.is_available():
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ")


def setups(modes: Sequence[str], gpu_count: int, *, exact: bool) -> list[Setup]:
    """Return the rows that these GPUs allow. With `exact` each row of one process has one with the flag."""
    one = [Setup(mode) for mode in modes if mode != "filled"]
    one += [Setup(setup.mtp, exact=True) for setup in one if exact]
    return one + [Setup(mode, 2) for mode in modes if gpu_count >= 2]


def main() -> None:
    """Write the model, measure every setup and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="27B")
    parser.add_argument("--noise", type=float, default=NOISE, help="of the head; 17: .82 right")
    parser.add_argument("--modes", nargs="+", default=["off", "1", "3", "filled", "auto"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="keep the checkpoint here, or use it")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--bits", type=int, default=BITS, choices=[4, 8, FULL_BITS])
    parser.add_argument("--exact", action="store_true", help="measure one process with --exact too")
    parser.add_argument("--port", type=int, default=18400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = (options.model or folder / options.shape).resolve()
        if not (model / "words.json").exists():
            shape = SHAPES[options.shape]
            cycle = write_dialled_model(model, shape, options.noise, bits=options.bits)
            (model / "words.json").write_text(json.dumps(cycle))
        cycle = json.loads((model / "words.json").read_text())
        count, speed, read = gpus(), bandwidth(), weight_bytes(model)
        print(f"{about()}\n{options}", flush=True)
        print(f"{count} GPUs; {speed / 1e12:.2f} TB/s; {read / 1e9:.2f} GB a token", flush=True)
        print(f"bound of one stream without drafts: {speed / read:.0f} tokens/s\n", flush=True)
        mx.clear_cache()
        found: dict[str, dict[str, float]] = {}
        if not options.no_stock:
            found[STOCK] = measure_stock(model, cycle, options.rounds)
            print(f"{STOCK}: {found[STOCK]}", flush=True)
        for number, setup in enumerate(setups(options.modes, count, exact=options.exact)):
            port = options.port + 10 * number
            gpu = 0 if count and not setup.workers else None
            try:
                with serving(folder, options.root.resolve(), model, setup, port, gpu) as url:
                    row = asyncio.run(measure(url, cycle, number, options.rounds))
            except Exception as error:  # the other rows still count
                print(f"{setup.name}: failed: {error}", flush=True)
                continue
            found[setup.name] = row
            print(f"{setup.name}: {row}", flush=True)
        print(f"\n{table(found)}", flush=True)
    publish(
        "real_size",
        {"options": {k: str(v) for k, v in vars(options).items()}, "rows": found},
        {
            column: bars({name: row[column] for name, row in found.items()}, column)
            for column in next(iter(found.values()))
        },
    )


if __name__ == "__main__":
    main()
