"""The repos in the local cache of the hub's library."""

from __future__ import annotations

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound


def cached_repos() -> list[str]:
    """Return the names of the model repos that the cache holds, whole or in part. Blocks for the disk."""
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    return sorted(repo.repo_id for repo in cache.repos if repo.repo_type == "model")
