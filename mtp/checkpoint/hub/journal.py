"""A journal of the verified progress of a download that has no hash on the hub.

After a power failure a file may have its length but not its bytes. So the journal records the written bytes and their
hash after they are on the disk. The next call trusts only the part of the file that matches the journal.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mtp.checkpoint.format.shard import Buffer, ShardWriter, replace_text

RECORD_BYTES = 64 * 1024 * 1024
"""Bytes between two records. A killed download fetches at most this much again."""

_READ_BYTES = 4 * 1024 * 1024


class Journal:
    """The journal of the part file that `writer` has open, stored at `path`. Raises the errors of the writer."""

    def __init__(self, path: Path, writer: ShardWriter) -> None:
        self.path = path
        self.writer = writer
        self._digest = hashlib.sha256()
        self._recorded = 0

    def resume(self) -> None:
        """Rewind the writer to the recorded progress, or to the beginning if the file does not match the record."""
        recorded, sha256 = self._read()
        for start in range(0, recorded, _READ_BYTES):
            self._digest.update(self.writer.read(start, min(_READ_BYTES, recorded - start)))
        if recorded > self.writer.written or self._digest.hexdigest() != sha256:
            recorded, self._digest = 0, hashlib.sha256()
        self.writer.rewind(recorded)
        self._recorded = recorded

    def write(self, data: Buffer) -> None:
        """Append to the file, and record the progress after every RECORD_BYTES."""
        self.writer.write(data)
        self._digest.update(data)
        if self.writer.written - self._recorded >= RECORD_BYTES:
            self.record_progress()

    def record_progress(self) -> None:
        """Flush the file and record its bytes and their hash."""
        self.writer.sync()
        record = {"bytes": self.writer.written, "sha256": self._digest.hexdigest()}
        replace_text(self.path, json.dumps(record))
        self._recorded = self.writer.written

    def _read(self) -> tuple[int, str]:
        try:
            found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            return int(found["bytes"]), str(found["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, ""
