"""The report of a chaos run: what was injected, what the clients received, and what the processes use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.chaos.load import Outcome
from tests.support.processes.resource_use import ResourceUse, grown

CRASHES = (
    "Traceback",
    "Fatal Python",
    "Aborted",
    "terminate called",
    "Exception ignored",
    "core dumped",
)
"""Texts of a process that ended badly."""


def crashes_of(folder: Path) -> list[str]:
    """Return the crashes in the logs of a folder, each with the name of its log and some of its text."""
    found = []
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        places = [at for crash in CRASHES if (at := text.find(crash)) >= 0]
        found += [f"{log.name}: {text[min(places) :][:600]}"] if places else []
    return found


@dataclass
class Report:
    """The result of a run. `resource_use` samples the coordinator and the one worker that was never ended."""

    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    plans: int = 0
    """Number of plans that served."""
    not_back: list[str] = field(default_factory=list)
    """Faults after which a worker did not recover in time, or no answer went on."""
    outcome: Outcome = field(default_factory=Outcome)
    silences: dict[str, list[float]] = field(default_factory=dict)
    """For each kind, the longest silence of a client during each fault and its repair, in seconds."""
    crashes: list[str] = field(default_factory=list)
    """Tracebacks and aborts in the logs of all processes."""
    resource_use: dict[str, list[ResourceUse]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the printed report: a name and a value each."""
        o = self.outcome
        yield "faults injected", ", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.items()))
        yield "plans, minutes", f"{self.plans}, {self.seconds / 60:.1f}"
        yield "workers not back in time", ", ".join(self.not_back) or "0"
        yield "answers finished, cancelled by their client", f"{o.finished}, {o.cancelled}"
        yield "answers differing, cut or refused", str(len(o.wrong))
        yield "tokens lost / duplicated", f"{o.lost} / {o.duplicated}"
        yield "tokens / log-probabilities compared", f"{o.tokens} / {o.logprobs}"
        yield "clients hung", str(o.hung)
        yield "tracebacks and aborts", "; ".join(self.crashes) or "0"
        for kind, values in self.silences.items():
            yield (
                f"silence during {kind}, s",
                f"median {median(values):.2f}, most {max(values):.2f}",
            )
        for name, samples in self.resource_use.items():
            yield f"{name}: grew", "; ".join(grown(samples)) or "nothing"
        yield from (("wrong", line[:300]) for line in o.wrong[:5])

    def __str__(self) -> str:
        return "\n".join(f"{name:46} {value}" for name, value in self.rows())
