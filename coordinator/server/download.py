"""The download of the served model, as `/status` shows it before the server has a model."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

from coordinator.status.cluster_status import ClusterStatus
from mtp.checkpoint.hub.resolve import resolve_model
from proto.progress import OnProgress
from proto.terminal.size import format_size

SPEED_SECONDS = 5.0
"""Seconds over which the speed is averaged."""


class ModelDownload:
    """The download of `model`, and the StatusSource while it runs."""

    def __init__(self, model: str, shown_name: str) -> None:
        self.stop = threading.Event()
        """Set to interrupt the download."""
        self._model = model
        self._shown_name = shown_name
        self._started = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque()
        self._total = 0

    def run(self, on_progress: OnProgress) -> Path:
        """Return the directory of the model, downloaded if needed. Blocks, so it belongs on a thread of its own.

        Raises CheckpointError, and NotReadyError after `stop`.
        """

        def record(done: int, total: int) -> None:
            """Keep the samples of the last SPEED_SECONDS and pass the progress on."""
            now = time.monotonic()
            self._total = total
            self._samples.append((now, done))
            while now - self._samples[0][0] > SPEED_SECONDS:
                self._samples.popleft()
            on_progress(done, total)

        return resolve_model(self._model, record, self.stop)

    def status(self) -> ClusterStatus:
        """See StatusSource."""
        uptime = time.monotonic() - self._started
        return ClusterStatus(False, self._shown_name, detail=self._detail(), uptime_seconds=uptime)

    def _detail(self) -> str:
        if not self._samples:
            return "opening the model"
        (first, before), (last, done) = self._samples[0], self._samples[-1]
        speed = (done - before) / (last - first) if last > first else 0.0
        return (
            f"downloading the model: {format_size(done)} of {format_size(self._total)}, "
            f"{format_size(int(speed))}/s"
        )
