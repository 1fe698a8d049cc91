"""Workers that mDNS finds, and the reason if it finds none."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.doctor.finding import Finding, Verdict
from coordinator.workers.discovery import Candidate


def check_discovery(
    candidates: Sequence[Candidate], *, enabled: bool, problem: str, seconds: float
) -> Finding:
    """Report the announced workers. `problem` is the error of the mDNS browser, empty for none."""
    announced = [c for c in candidates if c.announcement is not None]
    values = {"found": [c.name for c in announced], "problem": problem}
    if not enabled:
        return Finding("mDNS", Verdict.SKIP, "off by --no-mdns", "", values)
    if problem:
        advice = "mDNS is unavailable here. Name each worker with --worker HOST:PORT."
        return Finding("mDNS", Verdict.WARN, problem, advice, values)
    if not candidates:
        advice = (
            "No worker was found. Start mtp-worker on each machine. If it runs, pass --worker HOST:PORT: the "
            "network or macOS's Local Network privacy may block multicast."
        )
        return Finding("mDNS", Verdict.WARN, f"no worker in {seconds:g} s", advice, values)
    lines = " ".join(f"--worker {c.addresses[0]}" for c in announced)
    return Finding("mDNS", Verdict.OK, lines or "workers are named by --worker", "", values)
