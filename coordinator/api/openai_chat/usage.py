"""Token counts in OpenAI's format."""

from __future__ import annotations

from coordinator.api.answer.generated_answer import GeneratedAnswer
from coordinator.text.model_info import Json


def usage_of(answer: GeneratedAnswer) -> Json:
    """Return the `usage` of an answer so far. A prompt counts once for all its choices."""
    completion = answer.completion_tokens
    accepted = sum(choice.accepted for choice in answer.choices)
    details = {
        "reasoning_tokens": sum(choice.reasoning_tokens for choice in answer.choices),
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(c.drafted for c in answer.choices) - accepted,
    }
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": details,
    }
