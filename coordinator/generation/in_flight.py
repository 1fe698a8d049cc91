"""What is under way in the pipeline, and what a frame's return means. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.generation.request import GenerationEvent, TokenChunk
from coordinator.generation.sequence import Sequence


@dataclass(frozen=True)
class Rejection:
    """A window lost tokens: what the broadcast says. `trim` tokens leave the sequence's end."""

    seq_id: int
    window: int
    accepted_length: int
    trim: int


@dataclass
class Settlement:
    """What one frame's return means: events for clients, signals for workers, the fate of drafts."""

    events: list[tuple[int, GenerationEvent]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    judged: list[tuple[int, bool]] = field(default_factory=list)
    """Drafts whose fate is known now: number in their chain, from 1, and whether it was right."""

    def emit(self, sequence: Sequence, chunk: TokenChunk) -> None:
        if chunk.tokens:
            self.events.append((sequence.seq_id, chunk))

    @property
    def tokens(self) -> int:
        """How many came out."""
        chunks = (event for _, event in self.events if isinstance(event, TokenChunk))
        return sum(len(chunk.tokens) for chunk in chunks)


@dataclass
class InFlight:
    """A frame that has not returned: when it left, and how much of which work it carries."""

    sent: float
    alone: bool
    """Nothing else was under way when it left."""
    decode_rows: int = 0
    lanes: int = 1
    """How many there were when it left."""
    fill: int = 1
    """How many windows a sequence could have in flight then."""
    live: int = 0
    """Rows that have not turned out to be in vain."""
    follows: Sequence | None = None
    """Whose window it carries ahead: one before it was in flight."""
