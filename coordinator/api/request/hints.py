"""Hints: request fields that never change the answer's meaning here, accepted and reported instead of rejected."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

HINTS = (
    "cache_control",
    "client_metadata",
    "context_management",
    "include",
    "messages[].name",
    "metadata",
    "options.f16_kv",
    "options.low_vram",
    "options.main_gpu",
    "options.num_batch",
    "options.num_ctx",
    "options.num_gpu",
    "options.num_keep",
    "options.num_thread",
    "options.numa",
    "options.use_mlock",
    "options.use_mmap",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "provider_specific_fields",
    "reasoning.summary",
    "reasoning_details",
    "safety_identifier",
    "service_tier",
    "store",
    "thinking_blocks",
    "tools[].eager_input_streaming",
    "tools[].strict",
    "tools[].web_search",
    "verbosity",
)
"""The fields that this server accepts without effect. `GET /v1/models` lists them as `ignored_fields`."""


class HintLog:
    """The hints that clients have sent to this process, in `reported`. Each is logged once."""

    def __init__(self) -> None:
        self.reported: set[str] = set()

    def report_hint(self, name: str) -> None:
        """Log that the field `name` has no effect, unless it is logged already."""
        assert name in HINTS, f"{name} is not a hint"
        if name not in self.reported:
            self.reported.add(name)
            log.info("request field has no effect here", extra={"field": name})
