"""Sizes in bytes as people write them, on both programs' command lines and in their messages."""

from __future__ import annotations

import re

from proto.errors import UsageError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def parse_size(text: str) -> int:
    """`64GB` (powers of 1,000, as macOS counts), `64GiB` (of 1,024) or plain bytes, as bytes.

    Raises UsageError when the text is none of these, or is nothing.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or match[2].upper() not in _UNITS or len(match[1]) > 20:
        raise UsageError(f"{text!r:.60} is no size: write it as in 64GB, 512MiB or 1.5TB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size == 0:
        raise UsageError(f"{text!r:.60}: a size above zero is needed")
    return size


def format_size(count: int) -> str:
    """`17.4 GB`: three digits, powers of 1,000."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
