"""Study of deeper filling under misspeculation: one chain of drafts against second candidates and another order.

    python -m tests.bench.deep_filling

One stream on N stages in slots: each slot one window of one token enters stage 0, and returns N slots later. Plain
decoding brings a token every N slots. The policies fill the slots between:

* chain: the drafts in order, each on the one before it. This is what `--mtp filled` does.
* best first: the candidate most likely to be right, given that the head knows its chance at every position. First and
  second candidates compete, and so do all positions. Drafts cost nothing and are there at once, after any candidate.
* stop: the chain, which sends nothing where a token is less likely to be right than `STOP`. It is no faster by itself.

Best first is an upper bound for second candidates, for the order of refilling, and for a depth that follows the head's
margin: no policy that sends one candidate a slot is more often right. With `--draft` each of its slots also takes that
share of a slot on the last stage, for the drafts that follow second candidates.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from tests.bench.machine import about
from tests.bench.report import bars, publish

SLOTS = 60_000
SECOND = 0.5
"""Chance that the second candidate is right where the first is wrong. A draft by shared noise reaches it at best."""

SPREAD = 3.0
"""Concentration of the chances around their mean. At 3 and a mean of .7, one position in five is below .45."""

STOP = 0.1
"""Path probability below which `stop` sends nothing."""


@dataclass(eq=False)
class Node:
    """A candidate token after its parent, with the chance to be right if the parent is."""

    chance: float
    right: bool
    children: list[Node] = field(default_factory=list)
    sent_at: int | None = None


class Text:
    """The chances and truths of the drafts, drawn once per token."""

    def __init__(self, mean: float, spread: float | None, seed: int) -> None:
        self._random = random.Random(seed)
        self._mean, self._spread = mean, spread

    def candidates(self, count: int) -> list[Node]:
        """Return the first `count` candidates after a token."""
        chance = self._mean
        if self._spread is not None:
            a = self._mean * self._spread
            chance = self._random.betavariate(a, self._spread - a)
        draw = self._random.random()
        limit = chance + (1 - chance) * SECOND
        nodes = [
            Node(chance, draw < chance),
            Node((1 - chance) * SECOND, chance <= draw < limit),
        ]
        return nodes[:count]


def unsent(root: Node) -> Iterator[tuple[float, int, Node]]:
    """Yield the candidates that may be sent next: path probability, distance from the root, and node."""
    todo = [(1.0, 0, root)]
    while todo:
        path, depth, node = todo.pop()
        if node.sent_at is None:
            yield path, depth, node
        else:
            todo += [(path * child.chance, depth + 1, child) for child in node.children]


def tokens_per_slot(policy: str, stages: int, text: Text, draft: float) -> float:
    """Return the tokens that one slot brings, if a draft after a second candidate takes `draft` of a slot."""
    width = 2 if policy == "best first" else 1
    root = Node(1.0, right=True)
    confirmed, seconds = 0, 0.0
    for slot in range(SLOTS):
        seconds += 1.0
        path, _, node = max(unsent(root), key=lambda one: (one[0], -one[1]))
        if policy != "stop" or path >= STOP:
            node.sent_at = slot
            node.children = text.candidates(width)
            if width > 1:
                seconds += draft
        if root.sent_at is None or slot - root.sent_at < stages - 1:
            continue
        confirmed += 1
        right = [child for child in root.children if child.right]
        root = right[0] if right else Node(1.0, right=True)
        root.chance = 1.0
    return confirmed / seconds


@dataclass(frozen=True)
class Found:
    """The result of one setting: tokens over those of plain decoding, by policy."""

    stages: int
    chance: float
    spread: bool
    speedups: dict[str, float]

    @property
    def gain(self) -> float:
        """Gain of best first over the chain."""
        return self.speedups["best first"] / self.speedups["chain"] - 1


def measure(stages: Sequence[int], chances: Sequence[float], draft: float) -> list[Found]:
    """Return the results of all settings."""
    found = []
    for count, chance, spread in itertools.product(stages, chances, (None, SPREAD)):
        speedups = {
            policy: count * tokens_per_slot(policy, count, Text(chance, spread, 1), draft)
            for policy in ("chain", "stop", "best first")
        }
        found.append(Found(count, chance, spread is not None, speedups))
    return found


def table(found: Sequence[Found]) -> str:
    """Return a Markdown table."""
    rows = [
        "| stages | a draft is right | the head knows where | chain | stop | best first | gain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        values = " | ".join(f"{value:.2f}" for value in one.speedups.values())
        knows = "yes" if one.spread else "no"
        rows.append(f"| {one.stages} | {one.chance:.0%} | {knows} | {values} | {one.gain:+.1%} |")
    return "\n".join(rows)


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--chances", type=float, nargs="+", default=[0.6, 0.7, 0.8])
    parser.add_argument("--draft", type=float, default=0.0)
    options = parser.parse_args()
    found = measure(options.stages, options.chances, options.draft)
    print(f"{about()}\n{options}\n\n{table(found)}")
    publish(
        "deep_filling",
        {"options": vars(options), "found": [asdict(f) for f in found]},
        {
            "gain of best first": bars(
                {f"{f.stages} stages, {f.chance:.0%}, {f.spread}": f.gain for f in found}, "share"
            )
        },
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps the lines of the example."""


if __name__ == "__main__":
    main()
