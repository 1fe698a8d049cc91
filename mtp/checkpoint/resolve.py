"""From what a person calls a model to the directory it lies in."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from mtp.builtin import checkpoint_dir
from proto.errors import CheckpointError

BUILTIN = "builtin"

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
"""What a checkpoint and its tokenizer are made of; a repo's other formats are not fetched."""

_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def resolve_model(name: str) -> Path:
    """The directory of model `name`: `builtin`, a directory, or a hub repo as `Qwen/Qwen3.5-4B`.

    A repo in the local cache is used as it is; one that is not is downloaded whole, which `HF_ENDPOINT`,
    `HF_TOKEN` and `HF_HUB_OFFLINE` govern. Raises CheckpointError when there is no such model.
    """
    if name == BUILTIN:
        return checkpoint_dir()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _REPO.fullmatch(name):
        raise CheckpointError(
            f"model {name!r:.200}: no such directory; give a directory, a hub repo as Qwen/Qwen3.5-4B, or "
            f"{BUILTIN}"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return _download(name)


def _download(repo: str) -> Path:
    try:
        return Path(snapshot_download(repo, allow_patterns=FILES))
    except GatedRepoError as error:
        raise CheckpointError(
            f"model {repo}: its owner asks you to accept terms first; do so on its page, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {repo}: neither a directory here nor a repo on the hub that you may read; check the "
            "spelling, and HF_TOKEN if it is private"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"model {repo}: no such directory, not in the local cache, and the hub cannot be reached; go "
            f"online once, copy the checkpoint and give its directory, or use {BUILTIN}"
        ) from error
    except Exception as error:  # an HTTP client's errors are not all the hub library's own
        raise CheckpointError(f"model {repo}: the download failed: {error}") from error
