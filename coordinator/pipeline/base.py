"""The seam between the generation loop and whatever carries frames: stages in this process, or workers."""

from __future__ import annotations

from typing import Protocol

from coordinator.planning.capacity import Capacity
from proto.errors import ClusterError
from proto.frame import Frame


class Pipeline(Protocol):
    """A plan that serves: takes frames in order, gives them back in the same order with outcomes.

    `send`, `rollback` and `cancel` return at once; the scheduler bounds what is in flight.
    """

    epoch: int
    stages: int
    capacity: Capacity

    def send(self, frame: Frame) -> None:
        """Queue a frame for stage 0. A failure shows in `receive`."""
        ...

    async def receive(self) -> Frame:
        """The next frame back from the last stage.

        Raises WorkerLostError (or what the stage raised) when the plan can go on no longer; every later call does too.
        """
        ...

    def rollback(self, seq_id: int, window: int, accepted_length: int, trim: int) -> None:
        """Tell every stage at once that a window lost tokens."""
        ...

    def cancel(self, seq_id: int) -> None:
        """Tell every stage at once that nobody waits for a sequence."""
        ...

    def fail(self, error: ClusterError) -> None:
        """Make `receive` raise `error`: whoever planned this pipeline has given it up."""
        ...

    async def close(self) -> None:
        """Stop using these stages; within seconds."""
        ...


class PipelineSource(Protocol):
    """Gives the pipeline of the plan in force, and a new one when that fails."""

    async def acquire(self) -> Pipeline:
        """Wait for a plan that serves. Raises ClusterError when none can be had within the source's deadline."""
        ...

    def failed(self, pipeline: Pipeline, error: Exception) -> None:
        """The loop had to give up `pipeline`."""
        ...
