"""A bench of one token of one stream in one process: stock mlx-lm's loop, and a stage of all layers with its verifier.

    python -m tests.bench.step_time

The model is that of the bench `servers`. Rounds alternate between stock mlx-lm, a stage whose layers are mlx-lm's own
modules, and the stage as it is. The table counts the operations of MLX that a token builds. On the CPU each takes 2 to
3 us. At a priority of its own (`chrt -f 1`) the bench is not disturbed by other programs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.layer import KVFormat
from proto.frame import Admit, Commit, Frame, Segment
from proto.frame_stamps import FrameStamps, StageStep
from proto.span import Span
from tests.bench.machine import about
from tests.bench.random_model import write_random_model
from tests.bench.report import bars, publish
from worker.engine.stage_engine import BegunFrame, StageEngine
from worker.model.loader import load_stage
from worker.model.stage import Stage
from worker.model.verifier import Verifier

PROMPT = tuple(range(40, 56))
CAPACITY = 4096
STEPS = 32
"""Tokens of a round."""

WARM_UP = 3
"""Tokens at the start of a round that are not counted."""


def operations(arrays: Sequence[mx.array], folder: Path) -> int:
    """Return the number of operations of MLX that compute lazy `arrays`."""
    path = folder / "graph.dot"
    mx.export_to_dot(str(path), *arrays)
    return path.read_text().count("shape=rectangle")


class StockLoop:
    """mlx-lm's loop of one stream: it builds the next step before it reads the token of this one."""

    def __init__(self, path: Path) -> None:
        self.model, _ = load_model(path)
        self.cache = make_prompt_cache(self.model)
        self.token = self._build(mx.array(PROMPT))
        mx.eval(self.token)

    def _build(self, tokens: mx.array) -> mx.array:
        logits = self.model(tokens[None], cache=self.cache)[:, -1, :]
        return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)

    def count(self, folder: Path) -> int:
        """Return the operations of a step, which runs."""
        self.token, built = self._build(self.token), self.token
        found = operations([self.token], folder)
        mx.eval(built, self.token)
        return found

    def step(self) -> None:
        """Run one step."""
        following = self._build(self.token)
        mx.async_eval(following)
        self.token.item()
        self.token = following


class StageLoop:
    """One stream through a stage of all layers, one window of one token after another."""

    def __init__(self, path: Path) -> None:
        checkpoint = Checkpoint.open(path)
        span = Span(0, checkpoint.config.num_layers)
        modules = load_stage(checkpoint, span, first=True, last=True, dtype=None, with_head=False)
        stage = Stage(modules, KVFormat())
        verifier = Verifier(modules, KVFormat())
        self.engine = StageEngine(stage, epoch=0, first=True, verifier=verifier)
        prompt = Segment(0, 0, 0, PROMPT, sample=True)
        self.token: int | None = None
        self.window = 0
        self._finish(self._begin((Admit(0, CAPACITY, len(PROMPT)),), prompt))

    def _begin(self, ops: tuple[Admit | Commit, ...], segment: Segment) -> BegunFrame:
        frame = Frame(0, self.engine.frames_done, ops, (segment,))
        return self.engine.begin(frame, FrameStamps(0, StageStep))

    def _finish(self, begun: BegunFrame) -> None:
        self.token = begun.finish().outcomes[0].token
        begun.clean_up()
        self.window += 1

    def _next(self) -> BegunFrame:
        assert self.token is not None
        ops = (Commit(0, self.window - 1, 1),) if self.window > 1 else ()
        position = len(PROMPT) + self.window - 1
        return self._begin(ops, Segment(0, self.window, position, (self.token,), open=True))

    def count(self, folder: Path) -> int:
        """Return the operations of a step, which runs."""
        with patch.object(mx, "async_eval"):
            begun = self._next()
            assert begun.verdict is not None
            found = operations([begun.verdict.choices[0].tokens], folder)
        self._finish(begun)
        return found

    def step(self) -> None:
        """Run one step."""
        self._finish(self._next())


def reference_stage(path: Path) -> StageLoop:
    """Return the loop of a stage with mlx-lm's own modules."""
    with patch("worker.model.choice._join"):
        return StageLoop(path)


LOOPS: dict[str, Callable[[Path], StockLoop | StageLoop]] = {
    "stock mlx-lm": StockLoop,
    "stage of mlx-lm's modules": reference_stage,
    "stage": StageLoop,
}


def measure(folder: Path, dtype: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return operations and milliseconds of a token, and the share of stock mlx-lm's time, for each of `LOOPS`."""
    path = write_random_model(
        folder / dtype, hidden=options.hidden, layers=options.layers, dtype=getattr(mx, dtype)
    )
    loops = {name: make(path) for name, make in LOOPS.items()}
    counts = {name: loop.count(folder) for name, loop in loops.items()}
    rounds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.rounds):
        for name, loop in loops.items():
            seconds = []
            for _ in range(STEPS):
                started = time.perf_counter()
                loop.step()
                seconds.append(time.perf_counter() - started)
            rounds[name].append(statistics.median(seconds[WARM_UP:]))
    first = rounds["stock mlx-lm"]
    return {
        name: {
            "operations": counts[name],
            "ms": statistics.median(own) * 1e3,
            "share": statistics.median(a / b for a, b in zip(own, first, strict=True)),
        }
        for name, own in rounds.items()
    }


def main() -> None:
    """Print the table of both types and publish it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=9)
    options = parser.parse_args()
    print(f"{about()}\n{options}\n", flush=True)
    found = {}
    print("| weights | | operations | ms a token | share of stock mlx-lm's time |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        for dtype in ("bfloat16", "float32"):
            found[dtype] = measure(Path(name), dtype, options)
            for loop, row in found[dtype].items():
                cells = f"{row['operations']} | {row['ms']:.2f} | {row['share']:.2f}"
                print(f"| {dtype} | {loop} | {cells} |", flush=True)
    shares = {f"{loop}, {d}": row["share"] for d in found for loop, row in found[d].items()}
    figures = {"options": vars(options), "loops": found}
    publish("step_time", figures, {"one token": bars(shares, "share of stock mlx-lm's time")})


if __name__ == "__main__":
    main()
