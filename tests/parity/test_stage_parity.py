"""A chain of stages computes bit for bit what mlx-lm's own model computes, wherever it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from proto.frame import Evict, Segment
from tests.conftest import Checkpoints
from tests.support.stages.chain import Chain, Script, Stock, best, random_tokens

PROMPT = 21
CHUNKS = (1, 3, 16, PROMPT)
STEPS = 64
FEW_STEPS = 12

ONE_AND_TWO_STAGES = [(), *((cut,) for cut in range(1, 8))]
THREE_STAGES = [(1, 2), (2, 3), (3, 4), (1, 7), (4, 7)]
"""Cuts into three stages. With (3, 4) one stage is a single attention layer."""

EVERY_LAYER = [tuple(range(1, 8))]

FORMS: list[dict[str, Any]] = [
    {"tie": False, "shards": 3},
    {"layout": "mlx"},
    {"layout": "mlx", "quantize": 4},
    {"layout": "mlx", "quantize": 8, "tie": False},
    {"layout": "mlx", "quantize": 4, "overrides": True},
    {"moe": True},
    {"moe": True, "tie": False, "fused_experts": False},
    {"layout": "mlx", "quantize": 4, "moe": True},
    {"moe": True, "tie": False, "qwen3_next": True},
    {"layout": "mlx", "quantize": 4, "moe": True, "qwen3_next": True},
]


def _prefill(chain: Chain, stock: Stock, seq_id: int, chunk: int) -> Script:
    """Prefill in chunks of `chunk` tokens. The last logits of each chunk must be the stock model's."""
    script = Script(seq_id, list(stock.prompt))
    while script.scheduled < len(stock.prompt):
        chain.send(script.chunk(chunk), ops=script.due())
        assert mx.array_equal(chain.logits[seq_id][0], stock.logits[script.scheduled - 1])
    script.known.append(best(chain.logits[seq_id][0]))
    return script


def _decode(chain: Chain, stock: Stock, script: Script, steps: int) -> None:
    for _ in range(steps):
        at = script.scheduled
        script.run(chain, script.window([script.known[-1]]))
        assert mx.array_equal(chain.logits[script.seq_id][0], stock.logits[at]), at
    assert script.known[:-1] == stock.tokens[: PROMPT + steps]


def _check(path: Path, cuts: tuple[int, ...], stock: Stock, steps: int = STEPS) -> None:
    chain = Chain(path, cuts)
    scripts = [_prefill(chain, stock, i, chunk) for i, chunk in enumerate(CHUNKS)]
    script = scripts.pop(sum(cuts) % len(CHUNKS))
    script.ops += [Evict(other.seq_id) for other in scripts]
    _decode(chain, stock, script, steps)


@pytest.mark.parametrize(
    ("cuts", "steps"),
    [(ONE_AND_TWO_STAGES, FEW_STEPS), (THREE_STAGES, FEW_STEPS), (EVERY_LAYER, STEPS)],
    ids=["1 and 2", "3", "8 stages"],
)
def test_every_cut_is_bit_equal(checkpoints: Checkpoints, cuts: list[tuple[int, ...]], steps: int) -> None:
    """Logits do not depend on the cuts or the prompt's chunks. All cuts at once do so through 64 steps (promise 1)."""
    path = checkpoints()
    stock = Stock(path, random_tokens(PROMPT), steps)
    for cut in cuts:
        _check(path, cut, stock, steps)


@pytest.mark.slow
@pytest.mark.parametrize("options", FORMS, ids=lambda options: ", ".join(options))
def test_every_form_of_checkpoint_is_bit_equal(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """Quantized, MoE, fused, untied and sharded checkpoints give mlx-lm's logits, cut or whole."""
    path = checkpoints(**options)
    # mlx-lm reads fused experts only. `write_checkpoint` gives both forms the same weights.
    readable = checkpoints(**{k: v for k, v in options.items() if k != "fused_experts"})
    stock = Stock(readable, random_tokens(PROMPT), STEPS)
    _check(path, (), stock, steps=8)
    _check(path, (3, 4), stock)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_a_hop_changes_no_bit_of_a_narrow_float(checkpoints: Checkpoints, dtype: mx.Dtype) -> None:
    """A chain in 16 bits gives the same logits cut in three as whole. Both compute the same rows."""
    path = checkpoints(dtype=dtype)
    said = []
    for cuts in ((), (2, 5)):
        chain = Chain(path, cuts)
        script = Script(0, random_tokens(PROMPT))
        rows = []
        for segment in (script.chunk(16), script.chunk(5)):
            script.run(chain, segment)
            rows.append(chain.logits[0])
        script.known = script.known[:PROMPT] + script.known[-1:]
        for _ in range(8):
            script.run(chain, script.next_window())
            rows.append(chain.logits[0])
        said.append(mx.concatenate(rows))
        assert rows[0].dtype == dtype
    assert mx.array_equal(said[0], said[1])


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"moe": True}, marks=pytest.mark.thorough)],
    ids=["dense", "experts"],
)
def test_sequences_in_one_frame_do_not_see_each_other(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """Other sequences in a frame change no bit of a sequence's logits.

    Some are in their prompt and some in windows, with equal and unequal widths and lengths.
    """
    path = checkpoints(**options)
    stocks = [Stock(path, random_tokens(n, seed=n), 24) for n in (1, 2, 9, 11, 26)]
    chain = Chain(path, (3,))
    scripts = [Script(i, list(stock.prompt)) for i, stock in enumerate(stocks)]
    mixed = False
    for turn in range(12):
        segments = [_next(script, stocks[script.seq_id], turn) for script in scripts]
        mixed |= len({segment.open for segment in segments}) == 2
        frame = chain.send(*segments, ops=[op for script in scripts for op in script.due()])
        for script, segment, outcome in zip(scripts, segments, frame.outcomes, strict=True):
            rows = chain.logits[script.seq_id]
            end = segment.position + segment.width
            expected = stocks[script.seq_id].logits[end - rows.shape[0] : end]
            assert mx.array_equal(rows, expected), (script.seq_id, segment.position)
            assert outcome.accepted_length == segment.width
            if segment.open or script.scheduled == len(script.known):
                script.apply_outcome(segment, outcome)
    assert mixed
    assert all(s.known == stocks[s.seq_id].tokens[: len(s.known)] for s in scripts)


def _next(script: Script, stock: Stock, turn: int) -> Segment:
    """Return a prompt chunk of 4 tokens, later windows of 1 to 3 tokens that are all correct."""
    if script.scheduled < len(stock.prompt):
        return script.chunk(4)
    drafts = stock.tokens[script.scheduled + 1 :][: (turn + script.seq_id // 2) % 3]
    return script.window([script.known[-1], *drafts])
