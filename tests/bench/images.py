"""Images on real hardware: the tower's time, the first token, and what other streams notice.

    python -m tests.bench.images --shape 27B

It writes a checkpoint of the shape (`tests.bench.dialled_model`) with a random tower of a real Qwen3.5's size and
serves it from one process. Another client sends new images of four megapixels, next turns with the same image, and
texts of as many tokens, some of them while a stream runs. The gaps are those between two pieces of the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx

from tests.bench.dialled_model import SHAPES, write_dialled_model
from tests.bench.long_context import rounded, serving
from tests.bench.machine import about, parser_of
from tests.bench.report import bars, publish
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer
from tests.support.checkpoints.vision import add_tower, file_of, picture

TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}

PIXELS = (65_536, 16_777_216)

STREAMED = 3000
"""Tokens of the stream beside the image. It is closed when the image's answer has come."""

CYCLE = range(100, 300)


def write_model(path: Path, shape: str) -> None:
    """Write the checkpoint with a tower, whose answers are words of the cycle."""
    write_dialled_model(path, SHAPES[shape], cycle=list(CYCLE))
    write_tokenizer(path, vision=True)
    tensors = {n: v.astype(mx.bfloat16) for n, v in add_tower(path, TOWER, PIXELS).items()}
    mx.save_safetensors(str(path / "tower.safetensors"), tensors, {"format": "mlx"})
    index = path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"] |= dict.fromkeys(tensors, "tower.safetensors")
    index.write_text(json.dumps(found))


def image_of(seed: int, side: int) -> dict[str, Any]:
    """Return a chat request with a random image."""
    data = base64.b64encode(file_of(picture(side, side, seed=seed), "JPEG")).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
    content = [part, {"type": "text", "text": "Hello world, how are you?"}]
    return {"messages": [{"role": "user", "content": content}]}


def turn_after(body: dict[str, Any]) -> dict[str, Any]:
    """Return the next turn of the chat of `body`."""
    words = [("assistant", "How are you?"), ("user", "The capital of France is Paris.")]
    return {"messages": body["messages"] + [{"role": r, "content": t} for r, t in words]}


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Return the seconds until the answer of two tokens, and the tokens of the prompt."""
    way = "chat/completions" if "messages" in body else "completions"
    fields = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    reply = await client.post(f"{url}/v1/{way}", json={**body, **fields})
    assert reply.status_code == httpx.codes.OK, reply.text[:500]
    return time.perf_counter() - started, reply.json()["usage"]["prompt_tokens"]


async def stream(
    client: httpx.AsyncClient, url: str, times: list[float], calm: asyncio.Event
) -> None:
    """Ask for a long answer, and add the time of each of its pieces to `times`. Set `calm` after a hundred."""
    body = {"prompt": list(CYCLE)[:16], "max_tokens": STREAMED, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status_code == httpx.codes.OK
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                if len(times) == 100:
                    calm.set()


def longest_gap(times: Sequence[float], start: float, end: float) -> float:
    """Return the longest time between two neighbours of `times` that reaches into the span."""
    pairs = itertools.pairwise(times)
    return max((b - a for a, b in pairs if b > start and a < end), default=0.0)


def tower_seconds(folder: Path) -> float:
    """Return the seconds that the newest image in the server's log took."""
    log = next(folder.glob("server-*.log")).read_text()
    found = re.findall(r"image read.* seconds=([0-9.]+)", log)
    return float(found[-1]) if found else 0.0


async def beside(url: str, body: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return the time of an answer to `body` beside a stream, and the stream's longest gaps before and during it."""
    times: list[float] = []
    calm = asyncio.Event()
    async with httpx.AsyncClient(timeout=300.0) as client:
        streamed = asyncio.create_task(stream(client, url, times, calm))
        await calm.wait()
        start = time.perf_counter()
        seconds, tokens = await ask(client, url, body)
        end = time.perf_counter()
        await asyncio.sleep(0.2)
        streamed.cancel()
        await asyncio.gather(streamed, return_exceptions=True)
    found = {"answer, s": seconds, "prompt": float(tokens)}
    found["gap undisturbed, ms"] = 1000 * longest_gap(times, times[40], start - 0.005)
    if "messages" in body:
        found["tower, s"] = tower_seconds(folder)
        during = longest_gap(times, start, start + found["tower, s"])
        found["gap in reading and tower, ms"] = 1000 * during
    return found | {"gap, ms": 1000 * longest_gap(times, start, end)}


async def alone(url: str, body: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return the time of an answer to `body` with nothing beside it, and that of the newest image."""
    async with httpx.AsyncClient(timeout=300.0) as client:
        seconds, tokens = await ask(client, url, body)
    return {"answer, s": seconds, "prompt": float(tokens), "tower, s": tower_seconds(folder)}


def measure(url: str, rounds: int, side: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return the rows of the table."""
    table: dict[str, dict[str, float]] = {}
    for seed in (90, 91):  # the first reads the tower
        asyncio.run(beside(url, image_of(seed, side), folder))
    for number in range(rounds):
        image, other = (image_of(2 * number + i, side) for i in range(2))
        table[f"{number}: new image"] = found = asyncio.run(alone(url, image, folder))
        table[f"{number}: next turn"] = asyncio.run(alone(url, turn_after(image), folder))
        table[f"{number}: new image beside a stream"] = asyncio.run(beside(url, other, folder))
        text = {"prompt": random.Random(number).choices(CYCLE, k=int(found["prompt"]))}
        table[f"{number}: text beside a stream"] = asyncio.run(beside(url, text, folder))
    return table


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="27B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", type=int, default=2048, help="pixels of a side of an image")
    parser.add_argument("--mtp", default="off")
    parser.add_argument("--gpu", type=int, default=0, help="the number of the GPU")
    parser.add_argument("--model", type=Path, help="a folder to keep the checkpoint in")
    options: argparse.Namespace = parser.parse_args()
    print(about(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or folder / "model"
        if not model.exists():
            write_model(model, options.shape)
        # The answers repeat themselves: a window of n-grams would have several tokens, and gaps between them.
        flags = "--mtp", options.mtp, "--ngram", "off"
        with serving(folder, model, folder / "state", (), options.gpu, *flags) as url:
            table = measure(url, options.rounds, options.side, folder)
    for row, figures in table.items():
        print(f"{row}: {rounded(figures)}")
    answers = {row: figures["answer, s"] for row, figures in table.items()}
    publish("images", table, {"answer, s": bars(answers, "s")})


if __name__ == "__main__":
    main()
