"""The engine of one stage, which turns frames into frames: rows, hidden states, outcomes.

All its code runs on the one thread that uses MLX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import mlx.core as mx
import numpy as np

from mtp.device import this_device
from proto.errors import ProtocolError
from proto.frame import Frame, Outcome, Segment
from proto.frame_stamps import FrameStamps, StageStep
from proto.images import FIRST_IMAGE_TOKEN, without_images
from worker.cache.sequence_cache import PrefixEntry
from worker.engine.stage_state import StageState, commit_early
from worker.engine.state_codec import array_of, plain_array, type_name
from worker.model.stage import Run
from worker.model.verifier import Verdict


def to_bytes(x: mx.array, plain: mx.array | None = None) -> tuple[str, tuple[int, ...], memoryview]:
    """Return the dtype's name, the shape and the buffer of `x`, whose `plain_array` is `plain` if it was evaluated.

    The buffer keeps the array alive. MLX copies `x` only to make it contiguous.
    """
    array: Any = plain_array(x) if plain is None else plain  # it has the buffer protocol
    data = memoryview(array)
    if not data.c_contiguous:
        data = np.ascontiguousarray(data).data
    return type_name(x), x.shape, data.cast("B")


CHUNK = 512
"""Tokens of a prompt chunk: those of the scheduler's default."""


def may_overlap(frame: Frame) -> bool:
    """Return whether `frame` needs no result of the one before.

    Its windows continue that one, or it has prompt chunks alone. Operations and first drafts may need the head's pairs.
    A stage reserves memory for the activations of two chunks of CHUNK tokens, and not of longer ones.
    """
    return frame.continues or (
        0 < frame.rows <= CHUNK
        and not frame.ops
        and not any(segment.open or segment.drafts for segment in frame.segments)
    )


class FrameEngine(StageState):
    """The engine of one stage in one epoch. The `first` stage embeds tokens."""

    announce: Callable[[Frame], None] | None = None
    """Sends a frame to the other members of the group, on its first member."""
    failed = False
    """True after a frame could not be finished."""
    last_finished = 0.0
    """Seconds of `time.perf_counter`. When the newest finished frame was finished."""
    _drafts_asked = False  # by the newest frame

    def process(self, frame: Frame) -> Frame:
        """Apply a frame's operations, run its segments, and return the frame for the next hop.

        Raises StaleEpochError for another epoch, and ProtocolError for a frame that is out of order or invalid here.
        """
        begun = self.begin_frame(frame, FrameStamps(0, StageStep))
        out = begun.finish_frame()
        begun.clean_up()
        return out

    def begin_frame(self, frame: Frame, stamps: FrameStamps) -> BegunFrame:
        """Apply a frame's operations and let the device compute its segments. Raises the errors of `process`.

        A frame that continues may begin while the frame before it is unfinished. Frames finish in order.
        """
        started = time.perf_counter()
        stamps.mark(StageStep.BEGUN)
        self.check_header(frame)
        for op in frame.ops:
            self.apply_operation(op)
        late_copies = self.start_copies(frame)
        # The first member decides which segments run. Signals reach the members at different times, so the others
        # follow its frame: a collective that one of them skipped would wait without end.
        segments = frame.segments if self.group.rank else tuple(map(self._mark, frame.segments))
        if self.announce is not None:
            self.announce(self._decided(frame, segments))
        runs: list[Run] = [(self.sequences[s.seq_id], s) for s in segments if not s.cancelled]
        verdict: Verdict | None = None
        x = plain = None
        if runs:
            x = self.stage.forward(self._rows(frame, segments), runs)
            states = [array for sequence, _ in runs for array in sequence.arrays()]
            if self.verifier is not None:
                verdict = self.verifier.begin_verdict(x, runs, states, stamps)
            else:
                plain = plain_array(x)
                stamps.mark(StageStep.BUILT)
                mx.async_eval(plain, *states)
        self.frames_done += 1
        self._drafts_asked = any(segment.drafts for segment in segments)
        return BegunFrame(self, frame, segments, runs, verdict, x, plain, stamps, started, late_copies)

    def can_run_ahead(self, frame: Frame) -> bool:
        """Return whether `frame` may begin before the frame before it is finished.

        MLX copies a K/V cache that unfinished work reads, instead of updating it in place. NVIDIA GPUs have a kernel.
        """
        if self.stage.token_layers:
            return False
        if not (self.first and self.verifier is not None):
            # The token comes from another stage, and the next stage waits for the rows.
            return False
        if self.group.size > 1 and self._drafts_asked:
            # The end of that frame may have collectives, of drafts that the host draws. Members end it at different
            # moments, and all of them must have one order of collectives.
            return False
        held = (self.sequences.get(segment.seq_id) for segment in frame.segments)
        rows = sum(max(1, len(segment.tokens)) for segment in frame.segments)
        copied = sum(s.copied_nbytes(rows) for s in held if s is not None)
        return copied <= this_device().ahead_kv_bytes

    def _mark(self, segment: Segment) -> Segment:
        stale = segment.cancelled or self.sequence_of(segment.seq_id).stack.stale
        if not stale and segment.continues and self.relayed is not None:
            stale = self.relayed.token_of(segment) is None
        return replace(segment, cancelled=True) if stale else segment

    def _decided(self, frame: Frame, segments: tuple[Segment, ...]) -> Frame:
        """Return `frame` as the other members run it: with the tokens and the rows of the segments that run."""
        if self.relayed is not None:
            known = (
                replace(s, tokens=(self.relayed.token_of(s) or 0,), continues=False)
                if s.continues and not s.cancelled
                else s
                for s in segments
            )
            segments = tuple(known)
        pairs = [(b.rows, now.rows) for b, now in zip(frame.segments, segments, strict=True)]
        if not frame.tensor or all(before == now for before, now in pairs):
            return replace(frame, segments=segments)
        row_bytes, start, kept = len(frame.tensor) // frame.rows, 0, []
        for before, now in pairs:
            kept.append(frame.tensor[start : start + now * row_bytes])
            start += before * row_bytes
        rows = sum(now for _, now in pairs)
        if not rows:
            return replace(frame, segments=segments, dtype="", shape=(), tensor=b"")
        shape = (rows, *frame.shape[1:])
        return replace(frame, segments=segments, shape=shape, tensor=b"".join(kept))

    # ---- rows

    def _tokens(self, segments: Sequence[Segment]) -> mx.array:
        """Return the tokens of segments that run, on the first stage: `[rows]`."""
        image = self.stage.modules.config.image_token
        known: list[int | None] = []
        for segment in segments:
            if segment.continues and self.relayed is not None:
                known.append(self.relayed.token_of(segment))
            else:
                known += without_images(segment.tokens, image)
        ahead = [segment for segment in segments if segment.continues]
        if not ahead or self.verifier is None:
            return mx.array(known, mx.uint32)
        chosen = self.verifier.next_tokens(ahead)
        if not known:
            return chosen
        tokens = mx.concatenate([chosen, mx.array(known, mx.int32)])
        chosen_rows, known_rows = iter(range(len(ahead))), iter(range(len(ahead), tokens.size))
        rows = (islice(chosen_rows if s.continues else known_rows, s.width) for s in segments)
        return tokens[mx.array([*chain.from_iterable(rows)])]

    def _rows(self, frame: Frame, segments: tuple[Segment, ...]) -> mx.array:
        """Return the rows to run: embedded tokens on the first stage, otherwise the tensor without stale segments."""
        if not self.first:
            width = self.stage.modules.config.shape.hop_width
            return self._received_rows(frame, segments, width)
        running = [s for s in segments if not s.cancelled]
        words = self._tokens(running)
        if self.stage.token_layers:
            self.stage.announce_tokens(words, [(self.sequences[s.seq_id], s) for s in running])
        x = self.stage.embed(words)
        tokens = [token for segment in running if not segment.open for token in segment.tokens]
        if max(tokens, default=0) < FIRST_IMAGE_TOKEN:
            return x
        flags = [t >= FIRST_IMAGE_TOKEN for s in running for t in s.tokens or (0,) * s.width]
        images = self._received_rows(frame, segments, self.stage.modules.config.hidden_size)
        images = self.stage.in_streams(images)
        return mx.where(mx.array(flags)[:, None], images.astype(x.dtype), x)

    def _received_rows(self, frame: Frame, segments: tuple[Segment, ...], width: int) -> mx.array:
        """Return the rows of the frame's tensor that run. Raises ProtocolError for another shape."""
        if frame.shape != (frame.rows, width):
            raise ProtocolError(f"hidden states {frame.shape}, expected {(frame.rows, width)}")
        x = array_of(frame.dtype, frame.shape, frame.tensor)
        running_rows: list[int] = []
        row = 0
        for before, now in zip(frame.segments, segments, strict=True):
            running_rows += range(row, row + now.rows)
            row += before.rows
        return x if len(running_rows) == x.shape[0] else x[mx.array(running_rows)]


@dataclass
class BegunFrame:
    """A frame whose segments the device computes. Call `finish` and then `clean_up`.

    `segments` are those of `frame`, some of them cancelled here. `verdict` is that of the last stage. `x` are the
    hidden states for the next stage and `plain` their view for Python.
    """

    engine: FrameEngine
    frame: Frame
    segments: tuple[Segment, ...]
    runs: Sequence[Run]
    verdict: Verdict | None
    x: mx.array | None
    plain: mx.array | None
    stamps: FrameStamps
    started: float
    late_copies: list[PrefixEntry]
    outcomes: tuple[Outcome, ...] = ()

    def finish_frame(self) -> Frame:
        """Wait for the device and return the frame for the next hop."""
        frame, stamps, verifier = self.frame, self.stamps, self.engine.verifier
        dtype, shape = "", tuple[int, ...]()
        tensor: memoryview | bytes = b""
        if self.x is not None and verifier is None:
            mx.eval(self.plain)
            stamps.mark(StageStep.COMPUTED)
            dtype, shape, tensor = to_bytes(self.x, self.plain)
            stamps.mark(StageStep.READ)
        elif verifier is not None:
            found = {} if self.verdict is None else self.verdict.finish(stamps)
            self.outcomes = verifier.outcomes(self.segments, found)
            stamps.mark(StageStep.READ)
        now = time.perf_counter()
        elapsed = now - max(self.started, self.engine.last_finished)
        self.engine.last_finished = now
        stage_us = (*frame.stage_us, int(elapsed * 1e6))
        outcomes = self.outcomes or frame.outcomes
        head = (frame.epoch, frame.number, frame.ops, self.segments, outcomes, stage_us)
        return Frame(*head, dtype, shape, tensor)

    def clean_up(self) -> None:
        """Do what the next hop does not wait for: copy prefixes, apply outcomes early, and release memory."""
        if self.late_copies:
            mx.async_eval([list(entry.arrays()) for entry in self.late_copies])
        if self.verdict is not None:
            accepted = {(o.seq_id, o.window): o.accepted_length for o in self.outcomes}
            for sequence, segment in self.runs:
                # Only the coordinator knows whether the text ended before a window that continues.
                if segment.open and not segment.continues:
                    count = accepted[segment.seq_id, segment.window]
                    commit_early(sequence, segment.window, count)
            self.verdict.clean_up()
        self.x = self.plain = self.verdict = None
