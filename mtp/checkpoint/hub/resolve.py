"""From what a person calls a model to the directory it lies in."""

from __future__ import annotations

import hashlib
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
from mtp.checkpoint.format.checkpoint import INDEX, weight_map_of
from proto.errors import CheckpointError

log = logging.getLogger(__name__)

BUILTIN = "builtin"

_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
"""What a checkpoint and its tokenizer are made of; a repo's other formats are not fetched."""


_LAST = "config.json"
"""Downloaded when all else is there and checked: without it there is no model."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    if not (snapshot / _LAST).exists():
        return False
    if not index.exists():
        return any(snapshot.glob("*.safetensors"))
    return all((snapshot / file).exists() for file in set(weight_map_of(index).values()))


def _unknown(name: str) -> CheckpointError:
    return CheckpointError(
        f"model {name!r:.200}: no such directory; give a directory, a hub repo as Qwen/Qwen3.5-4B, or "
        f"{BUILTIN}"
    )


def _download(repo: str) -> Path:
    """All of a repo, every file that the hub has a SHA-256 of held to it before config.json makes it a model."""
    log.info(
        "downloading all of the checkpoint", extra={"model": repo, "to": constants.HF_HUB_CACHE}
    )
    found = _snapshot(repo, ignore_patterns=_LAST)
    _check_hashes(repo, found)
    return _snapshot(repo, revision=found.name)


def _check_hashes(repo: str, snapshot: Path) -> None:
    """The hub's library looks at sizes only. It names a file of the cache by the hub's hash: of large files their
    SHA-256. Raises CheckpointError for one that is not what its name says, and removes it."""
    log.info("checking the files against the hub's hashes", extra={"model": repo})
    for link in sorted(snapshot.iterdir()):
        file = link.resolve()
        if not _SHA256.fullmatch(file.name):
            continue
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != file.name:
            link.unlink()
            file.unlink(missing_ok=True)
            raise CheckpointError(
                f"model {repo}: {link.name} was damaged on its way or on this disk, its SHA-256 is not the hub's; "
                "it is removed: try again",
                public="a download was damaged",
            )


def _snapshot(repo: str, revision: str | None = None, ignore_patterns: str | None = None) -> Path:
    """Download what is missing. Every failure is a CheckpointError that says what to do."""
    try:
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=FILES, ignore_patterns=ignore_patterns
            )
        )
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
