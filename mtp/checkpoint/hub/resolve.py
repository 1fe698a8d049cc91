"""The resolution of a model name to the directory of its checkpoint."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import constants, errors, scan_cache_dir, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars

from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import INDEX, checked_weight_map
from mtp.checkpoint.format.config import read_json_object
from mtp.checkpoint.hub.known_repos import close_names
from mtp.checkpoint.hub.repo import SHA256, download_blobs, find_blobs, repo_name, unreadable
from proto.errors import CheckpointError, ClusterError
from proto.terminal.progress import OnProgress

log = logging.getLogger(__name__)

BUILTIN = "builtin"
"""The name of the model that comes with the package."""

_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
"""The files of a checkpoint and its tokenizer. The other formats of a repo are not downloaded."""

_LAST = "config.json"
"""The file that is downloaded last. A directory without it is not a model."""

LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
"""Folders of LM Studio, today's and the former one. They hold checkpoints as ORG/NAME."""


def resolve_model(
    name: str,
    on_progress: OnProgress = lambda done, total: None,
    stop: threading.Event | None = None,
) -> Path:
    """Return the directory of model `name`: `builtin`, a directory, or a hub repo such as `Qwen/Qwen3.5-4B`.

    Downloads what the local cache lacks of a repo. `on_progress(done, total)` receives the bytes of weights on this
    disk. Raises CheckpointError, and NotReadyError when `stop` interrupts the download.
    """
    return find_model(name) or _download(repo_name(name), on_progress, stop)


def find_model(name: str) -> Path | None:
    """Return the directory of `name` without the network, also in LM Studio's folders; None for an incomplete repo."""
    if name == BUILTIN:
        return checkpoint_dir()
    name = repo_name(name)
    path = Path(name).expanduser()
    is_gguf = any(path.glob("*.gguf")) if path.is_dir() else name.lower().endswith("gguf")
    if name and is_gguf and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"model {name:.200}: GGUF files are not read. Give the checkpoint in safetensors that they were made from, "
            "such as Qwen/Qwen3.5-4B, or its conversion for MLX."
        )
    if name and path.is_dir():
        return path
    if "/" not in name:
        raise _unknown(name)
    try:
        found = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
    except errors.HFValidationError:
        raise _unknown(name) from None
    except errors.LocalEntryNotFoundError:
        return _in_lm_studio(name)
    return found if _is_whole(found) else _in_lm_studio(name)


def _in_lm_studio(repo: str) -> Path | None:
    """Return the directory of `repo`, a valid name, in a folder of LM Studio."""
    found = (Path(folder).expanduser() / repo for folder in LM_STUDIO)
    return next((path for path in found if _is_whole(path)), None)


def local_repos() -> list[str]:
    """Return the repos in the hub's cache and in LM Studio's folders, whole or in part. Blocks for the disk."""
    folders = [Path(folder).expanduser() for folder in LM_STUDIO]
    configs = [config for folder in folders for config in folder.glob(f"*/*/{_LAST}")]
    names = {"/".join(config.parts[-3:-1]) for config in configs}
    with suppress(errors.CacheNotFound):
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
        names |= {repo.repo_id for repo in cache.repos if repo.repo_type == "model"}
    return sorted(names)


def free_bytes() -> int:
    """Return the free bytes of the disk that downloads fill."""
    folder = Path(constants.HF_HUB_CACHE)
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free


def snapshot_of(path: Path) -> tuple[str, str] | None:
    """Return the repo and commit of a directory in the standard cache; None for any other directory."""
    found = _SNAPSHOT.fullmatch("/".join(path.absolute().parts[-3:]))
    return (f"{found[1]}/{found[2]}", found[3]) if found else None


def _is_whole(snapshot: Path) -> bool:
    """Return whether all files are there. A download that was interrupted leaves a part."""
    index = snapshot / INDEX
    if not (snapshot / _LAST).exists():
        return False
    if not index.exists():
        return any(snapshot.glob("*.safetensors"))
    return all((snapshot / file).exists() for file in set(checked_weight_map(read_json_object(index), index).values()))


def _unknown(name: str) -> CheckpointError:
    names = close_names(name)
    meant = f" Did you mean {' or '.join(names)}?" if names else ""
    return CheckpointError(
        f"model {name!r:.200}: no such directory.{meant} Give a directory, a hub repo such as Qwen/Qwen3.5-4B, a short "
        f"name such as qwen3.8:27b, or {BUILTIN}. mtp-coord recommend lists what fits these machines."
    )


def _download(repo: str, on_progress: OnProgress, stop: threading.Event | None) -> Path:
    """Download a repo, and check every file with a known SHA-256 before downloading config.json."""
    log.info("downloading the checkpoint", extra={"model": repo, "to": constants.HF_HUB_CACHE})
    small = _snapshot(repo, skip=[_LAST, "*.safetensors"])
    with hub_errors(repo):
        download_blobs(repo, small.name, find_blobs(repo, small.name), on_progress, stop)
    found = _snapshot(repo, small.name, skip=[_LAST])
    _check_hashes(repo, found)
    return _snapshot(repo, revision=found.name)


def _check_hashes(repo: str, snapshot: Path) -> None:
    """Check the SHA-256 of every large file, by which the hub's library names files of the cache; it checks only sizes.

    Raises CheckpointError for a file that does not match its name, and removes the file.
    """
    log.info("checking the files against the hub's hashes", extra={"model": repo})
    for link in sorted(snapshot.rglob("*.*")):
        file = link.resolve()
        if not SHA256.fullmatch(file.name):
            continue
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != file.name:
            link.unlink()
            file.unlink(missing_ok=True)
            raise CheckpointError(
                f"model {repo}: {link.name} is damaged: its SHA-256 differs from the hub's. The file was removed. "
                "Try again.",
                public="a download was damaged",
            )


def _snapshot(repo: str, revision: str | None = None, skip: list[str] | None = None) -> Path:
    """Download the missing files but `skip`. Return the snapshot's directory, or raise CheckpointError."""
    disable_progress_bars()  # the caller shows progress, and log lines would break the library's bars
    with hub_errors(repo):
        path = snapshot_download(repo, revision=revision, allow_patterns=FILES, ignore_patterns=skip)
        return Path(path)


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Raise the errors of the hub's library as CheckpointErrors that name `repo` and what to do."""
    try:
        yield
    except ClusterError:
        raise
    except errors.RepositoryNotFoundError as error:
        raise unreadable(repo) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"model {repo}: no such directory, not in the local cache, and the hub is unavailable. Connect to the "
            f"network once, or copy the checkpoint and give its directory, or use {BUILTIN}."
        ) from error
    except Exception as error:  # the hub library does not wrap all errors of its HTTP client
        raise CheckpointError(f"model {repo}: the download to {constants.HF_HUB_CACHE} failed: {error}") from error
