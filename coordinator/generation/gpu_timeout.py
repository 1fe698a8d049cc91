"""Recognition of a GPU that gave up a prompt chunk, so that shorter chunks are tried before the request fails."""

from __future__ import annotations

METAL = "[METAL]"
"""Start of MLX's error text for a failed command buffer."""

CAUSES = ("Timeout", "Impacting Interactivity", "ImpactingInteractivity", "OutOfMemory")
"""Metal's names for work that took too long, or needed too much memory. Shorter chunks help against each."""


def is_gpu_timeout(message: str) -> bool:
    """Return whether the text of a pipeline's error names a chunk that was too long for a Metal GPU."""
    return METAL in message and any(cause in message for cause in CAUSES)
