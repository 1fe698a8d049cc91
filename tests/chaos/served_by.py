"""The number of workers that computed what the clients received, from the coordinator's log and the clients' clocks."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tests.chaos.load import Answer
from tests.chaos.pauses import SERVING


def pieces_by_workers(records: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> Counter[int]:
    """Return the number of pieces by the number of workers of their plan. 0 stands for the coordinator alone."""
    plans = [r for r in records if r["message"] == SERVING]
    starts = [datetime.fromisoformat(r["time"]).timestamp() for r in plans]
    found: Counter[int] = Counter()
    for answer in answers:
        for moment in answer.times[1:]:  # the first time is that of the request
            if index := bisect_right(starts, moment):
                found[plans[index - 1]["workers"]] += 1
    return found


def share_of_several(pieces: Mapping[int, int]) -> float:
    """Return the share of the pieces that plans of two workers or more computed."""
    return sum(n for workers, n in pieces.items() if workers > 1) / max(1, sum(pieces.values()))
