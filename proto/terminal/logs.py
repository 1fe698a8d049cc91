"""The log both programs write: one line a record on stderr, as text for people or JSON for machines.

Facts go into fields, not into the sentence, so that both forms carry them and a search finds them:

    log.info("worker lost", extra={"worker": name, "epoch": epoch})

    text   12:30:05 WARNING coordinator.membership: worker lost worker=mac-2 epoch=3
    json   {"time": "2026-01-31T12:30:05.120+00:00", "level": "warning", "logger": "coordinator.membership",
            "message": "worker lost", "worker": "mac-2", "epoch": 3}

Names are DESIGN's words: worker, stage, span, epoch, seq_id, window, kept, lane. Prompts, generated text, tokens
to join and keys are never logged, at any level. Libraries are heard from `warning` on, whatever the level: at
debug gRPC alone would drown a trace.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO


class LogLevel(StrEnum):
    """What `--log-level` takes."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    """What `--log-format` takes."""

    text = "text"
    json = "json"


OURS = ("proto", "mtp", "worker", "coordinator")
"""The loggers that `--log-level` is for: modules log under their own names."""

_NOT_EXTRA = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
"""What every LogRecord has, and the copy with colours that uvicorn adds; the rest came through `extra`."""


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields the caller gave through `extra`, in the order given."""
    return {name: value for name, value in vars(record).items() if name not in _NOT_EXTRA}


def _quoted(value: object) -> str:
    """As it is when it is one word, else as a JSON string, so that fields can be told apart."""
    text = str(value)
    return text if re.fullmatch(r'[^\s"=]+', text) else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message field=value …`, local time, a traceback after it where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return " ".join([line, *(f"{k}={_quoted(v)}" for k, v in extra_fields(record).items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (UTC, ISO 8601), level, logger, message, the fields, exception."""

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
    """Whatever stderr is when a record comes: a progress bar puts itself in its place, to keep lines above it."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure(
    level: LogLevel = LogLevel.info,
    form: LogFormat = LogFormat.text,
    stream: TextIO | None = None,
) -> None:
    """Send our records of `level` and above, and libraries' warnings, to `stream` (default stderr).

    Replaces what was configured before. Python's warnings go there too: a service has one log. Call it
    once, before the first thread.
    """
    handler = logging.StreamHandler(_Stderr() if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form is LogFormat.json else TextFormatter())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
    for package in OURS:
        logging.getLogger(package).setLevel(threshold)
    logging.captureWarnings(True)
