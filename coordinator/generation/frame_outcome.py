"""The consequences of one returned frame for clients, workers and the depth controller."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.generation.backups import BackupInFlight
from coordinator.generation.request import GenerationEvent, TokenChunk
from mtp.depth.draft_result import DraftResult
from proto.control import Rollback


@dataclass
class FrameOutcome:
    """Events for clients, by `seq_id`; rollbacks for workers; results of drafts in the order of their chains.

    `backup` is the backup that the frame has made, for the coordinator to read.
    """

    events: list[tuple[int, GenerationEvent]] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)
    draft_results: list[DraftResult] = field(default_factory=list)
    backup: BackupInFlight | None = None

    def add_tokens(self, seq_id: int, chunk: TokenChunk) -> None:
        """Add an event for the tokens of `chunk`, unless it has none."""
        if chunk.tokens:
            self.events.append((seq_id, chunk))

    @property
    def token_count(self) -> int:
        """Number of tokens emitted by the frame."""
        chunks = (event for _, event in self.events if isinstance(event, TokenChunk))
        return sum(len(chunk.tokens) for chunk in chunks)
