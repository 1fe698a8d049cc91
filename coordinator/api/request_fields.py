"""The table of the fields that other servers have and no body here: hints, refused values and synonyms.

docs/API.md shows the table, and a test compares both. The fields of a body are attributes of its class.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from coordinator.api.errors import field_error
from coordinator.text.calls import Json

log = logging.getLogger(__name__)

HINTS = frozenset(
    """
    add_bos_token add_special_tokens allowed_domains annotations background_tasks blocked_domains cache_control
    cache_prompt cache_salt caller chat_id citations client_metadata context_management defer_loading description
    display draft_model dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
    dynatemp_high dynatemp_low dynatemp_max dynatemp_min eager_input_streaming early_stopping f16_kv features files
    filter_ids guided_decoding_backend guided_whitespace_pattern id id_slot include include_obfuscation
    include_reasoning index keep_alive kv_transfer_params length_penalty logits_all low_vram main_gpu max_length
    max_tokens_second max_tool_calls max_uses media_io_kwargs metadata min_keep mirostat_eta mirostat_tau
    mm_processor_kwargs modalities moderation n_keep name num_batch num_ctx num_gpu num_keep num_thread numa parsed
    parsed_arguments penalize_newline penalize_nl prediction preserved_tokens priority prompt_cache_key
    prompt_cache_options prompt_cache_retention provider_specific_fields reasoning.exclude reasoning.summary
    reasoning_details rep_pen_range rep_pen_slope repeat_last_n repetition_penalty_range request_id response_fields
    return_progress safety_identifier sampler_order sampler_priority samplers service_tier session_id shift signature
    slot_id smoothing_curve spaces_between_special_tokens speculative_ngram store stream_options strict
    temperature_last thinking.display thinking_blocks timings_per_token tool_ids tool_servers tools[].web_search
    truncate truncation truncation_length ttl type use_mlock use_mmap user_location verbose verbosity vllm_xargs
    vocab_only web_search_options
    """.split()
)
"""Fields of other servers and clients, accepted without effect. `GET /v1/models` lists them as `ignored_fields`."""

_REFUSED = {
    "": """
        bad_words banned_strings banned_tokens custom_token_bans allowed_token_ids logits_processors lora
        grammar grammar_string grammar_triggers guided_grammar structured_outputs.grammar structural_tag
        structured_outputs.structural_tag negative_prompt chat_template template documents functions suffix
        context images audio refusal prompt_logprobs prompt_embeds prompt conversation container mcp_servers""",
    "0": """
        min_tokens min_length mirostat mirostat_mode dynatemp_range dry_multiplier n_probs top_logprobs
        logprobs top_a skew smoothing_factor epsilon_cutoff eta_cutoff no_repeat_ngram_size penalty_alpha
        repetition_decay""",
    "0 -1": "nsigma top_n_sigma t_max_predict_ms truncate_prompt_tokens",
    "1": """
        best_of num_beams typical_p typical tfs tfs_z guidance_scale encoder_repetition_penalty""",
    "true": "skip_special_tokens do_sample",
    "false": """
        use_beam_search include_stop_str_in_output return_tokens_as_token_ids post_sampling_probs
        grammar_lazy dynamic_temperature""",
    '"auto" "none"': "function_call",
}
NEUTRAL = {
    name: [json.loads(value) for value in values.split()]
    for values, names in _REFUSED.items()
    for name in names.split()
}
"""The values without effect of fields that change the answer, besides empty ones. Other values are refused."""

SYNONYMS = {
    "max_tokens": "n_predict num_predict max_new_tokens max_completion_tokens",
    "max_output_tokens": "max_tokens max_completion_tokens",
    "repetition_penalty": "repeat_penalty rep_pen",
    "seed": "sampler_seed",
    "stop": "stopping_strings stop_sequences",
    "ignore_eos": "ban_eos_token",
    "reasoning_effort": "reasoning.effort",
    "enable_thinking": "thinking.type reasoning.enabled",
    "thinking_budget": "thinking.budget_tokens reasoning.max_tokens thinking_token_budget",
    "guided_json": "json_schema structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "reasoning_content": "messages[].reasoning messages[].thinking",
}
"""Other names of a field. They count only in bodies that have the field."""

_SYNONYMS = [(name, target) for target, names in SYNONYMS.items() for name in names.split()]

_OBJECTS = ("reasoning", "thinking", "structured_outputs")
"""Fields whose members have rows of their own in the table."""

SWITCH = {"enabled": True, "adaptive": True, "disabled": False}
"""The values of `thinking.type`, as `enable_thinking` has them."""

MAX_UNKNOWN = 32
"""Maximum number of unknown fields of a request that its answer names."""


@dataclass
class FieldNotes:
    """The fields of a request that its body lacks: `unknown` ones, and `synonyms` from field to the client's name."""

    unknown: set[str] = field(default_factory=set)
    synonyms: dict[str, str] = field(default_factory=dict)

    def translate(self, sent: Json, names: Set[str], place: str) -> Json:
        """Return `sent` with fields of `names` only. Raises PydanticCustomError for a value that changes the answer."""
        if sent.keys() <= names:
            return sent
        known = {name: value for name, value in sent.items() if name in names}
        for name, value in sent.items():
            if name in names:
                continue
            if name in _OBJECTS and isinstance(value, dict):
                for member, inner in value.items():
                    self._apply_row(f"{name}.{member}", inner, known, names, place)
            else:
                self._apply_row(name, value, known, names, place)
        return known

    def _apply_row(self, name: str, value: Any, known: Json, names: Set[str], place: str) -> None:
        """Apply the table to one field that is not in `names`. A synonym is added to `known`."""
        if value is None:
            return
        paths = {place + name, name}
        for path, target in _SYNONYMS:
            if path in paths and target in names:
                value = SWITCH.get(str(value), value) if name == "thinking.type" else value
                if known.get(target) not in (None, value):
                    raise field_error(name, f"differs from {target}. Send one of them.")
                known[target] = value
                self.synonyms[target] = name
                return
        if name in NEUTRAL:
            _check_neutral(name, value)
        elif HINTS.isdisjoint(paths):
            self.add_unknown(place + name)

    def add_unknown(self, path: str) -> None:
        """Record an ignored field, in characters that a header may have, and log it once."""
        if len(self.unknown) < MAX_UNKNOWN:
            printable = re.sub(r"[^\w.\[\]-]", "?", path, flags=re.ASCII)[:64]
            self.unknown.add(printable)
            _log_unknown(printable)


@lru_cache(1024)
def _log_unknown(name: str) -> None:
    log.info("unknown request field ignored", extra={"field": name})


def _check_neutral(name: str, value: Any) -> None:
    if value in (*NEUTRAL[name], "", [], {}):
        return
    if name in ("images", "audio"):
        raise field_error(
            name, "not supported here. Send images as parts of the content, and no audio."
        )
    values = "".join(f" or send {json.dumps(each)}" for each in NEUTRAL[name][:1])
    raise field_error(name, f"{value!r:.40} is not supported. Omit the field{values}.")
