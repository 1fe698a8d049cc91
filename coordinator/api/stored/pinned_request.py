"""The engine's requests of a stored answer, as the journal keeps them: everything that decides the tokens."""

from __future__ import annotations

from typing import Any

from coordinator.generation.request import GenerationRequest
from coordinator.text.model_info import Json
from proto.params import SamplingParams


def pin_request(request: GenerationRequest) -> Json:
    """Return `request` in the types of msgpack."""
    return {
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "params": request.params.to_wire(),
        "stop_tokens": sorted(request.stop_tokens),
        "request_id": request.request_id,
        "turn": request.turn,
        "continued": request.continued,
    }


def pinned_request(content: dict[str, Any]) -> GenerationRequest:
    """Invert `pin_request`. Raises ProtocolError for invalid parameters."""
    return GenerationRequest(
        **{
            **content,
            "prompt": tuple(content["prompt"]),
            "params": SamplingParams.from_wire(content["params"]),
            "stop_tokens": frozenset(content["stop_tokens"]),
        }
    )
