"""The download of large files into the hub's cache: interruptible at once, and continued by the next call.

The hub's own library can neither be stopped in the middle of a file nor continue one. It finds the files downloaded
here by their SHA-256 in its cache, and links them into the snapshot.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from huggingface_hub import HfApi, constants
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile

from mtp.checkpoint.hub.repo import HubRepo
from proto.errors import ClusterError, NotReadyError
from proto.progress import OnProgress

THREADS = 4
"""Files downloaded at once. One connection seldom fills a fast line."""

REPORT_SECONDS = 0.25
"""Seconds between two progress reports, and the longest delay of an interruption."""

SUFFIX = ".part"


@dataclass
class Blob:
    """A large file of a repo. `path` is its place in the cache, named by its SHA-256."""

    file: str
    size: int
    path: Path

    @property
    def part(self) -> Path:
        """The file with the bytes that have arrived."""
        return self.path.with_name(self.path.name + SUFFIX)

    @property
    def done(self) -> int:
        """Bytes on this disk."""
        for file in (self.path, self.part):
            if file.exists():
                return min(self.size, file.stat().st_size)
        return 0


def find_blobs(repo: str, commit: str) -> list[Blob]:
    """Return the safetensors files of a repo that the hub stores by their SHA-256. Raises the hub library's errors."""
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    tree = HfApi(endpoint=constants.ENDPOINT).list_repo_tree(repo, revision=commit, recursive=True)
    return [
        Blob(file.path, file.size, folder / "blobs" / file.lfs.sha256)
        for file in tree
        if isinstance(file, RepoFile) and file.lfs and file.path.endswith(".safetensors")
    ]


def download_blobs(
    repo: str,
    commit: str,
    blobs: Sequence[Blob],
    on_progress: OnProgress | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Download the blobs that are not in the cache, and continue those of an earlier, interrupted call.

    `on_progress(done, total)` receives bytes of all blobs, on this thread. `stop` ends the call from another thread
    with NotReadyError; KeyboardInterrupt ends it on this one. Raises CheckpointError when the hub fails.
    """
    stop = stop or threading.Event()
    total = sum(blob.size for blob in blobs)
    waiting: SimpleQueue[Blob] = SimpleQueue()
    for blob in blobs:
        if not blob.path.exists():
            waiting.put(blob)
    errors: list[ClusterError | OSError] = []
    # Daemon threads: the process must be able to end while one of them waits for the network.
    threads = [
        threading.Thread(target=_download, args=(repo, commit, waiting, stop, errors), daemon=True)
        for _ in range(min(THREADS, waiting.qsize()))
    ]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not stop.is_set():
            stop.wait(REPORT_SECONDS)
            if on_progress is not None:
                on_progress(sum(blob.done for blob in blobs), total)
    finally:
        interrupted = stop.is_set() and not errors
        stop.set()
    if errors:
        raise errors[0]
    if interrupted:
        raise NotReadyError(
            f"model {repo}: the download was interrupted. The next start continues it."
        )


def _download(
    repo: str,
    commit: str,
    waiting: SimpleQueue[Blob],
    stop: threading.Event,
    errors: list[ClusterError | OSError],
) -> None:
    """Download blobs of `waiting` one after another. The first error goes to `errors` and stops the other threads."""
    source = HubRepo(repo, commit)
    try:
        while not stop.is_set():
            _download_one(source, waiting.get_nowait(), stop)
    except Empty:
        pass
    except (ClusterError, OSError) as error:
        errors.append(error)
        stop.set()
    finally:
        source.close()


def _download_one(source: HubRepo, blob: Blob, stop: threading.Event) -> None:
    """Append to the part file, and rename it when it is complete. One process at a time does it."""
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    with blob.part.open("ab") as stream:
        while not _lock(stream):
            if stop.wait(REPORT_SECONDS):
                return
        if blob.path.exists():  # another process completed it meanwhile
            return
        start = os.fstat(stream.fileno()).st_size
        for piece in source.read_range(blob.file, start, blob.size):
            stream.write(piece)
            stream.flush()
            if stop.is_set():
                return
        blob.part.replace(blob.path)


def _lock(stream: BinaryIO) -> bool:
    """Lock an open file until it is closed. Return False if another process has locked it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
