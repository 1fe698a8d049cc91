"""Models of real size on real hardware: this project beside stock mlx-lm, on one or two machines' worth of GPUs.

    python -m tests.bench.real_size --shape 27B

It writes a checkpoint of the shape (`tests.bench.dialled_model`) and asks each program the same way: first token of a
long prompt, one stream, eight streams, sixteen. Stock mlx-lm runs first, if it has the model, in a process of its own.
On machines with two NVIDIA GPUs there are also two workers with a GPU each, as a pipeline and with `--parallel tensor`
as a group. The programs of one `--mtp` run at the same time and take turns.

`--lengths` adds prompts of other lengths, and `--edits` answers that repeat their prompt with changes, with and without
n-grams. `--serve kv-bits=8` gives an option to `mtp-coord serve`. The bound of a step is its weights' bytes over the
measured bandwidth. `--root` runs another checkout of this project.
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
from tests.bench.machine import about, parser_of, publish

LONG, SHORT = 2048, 16
"""Tokens of a prompt."""

STREAMS = (8, 16)

EDITED, CHANGES = 800, 5
"""Tokens of the prompt and the answer of an edit, and the tokens of the prompt that differ from the answer."""

START_SECONDS = 400.0
"""Seconds. Longest wait until a program serves. Kernels that are not on disk yet take minutes to compile."""

STOCK = "stock mlx-lm"

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setup:
    """One row of the table: a coordinator with these flags, and workers with a GPU each, or none."""

    name: str
    flags: tuple[str, ...]
    workers: int = 0

    @property
    def folder(self) -> str:
        """The name of the coordinator's state folder. Those of the workers have a number after it."""
        return re.sub(r"\W+", "-", self.name)


# ---- programs


@dataclass(frozen=True)
class Program:
    """A running program and the file of its log."""

    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def program(folder: Path, name: str, root: Path, gpu: int | None, module: str, *arguments: str) -> Iterator[Program]:
    """Run `main` of `module` in the checkout at `root`.

    It starts there: Python looks in the directory of a program given with -c before it looks in PYTHONPATH.
    """
    log = folder / f"{name}.log"
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(root), *(path for path in others if path not in ("", str(ROOT)))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
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


@contextmanager
def started(
    folder: Path,
    root: Path,
    model: Path,
    setup: Setup,
    port: int,
    cards: Sequence[int],
    worker_flags: Sequence[str] = (),
) -> Iterator[Program]:
    """Run what `setup` names, with its HTTP port at `port`. Yield the coordinator, which may not serve yet.

    Each worker has one of the GPUs `cards`. One process has the first one. State lies in `folder`.
    """
    with ExitStack() as stack:
        flags = ["--nodes", str(setup.workers)] if setup.workers else ["--single-node"]
        name = setup.folder
        for index in range(setup.workers):
            own, at = f"{name}-{index}", f"127.0.0.1:{port + 1 + index}"
            worker = ["--listen", at, "--model", str(model), "--name", own, "--no-mdns"]
            worker += ["--state-dir", str(folder / own), *worker_flags]
            card = cards[index % len(cards)] if cards else None
            stack.enter_context(program(folder, own, root, card, "worker.cli", *worker))
            flags += ["--worker", at]
        command = ["serve", str(model), "--port", str(port), "--no-mdns", *flags, *setup.flags]
        command += ["--state-dir", str(folder / name)]
        card = cards[0] if cards and not setup.workers else None
        yield stack.enter_context(program(folder, name, root, card, "coordinator.cli", *command))


def url_of(port: int) -> str:
    """Return the URL of the coordinator at `port` of this machine."""
    return f"http://127.0.0.1:{port}"


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


async def answer(client: httpx.AsyncClient, url: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
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


class Asker:
    """Asks one server for what the table has."""

    def __init__(self, url: str, cycle: Sequence[int], seed: int) -> None:
        self.url = url
        self.cycle = cycle
        self.drawn = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        """Return random words."""
        return self.drawn.choices(self.cycle, k=tokens)

    async def together(self, count: int, tokens: int) -> float:
        """Return the tokens a second of `count` answers at once."""
        async with httpx.AsyncClient(timeout=600.0) as client:
            asked = (answer(client, self.url, self.prompt(SHORT), tokens) for _ in range(count))
            many = await asyncio.gather(*asked)
        total = sum(a["usage"]["completion_tokens"] for a in many)
        return float(total / (max(a["last"] for a in many) - min(a["asked"] for a in many)))

    async def alone(self, prompt: Sequence[int], tokens: int) -> tuple[float, float, int]:
        """Return the seconds to the first token, the tokens a second after it, and the prompt's cached tokens."""
        async with httpx.AsyncClient(timeout=600.0) as client:
            found = await answer(client, self.url, prompt, tokens)
        after, span = found["usage"]["completion_tokens"] - 1, found["last"] - found["first"]
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["first"] - found["asked"], after / span if span else 0.0, cached

    async def warm(self) -> None:
        """Ask once for all shapes, so that kernels are compiled and costs are known."""
        await self.alone(self.prompt(LONG), 4)
        await self.alone(self.prompt(SHORT), 64)
        for count in STREAMS:
            await self.together(count, 24)

    async def round(self, tokens: int) -> dict[str, float]:
        """Return the figures of one round, with answers of `tokens` tokens and of half as many for several."""
        found = {f"first token of {LONG}, s": (await self.alone(self.prompt(LONG), 4))[0]}
        found["one stream, tokens/s"] = (await self.alone(self.prompt(SHORT), tokens))[1]
        for count in STREAMS:
            found[f"{count} streams, tokens/s"] = await self.together(count, tokens // 2)
        return found

    async def edit(self) -> float:
        """Return the tokens a second of an answer that repeats its prompt, of which CHANGES words differ."""
        start = self.drawn.randrange(len(self.cycle))
        walk = [self.cycle[(start + i) % len(self.cycle)] for i in range(EDITED)]
        for place in self.drawn.sample(range(EDITED), CHANGES):
            walk[place] = self.drawn.choice(self.cycle)
        return (await self.alone([*walk, self.cycle[start - 1]], EDITED))[1]

    async def by_length(self, lengths: Sequence[int]) -> dict[str, float]:
        """Return the first token and the speed after prompts of these lengths."""
        found: dict[str, float] = {}
        for length in lengths:
            first, speed, _ = await self.alone(self.prompt(length), 100)
            found |= {f"first token of {length}, s": first, f"after {length}, tokens/s": speed}
        return found


def in_turn(askers: dict[str, Asker], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the medians of each server's rounds, which take turns."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in askers}
    for asker in askers.values():
        asyncio.run(asker.warm())
    for _ in range(options.rounds):
        for name, asker in askers.items():
            rounds[name].append(asyncio.run(asker.round(options.tokens)))
    found = {
        name: {column: statistics.median(row[column] for row in rows) for column in rows[0]}
        for name, rows in rounds.items()
    }
    for name, asker in askers.items():
        found[name] |= asyncio.run(asker.by_length(options.lengths))
        if options.edits:
            found[name]["edit, tokens/s"] = asyncio.run(asker.edit())
    for name, row in found.items():
        print(f"{name}: {row}; rounds {rounds[name]}", flush=True)
    return found


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
def many(count, tokens):
    started = time.perf_counter()
    batch_generate(model, tokenizer, [prompt(16) for _ in range(count)], max_tokens=tokens)
    return count * tokens / (time.perf_counter() - started)
run(16, 32); run(2048, 2); many(8, 16); many(16, 16)
median = lambda values: statistics.median(list(values))
print(json.dumps({
    "first token of 2048, s": median(run(2048, 2)[0] for _ in range(rounds)),
    "one stream, tokens/s": median(run(16, 200)[1] for _ in range(rounds)),
    "8 streams, tokens/s": median(many(8, 100) for _ in range(rounds)),
    "16 streams, tokens/s": median(many(16, 100) for _ in range(rounds)),
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
    """Return the bytes that a token reads: all weights but the embedding, the head, and experts that are not chosen."""
    text = json.loads((model / "config.json").read_text())["text_config"]
    count = text.get("num_experts") or text.get("n_routed_experts")
    chosen = text["num_experts_per_tok"] / count if count else 1.0
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    total = 0.0
    for file in sorted(set(index.values())):
        weights = mx.load(str(model / file))
        assert isinstance(weights, dict)
        total += sum(
            value.nbytes * (chosen if "switch_mlp" in name else 1)
            for name, value in weights.items()
            if not re.search(r"embed|\bmtp\.", name)
        )
    return round(total)


# ---- the table


def table(found: dict[str, dict[str, float]]) -> str:
    """Return the figures, each with how many times as good as the first row's it is."""
    first = next(iter(found))
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for name, row in found.items():
        cells = []
        for column in columns:
            value, base = row.get(column), found[first].get(column)
            if not value:
                cells.append("-")
                continue
            ratio = value / base if base else 0.0
            better = 1 / ratio if ratio and column.endswith(", s") else ratio
            cells.append(f"{value:.3g}" + (f" ({better:.2f} x)" if base and name != first else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpus() -> list[int]:
    """Return the numbers of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, none on other backends."""
    if mx.default_device() == mx.Device(mx.cpu) or mx.metal.is_available():
        return []
    if allowed := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [int(number) for number in allowed.split(",")]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return list(range(listed.stdout.count("GPU ")))


def setups(mode: str, gpu_count: int, options: argparse.Namespace) -> list[Setup]:
    """Return the rows of `--mtp mode` that these GPUs allow. A pipeline of one stage cannot be filled."""
    given = [word for option in options.serve for word in f"--{option}".split("=")]
    flags, mtp = ("--mtp", mode, *given), f"--mtp {mode}"
    alone = [Setup(f"one process, {mtp}", flags)] if mode != "filled" else []
    if alone and options.exact:
        alone.append(Setup(f"one process, {mtp} --exact", (*flags, "--exact")))
    if alone and options.edits:
        alone.append(Setup(f"one process, {mtp} --ngram off", (*flags, "--ngram", "off")))
    if gpu_count < 2 and not options.two:
        return alone
    found = [*alone, Setup(f"2 workers, {mtp}", flags, 2)]
    if mode != "filled" and options.parallel == "tensor":
        found.append(Setup(f"a group of 2, {mtp}", (*flags, "--parallel", "tensor"), 2))
    return found


def measure_mode(mode: str, folder: Path, model: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Start all programs of one `--mtp` and return their figures. One that fails to start is left out."""
    cycle, cards = json.loads((model / "words.json").read_text()), gpus()
    root = options.root.resolve()
    found: dict[str, Asker] = {}
    with ExitStack() as stack:
        servers = {}
        for number, setup in enumerate(setups(mode, len(cards), options)):
            port = options.port + 10 * number
            server = stack.enter_context(started(folder, root, model, setup, port, cards))
            servers[setup.name] = (url_of(port), server)
        for name, (url, server) in servers.items():
            try:
                wait_until_serving(url, server)
                found[name] = Asker(url, cycle, len(found))
            except AssertionError as error:  # the other rows still count
                print(f"{name}: failed: {error}", flush=True)
        return in_turn(found, options)


def main() -> None:
    """Write the model, measure every setup and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="27B")
    parser.add_argument("--noise", type=float, default=NOISE, help="of the head; 17: .82 right")
    parser.add_argument("--modes", nargs="+", default=["off", "1", "3", "filled", "auto"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="keep the checkpoint here, or use it")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--bits", type=int, default=BITS, choices=[4, 8, FULL_BITS])
    parser.add_argument("--exact", action="store_true", help="measure one process with --exact too")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="of further prompts")
    parser.add_argument("--edits", action="store_true", help="answers that repeat their prompt")
    parser.add_argument("--serve", nargs="+", default=[], help="options, such as kv-bits=8")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer to one stream")
    parser.add_argument("--parallel", choices=["pipeline", "tensor"], default="pipeline")
    parser.add_argument("--two", action="store_true", help="two workers without two GPUs")
    parser.add_argument("--port", type=int, default=18400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = (options.model or folder / options.shape).resolve()
        if not (model / "words.json").exists():
            shape = SHAPES[options.shape]
            cycle = write_dialled_model(model, shape, options.noise, bits=options.bits)
            (model / "words.json").write_text(json.dumps(cycle))
        speed, read = bandwidth(), weight_bytes(model)
        print(f"{about()}\n{options}", flush=True)
        print(f"GPUs {gpus()}; {speed / 1e12:.2f} TB/s; {read / 1e9:.2f} GB a token", flush=True)
        print(f"bound of one stream without drafts: {speed / read:.0f} tokens/s\n", flush=True)
        mx.clear_cache()
        found: dict[str, dict[str, float]] = {}
        if not options.no_stock and SHAPES[options.shape].is_in_mlx_lm:
            cycle = json.loads((model / "words.json").read_text())
            found[STOCK] = measure_stock(model, cycle, options.rounds)
            print(f"{STOCK}: {found[STOCK]}", flush=True)
        for mode in options.modes:
            found |= measure_mode(mode, folder, model, options)
        print(f"\n{table(found)}", flush=True)
    publish("real_size", {"options": {k: str(v) for k, v in vars(options).items()}, "rows": found})


if __name__ == "__main__":
    main()
