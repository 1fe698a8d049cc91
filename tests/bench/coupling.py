"""The acceptance rate of drafts under each rule, from simulated pairs of distributions or a model's.

    python -m tests.bench.coupling
    python -m tests.bench.coupling --model DIR --prompt-file FILE

Let p be a target and q a head over the same tokens. The probabilities are:

    shared noise (coupled) agrees    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i);
    the best possible coupling does  sum_i min(p_i, q_i) = 1 - TV(p, q)       (what the ratio rule reaches);
    a greedy draft meets a sample    p at the head's most likely token;
    a greedy draft meets the best    1 where both have the same most likely token.

Each is exact; the unit test compares the first two with draws by the rules themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from coordinator.text.tokenizer import Tokenizer
from mtp.sampling.filters import filtered
from proto.params import SamplingParams
from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.support.stages.chain import Chain, Script

Floats = npt.NDArray[np.float64]

DISTANCES = (0.18, 0.35, 0.50)
"""Total variation between target and head: a good, a middling and a poor head, or positions 1 to 3 of a chain."""

PAIRS = 200
VOCAB = 1000
PEAKEDNESS = 2.75
"""Standard deviation of the simulated logits. Only the greedy draft's figures depend on it and on VOCAB."""


@dataclass(frozen=True)
class Rates:
    """Mean acceptance rates over pairs of distributions."""

    distance: float
    shared: float
    best: float
    greedy_draft: float
    greedy_both: float


def rates(p: Floats, q: Floats) -> Rates:
    """Return the rates of the pairs in `p` and `q`, both `[pairs, vocab]` with rows that sum to 1."""
    overlap = float(np.minimum(p, q).sum(axis=1).mean())
    row = np.arange(len(p))
    return Rates(
        distance=1 - overlap,
        shared=float(np.mean([_shared(a, b) for a, b in zip(p, q, strict=True)])),
        best=overlap,
        greedy_draft=float(p[row, q.argmax(axis=1)].mean()),
        greedy_both=float((p.argmax(axis=1) == q.argmax(axis=1)).mean()),
    )


def _shared(p: Floats, q: Floats) -> float:
    """Return the probability that argmax(log p + g) = argmax(log q + g).

    With E = exp(-g) exponential, token i wins both when E_j >= E_i max(p_j / p_i, q_j / q_i) for all j. Sorted by p/q,
    the larger ratio is that of p for the tokens before i and that of q for those after.
    """
    both = (p > 0) & (q > 0)
    order = np.argsort(-np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0), kind="stable")
    p, q, both = p[order], q[order], both[order]
    p_before = np.cumsum(p)
    q_after = 1 - np.cumsum(q)
    sums = p_before[both] / p[both] + np.maximum(q_after[both], 0) / q[both]
    return float((1 / sums).sum())


def softmax(scores: Floats) -> Floats:
    """Return the softmax of each row."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), dtype=np.float64)


def simulated(distance: float, pairs: int = PAIRS, vocab: int = VOCAB) -> tuple[Floats, Floats]:
    """Return pairs (p, q) `[pairs, vocab]` at a mean total variation `distance`.

    p comes from Gaussian logits. q comes from the same logits with added noise, whose size is found by bisection.
    """
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(pairs, vocab)) * PEAKEDNESS
    error = rng.normal(size=(pairs, vocab))
    p = softmax(logits)
    low, high = 0.0, 10.0
    for _ in range(30):
        noise = (low + high) / 2
        near = 1 - np.minimum(p, softmax(logits + noise * error)).sum(axis=1).mean() < distance
        low, high = (noise, high) if near else (low, noise)
    return p, softmax(logits + low * error)


def of_model(
    path: Path, prompt: Sequence[int], params: SamplingParams, depth: int, windows: int
) -> Iterator[tuple[Floats, Floats]]:
    """Return the pairs of the model at `path` for each draft position, over the windows that reached it.

    `params` shape both distributions and choose the text. Raises ProtocolError for a model without a head.
    """
    chain = Chain(path)
    script = Script(0, list(prompt), params)
    script.run(chain, script.chunk(len(prompt), drafts=depth))
    p: list[list[Floats]] = [[] for _ in range(depth)]
    q: list[list[Floats]] = [[] for _ in range(depth)]
    for _ in range(windows):
        heads = [filtered(logits, params, 0) for logits in chain.draft_logits]
        chain.draft_logits.clear()
        outcome = script.run(chain, script.next_window(drafts=depth))
        target = filtered(chain.logits[0], params, 0)
        for position in range(min(outcome.accepted_length, depth)):
            p[position].append(np.array(mx.softmax(target[position])).astype(np.float64))
            q[position].append(np.array(mx.softmax(heads[position][0])).astype(np.float64))
    for ps, qs in zip(p, q, strict=True):
        if ps:
            yield np.stack(ps), np.stack(qs)


def table(rows: Sequence[tuple[str, int, Rates]]) -> str:
    """Return a table with one line for each name, number of pairs and rates."""
    lines = [
        "                 pairs     TV  shared noise  best coupling  greedy draft  greedy both"
    ]
    for name, pairs, found in rows:
        distance, shared, best, draft, both = astuple(found)
        lines.append(
            f"{name:16}{pairs:6}  {distance:5.3f}  {shared:12.3f}  {best:13.3f}  {draft:12.3f}  {both:11.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table of the simulated pairs or of a model's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--model", type=Path, help="a checkpoint with its MTP head")
    parser.add_argument("--prompt-file", type=Path, help="text that the model continues")
    parser.add_argument("--temp", type=float, default=1.0)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--windows", type=int, default=200)
    options = parser.parse_args()
    if (options.model is None) != (options.prompt_file is None):
        parser.error("--model and --prompt-file must be given together")
    pairs = [(f"simulated {distance}", simulated(distance)) for distance in DISTANCES]
    if options.model is not None:
        prompt = Tokenizer.load(options.model).encode(options.prompt_file.read_text())
        params = SamplingParams(temperature=options.temp)
        found = of_model(options.model, prompt, params, options.depth, options.windows)
        pairs += [(f"model, draft {i + 1}", pair) for i, pair in enumerate(found)]
    rows = [(name, len(p), rates(p, q)) for name, (p, q) in pairs]
    print(f"{about()}\n\n{table(rows)}")
    publish(
        "coupling",
        {name: {"pairs": count, **asdict(rate)} for name, count, rate in rows},
        {
            "shared noise": bars({name: rate.shared for name, _, rate in rows}, "share accepted"),
            "best coupling": bars({name: rate.best for name, _, rate in rows}, "share accepted"),
            "greedy draft": bars(
                {name: rate.greedy_draft for name, _, rate in rows}, "share accepted"
            ),
        },
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of the formulas."""


if __name__ == "__main__":
    main()
