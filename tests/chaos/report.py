"""The report of a chaos run: what was injected, what the clients received, and what the processes use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.chaos.load import Outcome
from tests.chaos.pauses import PARTS, Episode, spread
from tests.chaos.served_by import share_of_several
from tests.support.processes.resource_use import ResourceUse, grown


@dataclass
class Report:
    """The result of a run. `resource_use` samples the coordinator and the one worker that was never ended."""

    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    not_back: list[str] = field(default_factory=list)
    """Faults after which a worker did not recover in time, or no answer went on."""
    outcome: Outcome = field(default_factory=Outcome)
    episodes: list[Episode] = field(default_factory=list)
    """Faults that ended a plan."""
    replans: list[Episode] = field(default_factory=list)
    """Plan changes that the run requested."""
    silences: dict[str, list[float]] = field(default_factory=dict)
    """For each kind, the longest silence of a client during each fault, in seconds."""
    crashes: list[str] = field(default_factory=list)
    """Tracebacks and aborts in the logs of all processes."""
    pieces: Counter[int] = field(default_factory=Counter)
    """Pieces of the answers by the number of workers of the plan."""
    resource_use: dict[str, list[ResourceUse]] = field(default_factory=dict)

    @property
    def over(self) -> int:
        """Number of pauses longer than the coordinator's log explains."""
        return sum(episode.over for episode in (*self.episodes, *self.replans))

    @property
    def grew(self) -> list[str]:
        """Return the resources of which a process holds more at the end than early in the run."""
        return [
            f"{name}: {what}" for name, found in self.resource_use.items() for what in grown(found)
        ]

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the printed report: a name and a value each."""
        o = self.outcome
        yield "faults injected", ", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.items()))
        yield "of them ended a plan", str(len(self.episodes))
        yield "workers not back in time", ", ".join(self.not_back) or "0"
        yield "streams finished", str(o.finished)
        yield "streams ended with an error or cut", str(len(o.wrong) - o.differing)
        yield "tokens lost / duplicated", f"{o.lost} / {o.duplicated}"
        yield "answers differing", str(o.differing)
        yield "tokens / log-probabilities compared", f"{o.tokens} / {o.logprobs}"
        yield "pieces from plans of two workers or more", f"{share_of_several(self.pieces):.0%}"
        by_workers = sorted(self.pieces.items())
        yield "pieces by workers", ", ".join(f"{n} from {w}" for w, n in by_workers)
        yield "answers cancelled by their client", str(o.cancelled)
        yield "tracebacks and aborts", "; ".join(self.crashes) or "0"
        yield "clients hung", str(o.hung)
        yield "", f"{'median':>8}{'95 %':>8}{'max':>8}"
        for name in (*PARTS, "pause", "bound"):
            values = [getattr(e, name) for e in self.episodes]
            yield f"{name}, s", "".join(f"{v:8.2f}" for v in spread(values))
        for kind in self.faults:
            values = [e.detection for e in self.episodes if e.kind == kind]
            yield f"detection of {kind}, s", "".join(f"{v:8.2f}" for v in spread(values))
        for kind, values in self.silences.items():
            yield f"silence during {kind}, s", "".join(f"{v:8.2f}" for v in spread(values))
        for name in ("pause", "bound"):
            values = [getattr(e, name) for e in self.replans]
            yield f"{name} of a replan, s", "".join(f"{v:8.2f}" for v in spread(values))
        yield "pauses over detection + plan + load + prefill", str(self.over)
        yield "grew", "; ".join(self.grew) or "nothing"
        for name, samples in self.resource_use.items():
            for what in ("descriptors", "threads", "tasks", "memory"):
                yield f"{name}: {what}", " ".join(f"{getattr(s, what):g}" for s in samples)

    def __str__(self) -> str:
        return "\n".join(f"{name:46} {value}" for name, value in self.rows())
