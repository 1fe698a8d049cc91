"""The type of progress callbacks."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""`on_progress(done, total)`, in bytes."""
