"""The tokens that every stage of a protocol model must have committed, from headers, outcomes and signals alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from proto.frame import Admit, Commit, DropPrefix, Evict, Frame, Op, RestorePrefix, SavePrefix
from worker.engine.stage_engine import StageEngine

Known = Callable[[int], int]
"""Function from a sequence to the number of its tokens that the coordinator knows, including the prompt."""


@dataclass(frozen=True)
class Ledger:
    """The ledger of one plan. Worlds share it: each entry makes another ledger.

    `headers[n]` holds, by sequence, the tokens that a stage has committed according to headers once it has done frame
    n. `prefixes` holds lengths of entries, `positions` the positions of open windows. `answered` holds, by sequence,
    the length that the last stage's newest outcome keeps. `signals` holds the lengths that rollbacks announced,
    `cancelled` the sequences whose clients have left.
    """

    headers: tuple[Mapping[int, int], ...] = ()
    prefixes: Mapping[int, int] = field(default_factory=dict)
    positions: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    decided: Mapping[int, int] = field(default_factory=dict)
    signals: frozenset[tuple[int, int]] = frozenset()
    left: frozenset[int] = frozenset()

    def key(self) -> Hashable:
        """Return a value that tells two ledgers apart."""
        return tuple(self.headers[-1].items()) if self.headers else ()

    # ---- entries

    def sent(self, frame: Frame, known: Known) -> Ledger:
        """Record a frame that leaves the coordinator. Its header commits all known tokens but the last."""
        held = dict(self._after(len(self.headers)))
        prefixes = dict(self.prefixes)
        for op in frame.ops:
            self._apply(op, held, prefixes, known)
        positions = dict(self.positions)
        for segment in frame.segments:
            if segment.open:
                positions[segment.seq_id, segment.window] = segment.position, segment.width
            else:
                held[segment.seq_id] = segment.position + segment.width
        return replace(self, headers=(*self.headers, held), prefixes=prefixes, positions=positions)

    def _apply(self, op: Op, held: dict[int, int], prefixes: dict[int, int], known: Known) -> None:
        match op:
            case Admit(seq_id):
                held[seq_id] = 0
            case Evict(seq_id):
                del held[seq_id]
            case Commit(seq_id, window, accepted_length):
                held[seq_id] = self._end(seq_id, window, accepted_length)
                assert held[seq_id] == known(seq_id) - 1, "a header commits another length"
            case SavePrefix(seq_id, entry):
                prefixes[entry] = held[seq_id]
            case RestorePrefix(seq_id, entry):
                held[seq_id] = prefixes[entry]
            case DropPrefix(entry):
                del prefixes[entry]

    def answered(self, frame: Frame) -> Ledger:
        """Record a frame that the last stage passes on."""
        decided = dict(self.decided)
        for op in frame.ops:
            if isinstance(op, Evict):  # a preempted sequence begins again from its tokens
                decided.pop(op.seq_id, None)
        for segment, outcome in zip(frame.segments, frame.outcomes, strict=True):
            # The text may have ended before a window that continues, so only a header commits it.
            if segment.open and not outcome.cancelled and not segment.continues:
                decided[segment.seq_id] = self._end(
                    segment.seq_id, segment.window, outcome.accepted_length
                )
        return replace(self, decided=decided)

    def rejected(self, seq_id: int, window: int, trim: int, known: Known) -> Ledger:
        """Record a rollback that is broadcast."""
        end = sum(self.positions[seq_id, window]) - trim
        assert end == known(seq_id) - 1, "a signal commits another length"
        return replace(self, signals=self.signals | {(seq_id, end)})

    def cancelled(self, seq_id: int) -> Ledger:
        """Record a client that has left."""
        return replace(self, left=self.left | {seq_id})

    def _end(self, seq_id: int, window: int, accepted_length: int) -> int:
        return self.positions[seq_id, window][0] + accepted_length

    def _after(self, frames: int) -> Mapping[int, int]:
        return self.headers[frames - 1] if frames else {}

    # ---- what must hold

    def check(self, stage: StageEngine) -> None:
        """Assert that a stage holds the sequences that its headers left it, with the committed lengths they say.

        A signal may have committed more, and the last stage commits its own outcomes. For a sequence whose client has
        left, any length is right.
        """
        due = self._after(stage.frames_done)
        assert stage.sequences.keys() == due.keys(), (stage.sequences.keys(), due)
        for seq_id, sequence in stage.sequences.items():
            committed = sequence.stack.committed
            if seq_id in self.left:
                continue
            least = due[seq_id]
            if stage.verifier is not None:
                least = max(least, self.decided.get(seq_id, 0))
            announced = {end for one, end in self.signals if one == seq_id and end > least}
            wanted = {least, *announced}
            assert committed in wanted, (
                f"sequence {seq_id}: {committed} committed after frame {stage.frames_done - 1}, not {wanted}"
            )
