"""The forward pass of one stage: the layers of the span over flat rows of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

import mlx.core as mx
import numpy as np

from mtp.device import FrameLimits, this_device
from mtp.layers.layer import KVFormat
from proto.frame import Admit, Segment
from proto.images import ImageLayout, without_images
from proto.kernels import Kernels
from worker.cache.sequence_cache import SequenceCache
from worker.model.layer_variants import choose_variants
from worker.model.loader import StageModules

Run = tuple[SequenceCache, Segment]
"""A segment that runs, and the sequence it extends."""

Piece = Sequence[tuple[SequenceCache, int, bool]]
"""Rows that go through the layers together: of each sequence, how many, and whether they are an open window."""

ALIGNED = 64
"""Rows of the first half of a frame are a multiple, because kernels compute tiles of rows."""

EVALUATED_FIRST = 2
"""Layers that start computing as soon as each is built."""


class StageForward:
    """Layers `[start, end)` of the model, with the embedding on the first stage."""

    def __init__(
        self,
        modules: StageModules,
        kv_format: KVFormat,
        *,
        exact: bool = False,
        kernels: Kernels = Kernels.auto,
        state: Path | None = None,
    ) -> None:
        """Prepare `modules` for this device, by the value of `--kernels`. Raises UsageError for impossible `exact`.

        The state directory `state` keeps the trials of kernels.
        """
        self.dtype = modules.dtype
        self.variants = choose_variants(modules, kv_format, exact=exact, kernels=kernels, state=state)
        self.modules = modules
        self.kv_format = kv_format
        self._cadence = this_device().cadence
        self._least_half: int | None = None
        """Rows of the smaller half of a frame whose halves overlap. Fewer rows cost as much."""
        if modules.communicator.can_overlap and not self.token_layers:
            self._least_half = FrameLimits.here(sparse=modules.config.num_experts > 0).shortest

    def new_sequence(self, admitted: Admit) -> SequenceCache:
        """Return the empty caches of an admitted sequence."""
        caches = [layer.new_cache(self.kv_format) for layer in self.modules.layers]
        images, sections = admitted.images, self.modules.config.image_sections
        layout = ImageLayout(images, sections) if images else None
        return SequenceCache(admitted, caches, layout=layout)

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of `tokens [rows]` in every stream: `[rows, hop width]`. First stage only."""
        embed_tokens = self.modules.embed_tokens
        assert embed_tokens is not None, "this stage is not the first"
        return self.in_streams(embed_tokens(tokens))

    def in_streams(self, rows: mx.array) -> mx.array:
        """Return `rows [rows, hidden]` in every stream."""
        streams = self.modules.config.shape.streams
        return rows if streams == 1 else mx.tile(rows, (1, streams))

    def announce_tokens(self, tokens: mx.array, runs: Sequence[Run]) -> None:
        """Let the layers that read tokens know those of the rows that run next. It waits for `tokens [rows]`."""
        values = np.array(tokens).astype(np.int64)
        for (sequence, _), own in zip(runs, row_ranges([s.width for _, s in runs]), strict=True):
            for layer in self.token_layers:
                sequence.layers[layer].coming = values[own]

    def expect_chunks(self, segments: Sequence[Segment]) -> None:
        """Let the layers that read tokens prepare for the chunks of a frame, which waits for the frame before."""
        image = self.modules.config.image_token
        chunks = [np.array(without_images(s.tokens, image)) for s in segments if not s.open]
        for layer in self.token_layers:
            self.modules.layers[layer].expect_tokens(chunks)

    @property
    def token_layers(self) -> list[int]:
        """The layers that read the tokens of their rows, counted from the first one of the stage."""
        span = self.modules.span
        return [layer - span.start for layer in self.modules.config.shape.token_layers if layer in span]

    def forward(self, x: mx.array, runs: Sequence[Run]) -> mx.array:
        """Run `x [rows, hidden]` through the span, and extend its sequences. Rows belong to `runs` in order.

        Raises ProtocolError, before any layer has run, when a segment does not follow the end of its sequence.
        """
        for sequence, segment in runs:
            sequence.extend(segment)
        parts = _parts(runs, self.variants.split_rows)
        if len(parts) == 1:
            return self._advance(x, runs)
        rows = row_ranges([segment.width for _, segment in runs])
        outputs: dict[int, mx.array] = {}
        for part in parts:
            taken = mx.concatenate([x[rows[i]] for i in part])
            y = self._advance(taken, [runs[i] for i in part])
            own = row_ranges([runs[i][1].width for i in part])
            outputs |= {i: y[span] for i, span in zip(part, own, strict=True)}
        return mx.concatenate([outputs[i] for i in range(len(runs))])

    def _advance(self, x: mx.array, runs: Sequence[Run]) -> mx.array:
        """Run all layers. A GPU computes some while Python builds the next."""
        pieces = _halves(runs, self._least_half)
        if len(pieces) > 1:
            return self._advance_halves(x, pieces)
        (piece,) = pieces
        self.modules.layers[0].enter(x, [sequence.layers for sequence, _, _ in piece], [width for _, width, _ in piece])
        for index in range(len(self.modules.layers)):
            x = self._run_layer(index, x, piece)
            if index < EVALUATED_FIRST or (index + 1) % self._cadence == 0:
                mx.async_eval(x)
        return x

    def _advance_halves(self, x: mx.array, halves: Sequence[Piece]) -> mx.array:
        """Run all layers on two halves of the rows, so that a sum over the group runs beside products.

        MLX computes in the order of `async_eval`: A to its first sum, B to its first sum, A to its second one, and so
        on. A part has an evaluation of its own, because a sum waits on the host for a part of the same one on CUDA.
        """
        communicator = self.modules.communicator
        rows = [*mx.split(x, [sum(width for _, width, _ in halves[0])])]
        done: mx.array | None = None
        for index in range(len(self.modules.layers)):
            sums = list[list[tuple[mx.array, mx.array]]]()
            for half, piece in enumerate(halves):
                communicator.recorded = []
                try:
                    rows[half] = self._run_layer(index, rows[half], piece)
                    sums.append(communicator.recorded)
                finally:
                    communicator.recorded = None
            for part, total in chain.from_iterable(zip(*sums, strict=True)):
                mx.async_eval(part)
                mx.async_eval(total)
            if done is not None:
                # B's rows copy K/V that A's unfinished work reads. Bound the memory to that of two layers.
                mx.eval(done)
            done = rows[-1] if not sums[-1] else sums[-1][-1][1]
        x = mx.concatenate(rows)
        mx.async_eval(x)  # before any sum on the usual stream
        return x

    def _run_layer(self, index: int, x: mx.array, piece: Piece) -> mx.array:
        caches = [sequence.layers[index] for sequence, _, _ in piece]
        widths, stay_open = [width for _, width, _ in piece], [is_open for _, _, is_open in piece]
        x = self.modules.layers[index].forward(x, caches, widths, stay_open)
        return x if x.dtype == self.dtype else x.astype(self.dtype)


def _parts(runs: Sequence[Run], split_rows: int | None) -> list[list[int]]:
    """Return which of `runs` go through the layers together: all, or open windows apart from prompt chunks.

    Few rows and many take different kernels, and an open window must not keep the rows of a chunk in memory.
    """
    every = list(range(len(runs)))
    if split_rows is None or sum(segment.width for _, segment in runs) <= split_rows:
        return [every]
    windows = [i for i in every if runs[i][1].open]
    chunks = [i for i in every if not runs[i][1].open]
    return [part for part in (windows, chunks) if part]


def _halves(runs: Sequence[Run], least: int | None) -> list[Piece]:
    """Return all rows of `runs` as one piece, or as two if the first one has `least` rows. None never halves.

    No open window is divided.
    """
    every = [(sequence, segment.width, segment.open) for sequence, segment in runs]
    left = sum(width for _, width, _ in every) // 2 // ALIGNED * ALIGNED
    if least is None or left < least:
        return [every]
    halves: tuple[list[tuple[SequenceCache, int, bool]], ...] = ([], [])
    for sequence, width, is_open in every:
        taken = min(width, left)
        if taken < width and is_open:
            taken = left = 0
        left -= taken
        for half, count in zip(halves, (taken, width - taken), strict=True):
            if count:
                half.append((sequence, count, is_open))
    return [half for half in halves if half]


def row_ranges(widths: Sequence[int]) -> list[slice]:
    """Return the rows of each of several runs that follow each other."""
    ends = list(accumulate(widths))
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
