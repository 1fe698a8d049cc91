"""Model names as Ollama's clients write them."""

from __future__ import annotations

from coordinator.api.request.context import Api
from coordinator.api.request.settings import check_model

TAG = ":latest"
"""The tag that Ollama's clients add to a name without one."""


def check_name(api: Api, name: str) -> None:
    """Raise UnknownModelError or ModelNotLoadedError if `name`, with or without the usual tag, is not served."""
    check_model(api, name if api.model.answers_to(name) else name.removesuffix(TAG))


def tagged_name(name: str) -> str:
    """Return `name` with a tag, as Ollama lists it."""
    return name if ":" in name else name + TAG
