"""From what a person calls a model to the directory it lies in."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from mtp.builtin import checkpoint_dir
from mtp.checkpoint.checkpoint import INDEX, weight_map_of
from proto.errors import CheckpointError

log = logging.getLogger(__name__)

BUILTIN = "builtin"

_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
"""What a checkpoint and its tokenizer are made of; a repo's other formats are not fetched."""


def resolve_model(name: str) -> Path:
    """The directory of model `name`: `builtin`, a directory, or a hub repo as `Qwen/Qwen3.5-4B`.

    A repo in the local cache is used as it is; one that is not is downloaded whole, which `HF_ENDPOINT`,
    `HF_TOKEN` and `HF_HUB_OFFLINE` govern. Raises CheckpointError when there is no such model.
    """
    return find_model(name) or _download(name)


def find_model(name: str) -> Path | None:
    """As `resolve_model`, but None for a repo that is not whole in the local cache. Nothing is asked of the hub."""
    if name == BUILTIN:
        return checkpoint_dir()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if "/" not in name:
        raise _unknown(name)
    try:
        found = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
    except HFValidationError:
        raise _unknown(name) from None
    except LocalEntryNotFoundError:
        return None
    return found if _is_whole(found) else None


def snapshot_of(path: Path) -> tuple[str, str] | None:
    """Repo and commit of a directory of the standard cache; None for any other."""
    found = _SNAPSHOT.fullmatch("/".join(path.absolute().parts[-3:]))
    return (f"{found[1]}/{found[2]}", found[3]) if found else None


def _is_whole(snapshot: Path) -> bool:
    """The cache also keeps what a broken download, or another program that wanted one file, has left."""
    index = snapshot / INDEX
    if not index.exists():
        return any(snapshot.glob("*.safetensors"))
    return all((snapshot / file).exists() for file in set(weight_map_of(index).values()))


def _unknown(name: str) -> CheckpointError:
    return CheckpointError(
        f"model {name!r:.200}: no such directory; give a directory, a hub repo as Qwen/Qwen3.5-4B, or "
        f"{BUILTIN}"
    )


def _download(repo: str) -> Path:
    log.info(
        "downloading all of the checkpoint", extra={"model": repo, "to": constants.HF_HUB_CACHE}
    )
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
        raise CheckpointError(
            f"model {repo}: the download to {constants.HF_HUB_CACHE} failed: {error}"
        ) from error
