"""The search for models on the hub. The families that this project serves come first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from proto.errors import CheckpointError

FAMILIES = ("qwen3.5", "qwen3.6", "qwen3.8")
"""The families that come first, in this order. Their checkpoints have an MTP head."""

MAX_RESULTS = 30
"""Results of one search: more do not fit on a page."""

MAX_QUERY = 100
"""Characters of a query. Repo names are shorter."""

_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


@dataclass(frozen=True)
class FoundRepo:
    """One repo on the hub. `downloads` counts the last 30 days."""

    name: str
    downloads: int
    mlx: bool
    """The repo holds a checkpoint for MLX; another one can be converted."""


def is_repo_name(name: str) -> bool:
    """Return whether `name` has the form owner/name."""
    return bool(_REPO.fullmatch(name)) and ".." not in name


def search_hub(query: str) -> list[FoundRepo]:
    """Return the repos of text models whose name contains `query`. Without a query, the families' repos.

    Blocks for the network. Raises CheckpointError when the hub does not answer.
    """
    queries = [query[:MAX_QUERY]] if query.strip() else list(FAMILIES)
    found: dict[str, FoundRepo] = {}
    try:
        for text in queries:
            for info in HfApi().list_models(search=text, sort="downloads", limit=MAX_RESULTS):
                tags = info.tags or []
                if is_repo_name(info.id) and "gguf" not in tags:
                    found[info.id] = FoundRepo(info.id, info.downloads or 0, "mlx" in tags)
    except OfflineModeIsEnabled as error:
        raise CheckpointError("hub: offline mode is on. Unset HF_HUB_OFFLINE to search") from error
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError("hub: unavailable. Check the network and try again") from error
    return sorted(found.values(), key=_rank)[:MAX_RESULTS]


def _rank(repo: FoundRepo) -> tuple[int, int]:
    name = repo.name.lower()
    family = next((i for i, text in enumerate(FAMILIES) if text in name), len(FAMILIES))
    return family, -repo.downloads
