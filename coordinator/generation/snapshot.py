"""A snapshot of the generation loop, for status pages and command lines."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.generation.request import GenerationStats
from mtp.depth.report import SearchReport


@dataclass(frozen=True)
class RequestSnapshot:
    """One admitted request. The last stage has computed `computed_tokens` of its `prefill_tokens`.

    `prefill_seconds` are expected for the remaining ones; None before the server has computed a chunk.
    """

    request_id: str
    computed_tokens: int
    prefill_tokens: int
    stats: GenerationStats
    prefill_seconds: float | None = None

    @property
    def prefilling(self) -> bool:
        """Part of its prompt is not yet computed."""
        return self.computed_tokens < self.prefill_tokens


@dataclass(frozen=True)
class LoopSnapshot:
    """The state of a generation loop at one moment.

    `serving` is False while the loop has no pipeline. `kv_tokens` is the K/V memory, in tokens, that the admitted
    requests reserve. `stage_ms` are average milliseconds of a decode step, by stage. `prefix_bytes` bounds the bytes
    of the prefix entries on each stage. `choices` has what `--mtp auto` compares.
    """

    serving: bool
    epoch: int
    mtp: str
    requests: tuple[RequestSnapshot, ...]
    request_limit: int
    waiting: int
    waiting_limit: int
    kv_tokens: int
    kv_limit: int
    tokens_per_second: float
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    stage_ms: tuple[float, ...]
    recoveries: int
    prefix_bytes: int = 0
    choices: tuple[SearchReport, ...] = ()
