"""The log of both programs: one line per record on stderr, as text for people or as JSON for machines.

Values are fields of the record and not part of its message, so that both formats carry them:

    log.info("worker lost", extra={"worker": name, "epoch": epoch})
    12:30:05 WARNING coordinator.cluster.membership: worker lost worker=mac-2 epoch=3

Prompts, generated text, join tokens and keys are never logged, at any level. Records of libraries appear from
`warning` on at every level, because the debug records of gRPC would hide all others.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from enum import StrEnum
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO


class LogLevel(StrEnum):
    """The values of `--log-level`."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    """The values of `--log-format`."""

    text = "text"
    json = "json"


LOG_FILE = "--log-file"
"""The flag of both programs that names the file of the log. A service has it."""

FILE_BYTES, FILES = 10 * 2**20, 5
"""Size of a log file, and how many are kept."""

OURS = ("proto", "mtp", "worker", "coordinator")
"""The loggers that `--log-level` controls. Modules log under their own names."""

_NOT_EXTRA = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
"""The attributes of every LogRecord, and the coloured copy that uvicorn adds. Others come from `extra`."""


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that the caller passed in `extra`, in that order."""
    return {name: value for name, value in vars(record).items() if name not in _NOT_EXTRA}


def _quoted(value: object) -> str:
    """Return one word unchanged and any other text as a JSON string, so that fields remain separable."""
    text = str(value)
    return text if re.fullmatch(r'[^\s"=]+', text) else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """The text format: `time LEVEL logger: message field=value …` in local time, then the traceback if any."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return " ".join([line, *(f"{k}={_quoted(v)}" for k, v in extra_fields(record).items())])


class JsonFormatter(logging.Formatter):
    """The JSON format, one object per record: time (UTC, ISO 8601), level, logger, message, fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Stderr:
    """The current stderr. A progress bar replaces `sys.stderr` to keep log lines above it."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure(
    level: LogLevel = LogLevel.info,
    form: LogFormat = LogFormat.text,
    stream: TextIO | None = None,
    file: Path | None = None,
) -> None:
    """Send this project's records from `level` on, and libraries' warnings, to `stream` (default stderr) or `file`.

    The file rotates. Replaces any earlier configuration. Call this function once, before the first thread starts.
    """
    handler: logging.Handler
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler = RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=FILES)
    else:
        handler = logging.StreamHandler(_Stderr() if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form is LogFormat.json else TextFormatter())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
    for package in OURS:
        logging.getLogger(package).setLevel(threshold)
    logging.captureWarnings(True)
