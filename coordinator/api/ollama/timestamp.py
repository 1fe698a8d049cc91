"""Times in Ollama's format."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> str:
    """Return the current time in RFC 3339 format."""
    return utc_time(datetime.now(UTC).timestamp())


def utc_time(seconds: float) -> str:
    """Return a time in seconds since 1970 in RFC 3339 format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
