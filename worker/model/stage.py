"""The forward pass of one stage: the layers of the span over flat rows of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import mlx.core as mx
import numpy as np

from mtp.device import this_device
from mtp.layers.layer import KVFormat
from proto.frame import Admit, Segment
from proto.images import ImageLayout, without_images
from proto.kernels import Kernels
from worker.cache.sequence_cache import SequenceCache
from worker.model.layer_variants import choose_variants
from worker.model.loader import StageModules

Run = tuple[SequenceCache, Segment]
"""A segment that runs, and the sequence it extends."""

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
        widths = [segment.width for _, segment in runs]
        stay_open = [segment.open for _, segment in runs]
        self.modules.layers[0].enter(x, [sequence.layers for sequence, _ in runs], widths)
        for index, layer in enumerate(self.modules.layers):
            caches = [sequence.layers[index] for sequence, _ in runs]
            x = layer.forward(x, caches, widths, stay_open)
            x = x if x.dtype == self.dtype else x.astype(self.dtype)
            if index < EVALUATED_FIRST or (index + 1) % self._cadence == 0:
                mx.async_eval(x)
        return x


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


def row_ranges(widths: Sequence[int]) -> list[slice]:
    """Return the rows of each of several runs that follow each other."""
    ends = list(accumulate(widths))
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
