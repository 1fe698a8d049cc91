"""JSON objects of checkpoint files, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proto.errors import CheckpointError


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in `file`.

    Raises CheckpointError for a missing or unreadable file, invalid JSON, or a value that is not an object.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: no such file. Give the directory of a checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    return parse_json_object(content, str(file))


def parse_json_object(content: bytes, source: str) -> dict[str, Any]:
    """Return the object in `content`, which errors name as `source`.

    Raises CheckpointError for invalid JSON and for a value that is not an object.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: holds {type(value).__name__}, not an object")
    return value
