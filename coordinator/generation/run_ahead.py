"""The choice of the sequences that a single stage decodes ahead of the coordinator.

In plain decoding the next frame's token is the device's own result. So the next frame may be sent before this one has
returned: its windows continue those in flight, and the device never waits for the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.generation.sequence import Sequence


def sequences_to_run_ahead(decoding: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences of a frame that continues the one in flight, or none.

    All sequences run ahead or none does, so that they stay in one micro-batch. A sequence whose limit is reached by the
    window in flight does not count.
    """
    going = [s for s in decoding if s.tokens_in_flight < s.remaining]
    return going if all(s.can_run_ahead for s in going) else []
