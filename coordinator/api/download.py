"""The download of the served model, as `/status` shows it before the server has a model."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from coordinator.status.cluster_status import ClusterStatus
from mtp.checkpoint.hub.resolve import resolve_model
from proto.terminal.progress import OnProgress, format_size


class ModelDownload:
    """The download of `model`, and the StatusSource while it runs."""

    def __init__(self, model: str, shown_name: str) -> None:
        self.stop = threading.Event()
        """Set to interrupt the download."""
        self._model = model
        self._shown_name = shown_name
        self._started = time.monotonic()
        self._detail = "opening the model"

    def run(self, on_progress: OnProgress) -> Path:
        """Return the directory of the model, downloaded if needed. Blocks, so it belongs on a thread of its own.

        Raises CheckpointError, and NotReadyError after `stop`.
        """

        def show(done: int, total: int) -> None:
            """Keep the progress for `status` and pass it on."""
            self._detail = f"downloading the model: {format_size(done)} of {format_size(total)}"
            on_progress(done, total)

        return resolve_model(self._model, show, self.stop)

    def status(self) -> ClusterStatus:
        """See StatusSource."""
        uptime = time.monotonic() - self._started
        return ClusterStatus(False, self._shown_name, detail=self._detail, uptime_seconds=uptime)
