"""How far a download got for certain, where no hash of it can be had.

A machine that loses power may keep a file's length and not its bytes. So what is on the disk is noted beside the file,
with its hash, after it is there; the next call believes the note, and of the file only what agrees with it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mtp.checkpoint.format.shard import Buffer, ShardWriter, replace_text

NOTE_BYTES = 64 * 1024 * 1024
"""Written between two notes: as much as a killed download has to fetch again."""

_READ_BYTES = 4 * 1024 * 1024


class Journal:
    """Of the part file that `writer` has open, kept at `path`. Errors are those of the writer."""

    def __init__(self, path: Path, writer: ShardWriter) -> None:
        self.path = path
        self.writer = writer
        self._digest = hashlib.sha256()
        self._noted = 0

    def resume(self) -> None:
        """Rewind the writer to what is noted, or to its beginning where the file is not what was noted."""
        noted, sha256 = self._read()
        for start in range(0, noted, _READ_BYTES):
            self._digest.update(self.writer.read(start, min(_READ_BYTES, noted - start)))
        if noted > self.writer.written or self._digest.hexdigest() != sha256:
            noted, self._digest = 0, hashlib.sha256()
        self.writer.rewind(noted)
        self._noted = noted

    def write(self, data: Buffer) -> None:
        """Append to the file, and note it now and then."""
        self.writer.write(data)
        self._digest.update(data)
        if self.writer.written - self._noted >= NOTE_BYTES:
            self.note()

    def note(self) -> None:
        """Note all that is written, once it is on the disk."""
        self.writer.sync()
        note = {"bytes": self.writer.written, "sha256": self._digest.hexdigest()}
        replace_text(self.path, json.dumps(note))
        self._noted = self.writer.written

    def _read(self) -> tuple[int, str]:
        try:
            found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            return int(found["bytes"]), str(found["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, ""
