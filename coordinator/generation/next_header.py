"""The operations for the header of the next frame: they admit sequences and keep, copy and restore their state."""

from __future__ import annotations

from coordinator.generation.backups import MIN_NEW_TOKENS, Backups
from coordinator.generation.prefix_cache import PrefixCache
from coordinator.generation.sequence import Sequence
from coordinator.planning.capacity import Capacity
from proto.frame import DropPrefix, Op, RestorePrefix, SavePrefix
from proto.operation import RestoreBackup


class NextHeader:
    """The operations in the order of the decisions, and what the stages hold besides running sequences.

    `vocabulary` is the tokenizer's packed vocabulary, for sequences with a grammar.
    """

    def __init__(self, vocabulary: bytes = b"") -> None:
        self.vocabulary = vocabulary
        self.ops: list[Op] = []
        self.prefixes = PrefixCache()
        self.backups = Backups()
        self._vocabulary_sent = False  # in this epoch

    def reset(self, capacity: Capacity) -> None:
        """Start a new plan, whose stages hold nothing."""
        self.ops.clear()
        self.prefixes.reset(capacity)
        self.backups.in_flight.clear()
        self._vocabulary_sent = False

    def limit_prefixes(self, prefix_bytes: int) -> None:
        """Let the prefix entries of the stages keep to `prefix_bytes` from now on."""
        self.ops.extend(DropPrefix(entry) for entry in self.prefixes.limit_bytes(prefix_bytes))

    def admit_sequence(self, sequence: Sequence) -> None:
        """Create a sequence on the stages, from its backup or from the longest prefix entry that they hold."""
        vocabulary = b""
        if sequence.request.params.grammar and not self._vocabulary_sent:
            vocabulary, self._vocabulary_sent = self.vocabulary, True
        self.ops.append(sequence.admit_op(vocabulary))
        sequence.admitted = True
        prompt = tuple(sequence.tokens)
        if sequence.restorable_tokens:
            self.ops.append(RestoreBackup(sequence.seq_id, sequence.restorable_tokens))
            sequence.start_after(sequence.restorable_tokens)
            if (restored := prompt[: sequence.scheduled_tokens]) in self.backups.prefixes.kept:
                self.save_prefix(sequence, restored)
        elif (entry := self.prefixes.find_entry(prompt)) is not None:
            self.ops.append(RestorePrefix(sequence.seq_id, entry.number))
            sequence.start_after(len(entry.tokens))
        sequence.prefix_boundaries = self.prefixes.boundaries(
            prompt, sequence.scheduled_tokens, sequence.request.turn
        )

    def save_prefix(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """Save the stages' state of `sequence`, which is the state after `tokens`, as a prefix entry."""
        entry, dropped = self.prefixes.add_entry(tokens)
        self.ops.extend(DropPrefix(number) for number in dropped)
        if entry is not None:
            self.ops.append(SavePrefix(sequence.seq_id, entry.number))
            sequence.saved_prefix = len(tokens)

    def queue_backup(self, sequence: Sequence, held: int, frame: int) -> None:
        """Let frame number `frame` back up `sequence`, of which the stages then hold `held` tokens, if that is due.

        A prefix that the stages save now, or have saved, is backed up first.
        """
        backups, seq_id, prefix = self.backups, sequence.seq_id, tuple(sequence.tokens[:held])
        if not backups.ready or seq_id in backups.in_flight or held <= backups.tokens_of(seq_id):
            return
        boundary = next(iter(sequence.prefix_boundaries), 0)
        if held >= MIN_NEW_TOKENS and (held == boundary or self.prefixes.has_entry(prefix)):
            self.ops.append(backups.begin_backup(seq_id, held, frame, prefix))
        elif seq_id == backups.due:
            self.ops.append(backups.begin_backup(seq_id, held, frame))

    def queue_commit(self, sequence: Sequence) -> None:
        """Queue the commit of the last window of `sequence`, if it has one."""
        if sequence.commit is not None:
            self.ops.append(sequence.commit)
            sequence.commit = None
