"""QR codes as paths of SVG, which the page draws without an image from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import segno

QUIET_MODULES = 4
"""Modules of the light border. The standard requires four."""


@dataclass(frozen=True)
class QrCode:
    """A QR code. `path` is the `d` of an SVG path in a square of `size` units, border included."""

    size: int
    path: str


def draw_qr_code(text: str) -> QrCode:
    """Return the QR code of `text`. Each run of dark modules in a row is one horizontal line of the path."""
    rows = segno.make(text, error="m", micro=False).matrix
    parts = []
    for y, row in enumerate(rows):
        start = None
        for x, dark in enumerate([*row, 0]):
            if dark and start is None:
                start = x
            elif not dark and start is not None:
                parts.append(
                    f"M{start + QUIET_MODULES} {y + QUIET_MODULES}h{x - start}v1h{start - x}z"
                )
                start = None
    return QrCode(len(rows) + 2 * QUIET_MODULES, "".join(parts))
