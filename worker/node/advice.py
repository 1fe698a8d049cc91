"""The advice in the log of a worker that no coordinator uses, and the record of the coordinator that it joined."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from proto.announcement import JOIN_FLAG
from proto.errors import AccessError, ClusterError, UsageError
from proto.state_dir import read_json, write_private
from proto.trust.joining import check_coordinator
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

LONELY_SECONDS = 5.0
"""Seconds without a coordinator after which the log says what to do."""

REPEAT_SECONDS = 30.0
"""Seconds between two looks at the coordinator. Only another advice is logged."""


class Advisor:
    """The advice for one worker. `alone` is that of a worker that has joined no other machine's cluster."""

    def __init__(self, file: Path, trust: NodeTrust | None, alone: str) -> None:
        self._file, self._trust, self._alone = file, trust, alone
        self._known: dict[str, Any] = {}
        with contextlib.suppress(UsageError):  # damaged
            self._known = read_json(file) if trust else {}
        self._due, self._advice = time.monotonic() + LONELY_SECONDS, ""

    def record_coordinator(self, name: str) -> None:
        """Keep the name of the coordinator that uses this worker, for the commands on this machine."""
        self._due, self._advice = time.monotonic() + LONELY_SECONDS, ""
        if self._known and self._known.get("name") != name:
            self._known["name"] = name
            with contextlib.suppress(UsageError):  # such as a full disk
                write_private(self._file, json.dumps(self._known))

    async def advise(self) -> None:
        """Log what to do, if it is due and was not logged before."""
        if time.monotonic() < self._due:
            return
        advice = await self._current_advice()
        self._due = time.monotonic() + REPEAT_SECONDS
        if advice != self._advice:
            log.info("no coordinator yet. %s", advice)
        self._advice = advice

    async def _current_advice(self) -> str:
        address = str(self._known.get("join", ""))
        if self._trust is None or not address:
            return self._alone
        name = str(self._known.get("name", "")).rpartition(":")[0]
        where = f"{name} at {address}" if name else f"The one at {address}"
        try:
            await check_coordinator(self._trust, address)
        except AccessError:
            return (
                f"{where} has another cluster than this machine, such as after its state was deleted. Restart this "
                f"worker with {JOIN_FLAG} there"
            )
        except ClusterError:
            return (
                f"{where} does not answer. Start mtp-coord serve there. If it has another address now, restart this "
                f"worker with {JOIN_FLAG}"
            )
        return f"{where} does not use this worker. mtp-coord status there shows the reason"
