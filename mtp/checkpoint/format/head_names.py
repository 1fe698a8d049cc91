"""The names of an MTP head. Exporters use other names than `mtp.`, and repos of a head alone use none. Pure text."""

from __future__ import annotations

import re

_TOP = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers")
"""The modules of a head. All others belong to its decoder layer."""

_PREFIX = re.compile(r"(?:mtp_layers|nextn_layers|nextn|mtp)\.(?:0\.)?")
"""The beginnings that name a head. With a number the exporter keeps the whole head in one layer."""

_ALIASES = (
    (re.compile(r"eh_proj\b"), "fc"),
    (re.compile(r"enorm\b"), "pre_fc_norm_embedding"),
    (re.compile(r"hnorm\b"), "pre_fc_norm_hidden"),
    (re.compile(r"shared_head[._]norm\b"), "norm"),
)
"""From the names of DeepSeek's head, which engines use for all heads, to those of Qwen's."""

_OF_THE_MODEL = ("mtp", "embed_tokens", "lm_head")
"""Modules that have their full name in a repo of a head alone: the head, and copies of modules of the model."""


def with_head_name(local: str) -> str:
    """Return a local name with Qwen's names of the head, if it names a tensor of a head; or else unchanged."""
    found = _PREFIX.match(local)
    return local if found is None else _in_head(local[found.end() :])


def with_head_prefix(local: str) -> str:
    """Return a local name of a repo that holds a head alone, where names may lack the prefix."""
    return local if local.partition(".")[0] in _OF_THE_MODEL else _in_head(local)


def _in_head(within: str) -> str:
    for alias, name in _ALIASES:
        within = alias.sub(name, within, count=1) if alias.match(within) else within
    module = within.partition(".")[0]
    return f"mtp.{within}" if module in _TOP else f"mtp.layers.0.{within}"
