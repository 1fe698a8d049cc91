"""Files of flags: `serve.toml` and `worker.toml` in the state directory, with the names of the flags as keys."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

from proto.errors import UsageError
from proto.state_dir import read_text, write_private

NOT_KEPT = {"state_dir", "config", "join", "version", "log_file"}
"""Fields that no file holds: they say where the file is, or are used once."""


def read_flags(file: Path, known: set[str]) -> dict[str, Any]:
    """Return the values in `file` by field; empty without a file. Raises UsageError for unreadable or unknown ones."""
    text = read_text(file)
    if text is None:
        return {}
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file}: is not TOML: {error}. Correct or remove it") from error
    found = {key.replace("-", "_"): value for key, value in content.items()}
    if unknown := sorted(found.keys() - (known - NOT_KEPT)):
        flag = unknown[0].replace("_", "-")
        raise UsageError(f"{file}: {flag!r} is not a flag that a file may hold. Remove the line")
    return found


def write_flags(file: Path, options: Any) -> None:
    """Write the fields of `options` that differ from their defaults, readable by their owner only."""
    lines = ["# The flags of this program. A flag on the command line wins over a line here."]
    for one in fields(options):
        value = getattr(options, one.name)
        if one.name in NOT_KEPT or (one.default is not MISSING and value == one.default):
            continue
        lines.append(f"{one.name.replace('_', '-')} = {_toml(value)}")
    write_private(file, "\n".join(lines) + "\n")


@contextlib.contextmanager
def kept_flags(file: Path, options: Any) -> Iterator[None]:
    """Write `options` for the block, and restore the file if the block fails: later starts would read it."""
    before = read_text(file)
    write_flags(file, options)
    try:
        yield
    except BaseException:
        if before is None:
            file.unlink(missing_ok=True)
        else:
            write_private(file, before)
        raise


def _toml(value: Any) -> str:
    """Return a value in TOML: numbers, booleans and lists as they are, all else as the text of its flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple) and not (len(value) == 2 and isinstance(value[1], int)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, tuple):  # an address
        return json.dumps(f"{value[0]}:{value[1]}")
    return json.dumps(value.value if isinstance(value, Enum) else str(value))
