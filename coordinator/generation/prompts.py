"""The prompts of a plan, admitted or waiting: the next one to admit, and the chunks of the next frame. Plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coordinator.generation.admission import fits
from coordinator.generation.limits import Limits
from coordinator.generation.prompt_budget import PromptBudget
from coordinator.generation.prompt_order import PromptOrder
from coordinator.generation.sequence import Sequence
from coordinator.planning.capacity import Capacity

Running = Mapping[int, Sequence]


def has_streams(running: Running) -> bool:
    """Return whether an answer is being decoded."""
    return any(sequence.decoding for sequence in running.values())


class Prompts:
    """The order of prompts, and the tokens of them that fit into a frame."""

    def __init__(self) -> None:
        self.order, self.budget = PromptOrder(), PromptBudget()

    def frame_tokens(self, limits: Limits, stages: int, running: Running) -> int:
        """Return the maximum of prompt tokens in the next frame."""
        streams = has_streams(running)
        return min(limits.step_tokens, self.budget.frame_tokens(stages, streams=streams))

    def next_to_admit(
        self,
        running: Running,
        waiting: Collection[Sequence],
        room: Capacity,
        limits: Limits,
        stages: int,
    ) -> Sequence | None:
        """Return the waiting sequence that has room and whose prompt is part of the next frame, or None.

        A prompt that waits takes no room, so a shorter one may come before it.
        """
        if not waiting or len(running) >= room.sequences:
            return None
        left = self.frame_tokens(limits, stages, running)
        for sequence in self._sort_prompts(running, waiting):
            if sequence.seq_id not in running:
                return sequence if fits(room, running.values(), sequence) else None
            left -= min(limits.chunk_length(sequence.prefill_tokens), sequence.prompt_left)
            if left <= 0:
                return None
        return None

    def next_chunks(
        self,
        running: Running,
        waiting: Collection[Sequence],
        limits: Limits,
        stages: int,
        *,
        stormy: bool,
    ) -> list[tuple[Sequence, int]]:
        """Return the admitted sequences of the next frame with prompts, and the maximum length of their chunks.

        After a failure, a frame has one chunk's tokens. The first prompt continues while the others wait, so the next
        failure finds some of them advanced. While no stream runs, chunks are whole. So their lengths are a function of
        the prompts and not of measured times. GPUs round differently for another number of rows.
        """
        if not any(sequence.prefilling for sequence in running.values()):
            return []
        left, chunks = self.frame_tokens(limits, stages, running), list[tuple[Sequence, int]]()
        whole = not has_streams(running)
        prompts = self._sort_prompts(running, waiting)
        for sequence in prompts:
            chunk = limits.chunk_length(sequence.prefill_tokens)
            if stormy:
                left = min(left, chunk)
            if sequence.seq_id not in running or left <= 0:
                continue
            if not whole:
                chunk = min(chunk, left)
            elif chunks and min(chunk, sequence.prompt_left) > left:
                break
            chunks.append((sequence, chunk))
            left -= min(chunk, sequence.prompt_left)
        self.order.record_frame([sequence for sequence, _ in chunks], prompts)
        return chunks

    def _sort_prompts(self, running: Running, waiting: Collection[Sequence]) -> list[Sequence]:
        prompts = [sequence for sequence in running.values() if sequence.prefilling]
        prompts += [sequence for sequence in waiting if not sequence.restoring]
        return self.order.sort_prompts(prompts, running)
