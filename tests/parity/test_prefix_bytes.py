"""A prefix entry is never larger than the coordinator's estimate, since workers end a plan that exceeds it."""

from __future__ import annotations

import pytest

from coordinator.pipeline.local_pipeline import LocalModel
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.layer import KVFormat
from proto.frame import Admit, Frame, SavePrefix, Segment
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.stages.chain import Chain


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("chunks", [(128, 52), (64, 64), (127, 1), (96, 63)])
def test_prefix_entries_stay_within_the_estimate(
    checkpoints: Checkpoints, bits: int | None, chunks: tuple[int, ...]
) -> None:
    """An entry stays within the estimate for any number of hidden states that wait for the head.

    Up to 63 wait, and each is wider than the K/V it becomes.
    """
    path = checkpoints()
    config = Checkpoint.open(path).config
    form = KVFormat.of(config.head_dim, bits)
    model = LocalModel(Checkpoint.open(path), [Span(0, config.num_layers)], kv_bits=bits)
    chain = Chain(path, kv_format=form)
    (engine,) = chain.engines
    end = 0
    for number, width in enumerate(chunks):
        ops = (Admit(0, 300, 200),) if number == 0 else ()
        segment = Segment(0, number, end, (1,) * width, sample=False)
        engine.process(Frame(1, number, ops, (segment,)))
        end += width
    engine.process(Frame(1, len(chunks), (SavePrefix(0, 0),)))
    (entry,) = engine.report_state().prefixes
    assert entry.bytes <= model.capacity().entry_bytes(end)
