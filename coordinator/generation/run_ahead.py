"""The choice of the sequences that the stages decode ahead of the coordinator.

In plain decoding the last stage knows the token of the next frame before the coordinator does. So the next frame may be
sent before this one has returned: its windows continue those in flight. A single stage takes the token from its device.
Over several stages the last one relays it to the first.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from coordinator.generation.sequence import Sequence


def sequences_to_run_ahead(decoding: Row[Sequence], stages: int) -> list[Sequence]:
    """Return the sequences of the next frame that continues one in flight, or none.

    A sequence whose limit is reached by the windows in flight does not count. On a single stage all sequences run ahead
    or none does, so that they stay in one micro-batch. Over several stages only the micro-batch that was sent first may
    be continued. So frames never wait behind a frame whose tokens come later than theirs.
    """
    group = decoding if stages == 1 else _first_micro_batch(decoding, stages)
    going = [s for s in group if s.tokens_in_flight < s.remaining]
    return going if all(s.can_run_ahead(relayed=stages > 1) for s in going) else []


def _first_micro_batch(decoding: Row[Sequence], stages: int) -> list[Sequence]:
    """Return the sequences of the micro-batch whose newest frame is the oldest.

    There is none while a sequence waits for a place, and where returning frames would make micro-batches more equal.
    """
    count = min(len(decoding), stages)
    frames = [s.newest_frame.number for s in decoding if s.windows_in_flight]
    if len(frames) < len(decoding) or len(set(frames)) != count:
        return []
    first = [s for s, frame in zip(decoding, frames, strict=True) if frame == min(frames)]
    return first if len(first) <= -(-len(decoding) // count) else []
