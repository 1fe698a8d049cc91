"""The forward pass of one stage: the layers of the span over flat rows of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

ALIGNED = 64
"""Rows of the first half of a frame are a multiple, because kernels compute tiles of rows."""

EVALUATED_FIRST = 2
"""Layers that start computing as soon as each is built."""


@dataclass(frozen=True)
class Rows:
    """Rows that go through the layers together: of each sequence, how many, and whether they are an open window."""

    sequences: list[SequenceCache]
    widths: list[int]
    stay_open: list[bool]


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
        self.least_half: int | None = None
        """Least rows of half a frame in a group. Fewer cost as much. None computes all rows together."""
        if this_device().halves_chunks and modules.communicator.can_overlap and not self.token_layers:
            self.least_half = FrameLimits.here(sparse=modules.config.num_experts > 0).shortest

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
        parts = halves(runs, self.least_half)
        if len(parts) > 1:
            return self._advance_halves(x, parts)
        (rows,) = parts
        # Only layers that no group has do anything here.
        self.modules.layers[0].enter(x, [sequence.layers for sequence in rows.sequences], rows.widths)
        for index in range(len(self.modules.layers)):
            x = self._run_layer(index, x, rows)
            if index < EVALUATED_FIRST or (index + 1) % self._cadence == 0:
                mx.async_eval(x)
        return x

    def _advance_halves(self, x: mx.array, parts: Sequence[Rows]) -> mx.array:
        """Run all layers on two halves of the rows, so that sums of one half run beside products of the other.

        The device computes in the order of `async_eval`: A to its first sum, B to its first sum, A to its second one,
        and so on. Each part is evaluated before its sum, which can then begin while the device computes on.
        """
        communicator, both = self.modules.communicator, [*mx.split(x, [sum(parts[0].widths)])]
        for index in range(len(self.modules.layers)):
            before, sums = both[-1], list[list[tuple[mx.array, mx.array]]]()
            for half, rows in enumerate(parts):
                communicator.recorded = []
                try:
                    both[half] = self._run_layer(index, both[half], rows)
                    sums.append(communicator.recorded)
                finally:
                    communicator.recorded = None
            for pair in chain.from_iterable(zip(*sums, strict=True)):
                for array in pair:
                    mx.async_eval(array)
            # B copies the K/V that unfinished work of A reads. Here the copies of all earlier layers are released.
            mx.eval(before)
        x = mx.concatenate(both)
        # The last sums have to come before later ones, which MLX may run on another stream.
        mx.async_eval(x)
        return x

    def _run_layer(self, index: int, x: mx.array, rows: Rows) -> mx.array:
        caches = [sequence.layers[index] for sequence in rows.sequences]
        x = self.modules.layers[index].forward(x, caches, rows.widths, rows.stay_open)
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


def halves(runs: Sequence[Run], least: int | None) -> list[Rows]:
    """Return the rows of `runs` together, or as two halves if the first one has `least` rows. None never halves.

    No open window is divided.
    """
    left = sum(segment.width for _, segment in runs) // 2 // ALIGNED * ALIGNED
    both = [Rows([], [], []), Rows([], [], [])]
    left = 0 if least is None or left < least else left
    for sequence, segment in runs:
        first = min(segment.width, left)
        if segment.open and first < segment.width:
            first = left = 0
        left -= first
        for half, width in zip(both, (first, segment.width - first), strict=True):
            if width:
                half.sequences.append(sequence)
                half.widths.append(width)
                half.stay_open.append(segment.open)
    return [half for half in both if half.widths]


def row_ranges(widths: Sequence[int]) -> list[slice]:
    """Return the rows of each of several runs that follow each other."""
    ends = list(accumulate(widths))
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
