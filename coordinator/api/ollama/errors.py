"""Errors in Ollama's format."""

from __future__ import annotations

from coordinator.api.request.errors import message_of
from coordinator.text.model_info import Json


def ollama_error(error: Exception) -> Json:
    """Return the error body of Ollama's API."""
    return {"error": message_of(error)}
