"""Byte ranges of the files of a hub repo.

The hub's library downloads whole files, and discards an interrupted one. `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`
and the standard cache apply.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from typing import Any, Self

import httpx
from huggingface_hub import HfApi, constants, get_token, hf_hub_url, set_client_factory, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils._validators import validate_repo_id

from mtp.checkpoint.format import shard
from mtp.checkpoint.hub.known_repos import known_repo
from proto.errors import CheckpointError, ClusterError, NotReadyError
from proto.terminal.progress import OnProgress

CONNECT_SECONDS = 10.0
"""Seconds. Deadline of a connection to the hub."""

READ_SECONDS = 20.0
"""Seconds of silence within an answer, after which the rest is requested again. ATTEMPTS of them end before a
coordinator gives up a silent worker."""

ATTEMPTS = 5
"""Consecutive failures without received bytes after which a read fails."""

FIRST_PAUSE = 0.5
"""Seconds before the second attempt. The pause doubles before each further attempt."""

MAX_SMALL_BYTES = 64 * 2**20
"""Bytes. Bounds a file that is read as a whole. The index of the largest checkpoints takes 10 MB."""

SHA256 = re.compile(r"[0-9a-f]{64}")

_COMMIT = re.compile(r"[0-9a-f]{40}")

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


def unreadable(repo: str) -> CheckpointError:
    """Return the error for a repo that is not there, private or gated."""
    return CheckpointError(
        f"model {repo}: neither a directory here nor a repo on the hub that you may read. Check the spelling. For a "
        "private repo set HF_TOKEN; for a gated one accept the terms on its page before."
    )


_ADDRESS = re.compile(r"https?://[^/]+/([^/?#]+/[^/?#]+)")


def repo_name(name: str) -> str:
    """Return the repo of a hub's page whose address is `name`, or that a short name means; other names as they are."""
    if found := _ADDRESS.match(name):
        return found[1]
    known = known_repo(name) if "/" not in name else None
    return known.name if known else name


def _check_value(kind: str, value: str, *, valid: bool) -> None:
    if not valid:
        raise CheckpointError(f"the hub at {constants.ENDPOINT} sent {value!r:.300} as {kind}. Use another hub.")


def _check_file(name: str) -> None:
    path = PurePosixPath(name)
    inside = name.isprintable() and path.name and not path.is_absolute() and ".." not in path.parts
    _check_value("the name of a file", name, valid=bool(inside))


def _check_commit(commit: str) -> None:
    _check_value("a commit", commit, valid=bool(_COMMIT.fullmatch(commit)))


def _check_answer(response: Any) -> None:
    """Raise CheckpointError for values of an answer to the hub's library that lead out of the cache.

    The library makes paths of them.
    """
    for name in ("ETag", "X-Linked-ETag", "X-Xet-Hash"):
        if (tag := response.headers.get(name)) is not None:
            _check_file(tag.lstrip("W/").strip('"'))
    commits, files = [response.headers.get("X-Repo-Commit")], []
    if "/api/models/" in response.url.path:
        response.read()
        with suppress(ValueError):  # the library says what is wrong
            found = response.json()
            for entry in found if isinstance(found, list) else [found]:
                large = entry.get("lfs") or {}
                commits.append(entry.get("sha"))
                files += [entry.get("path"), entry.get("oid"), entry.get("xetHash"), large.get("oid")]
    for value in filter(None, commits):
        _check_commit(str(value))
    for value in filter(None, files):
        _check_file(str(value))


def _checking_client() -> Any:
    """Return the client of the hub's library, with a check of every answer."""
    client = default_client_factory()
    client.event_hooks = {**client.event_hooks, "response": [*client.event_hooks["response"], _check_answer]}
    return client


set_client_factory(_checking_client)


class TransientError(Exception):
    """A failure of the hub that may be temporary."""


class HubRepo:
    """A reader of the files of `repo` at `revision`, `main` or a commit, for one thread at a time. A context manager.

    The first answer pins a branch to its commit. Files in the local cache are read there. Every failure is raised as a
    CheckpointError that says what to do.
    """

    def __init__(self, repo: str, revision: str = "main") -> None:
        self.repo = repo_name(repo)
        try:
            validate_repo_id(self.repo)
        except HFValidationError:
            raise unreadable(f"{self.repo!r:.200}") from None
        if revision != "main":
            _check_commit(revision)
        self.revision = revision
        self._sizes: dict[str, int] = {}
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx.Client(follow_redirects=True, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def size(self, file: str) -> int | None:
        """Return the bytes of a file; None when the repo does not have this file."""
        if (cached := self._cached(file)) is not None:
            return cached.stat().st_size
        try:
            for _ in self._read(file, 0, 1):
                return self._sizes[file]
        except FileNotFoundError:
            pass
        return None

    def read(self, file: str) -> bytes | None:
        """Return the content of a small file; None when the repo does not have this file."""
        if (size := self.size(file)) is None:
            return None
        if size > MAX_SMALL_BYTES:
            raise CheckpointError(
                f"{self.repo}: {file}: {size} bytes exceed the limit of {MAX_SMALL_BYTES}. Give another repo."
            )
        return b"".join(self.read_range(file, 0, size))

    def read_header(self, file: str) -> shard.Header:
        """Read the header of a safetensors file."""
        if (size := self.size(file)) is None:
            raise self._missing(file)
        name = Path(file)
        prefix = b"".join(self.read_range(file, 0, min(shard.LENGTH_BYTES, size)))
        end = shard.LENGTH_BYTES + shard.header_bytes(name, prefix, size)
        return shard.parse_header(name, b"".join(self.read_range(file, shard.LENGTH_BYTES, end)), size)

    def read_range(self, file: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes `[start, end)` of a file in pieces; after a broken connection, request only the rest."""
        if (cached := self._cached(file)) is not None:
            yield from shard.read_file(cached, start, end)
            return
        try:
            yield from self._read(file, start, end)
        except FileNotFoundError:
            raise self._missing(file) from None

    def _read(self, file: str, start: int, end: int) -> Iterator[bytes]:
        """Yield a range from the hub. Raises CheckpointError after ATTEMPTS failures, and FileNotFoundError."""
        failures = 0
        while start < end:
            try:
                with self._get(file, start, end) as response:
                    for piece in response.iter_raw():
                        piece = piece[: end - start]
                        failures = 0
                        start += len(piece)
                        yield piece
                if start < end:
                    raise TransientError("the hub's answer ended early")
            except (TransientError, httpx.TransportError) as error:
                failures += 1
                if failures == ATTEMPTS:
                    raise CheckpointError(
                        f"{self.repo}/{file}: the hub at {constants.ENDPOINT} is unavailable or interrupts the "
                        f"download: {str(error) or type(error).__name__}. Try again later. Without a network give "
                        "the directory of a checkpoint.",
                        public="a download failed",
                    ) from error
                time.sleep(FIRST_PAUSE * 2 ** (failures - 1))

    def read_tensors(self, infos: Sequence[shard.TensorInfo], skip: int = 0) -> Iterator[bytes]:
        """Yield the bytes of `infos` after the first `skip`. Adjacent tensors share a request and its pieces."""
        ranges: list[tuple[str, int, int]] = []
        for info in infos:
            file, start, end = info.file.as_posix(), info.start, info.start + info.nbytes
            if ranges and ranges[-1][0] == file and ranges[-1][2] == start:
                start = ranges.pop()[1]
            ranges.append((file, start, end))
        for file, start, end in ranges:
            if skip < end - start:
                yield from self.read_range(file, start + skip, end)
            skip = max(0, skip - (end - start))

    def _cached(self, file: str) -> Path | None:
        found = try_to_load_from_cache(self.repo, file, revision=self.revision)
        if not isinstance(found, str):
            return None
        self.revision = Path(found).parents[file.count("/")].name
        return Path(found)

    @contextmanager
    def _get(self, file: str, start: int, end: int) -> Iterator[httpx.Response]:
        """Open an answer whose body is `[start, end)`. Raises FileNotFoundError, TransientError and CheckpointError."""
        if constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                f"{self.repo}: {file} is not in the local cache. Unset HF_HUB_OFFLINE to download it."
            )
        url = hf_hub_url(self.repo, file, revision=self.revision)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"
        with self._client.stream("GET", url, headers=headers) as response:
            self._check(response, file)
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None:
                raise TransientError("the hub's answer has no Content-Range")
            self._sizes[file] = int(found[2])
            if int(found[1]) != start:
                raise TransientError("the hub sent another byte range than requested")
            for answer in (*response.history, response):
                if (commit := answer.headers.get("X-Repo-Commit")) is not None:
                    _check_commit(commit)
                    self.revision = commit
            yield response

    def _check(self, response: httpx.Response, file: str) -> None:
        status, code = response.status_code, response.headers.get("X-Error-Code", "")
        if status == 206:
            return
        if status in (408, 429) or status >= 500:
            raise TransientError(f"the hub answers {status}")
        if code in ("GatedRepo", "RepoNotFound") or status in (401, 403):
            raise unreadable(self.repo)
        if status == 404 and code != "RevisionNotFound":
            raise FileNotFoundError(file)
        if status == 200:
            raise CheckpointError(
                f"{self.repo}: {constants.ENDPOINT} does not serve byte ranges. Download the whole checkpoint."
            )
        raise CheckpointError(f"{self.repo}: the hub refuses {file} at {self.revision}: {status} {code}".rstrip())

    def _missing(self, file: str) -> CheckpointError:
        return CheckpointError(f"{self.repo}: file {file} not found at revision {self.revision}")


THREADS = 4
"""Files downloaded at once, since one connection seldom fills a fast line."""

REPORT_SECONDS = 0.25
"""Seconds between two progress reports, and the longest delay of an interruption."""


@dataclass(frozen=True)
class Blob:
    """A large file of a repo. `path` is its place in the cache, named by its SHA-256."""

    file: str
    size: int
    path: Path

    @property
    def done(self) -> int:
        """Bytes on this disk."""
        missing = shard.PartFile(self.path, self.size).missing_bytes()
        return self.size if self.path.exists() else self.size - missing


def find_blobs(repo: str, commit: str) -> list[Blob]:
    """Return the safetensors files that the hub stores by SHA-256. Raises CheckpointError and the library's errors."""
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    tree = HfApi(endpoint=constants.ENDPOINT).list_repo_tree(repo, revision=commit, recursive=True)
    blobs = []
    for file in tree:
        if isinstance(file, RepoFile) and file.lfs and file.path.endswith(".safetensors"):
            if not SHA256.fullmatch(file.lfs.sha256):
                raise CheckpointError(
                    f"model {repo}: the hub sent {file.lfs.sha256!r:.80} as the SHA-256 of {file.path!r:.80}. "
                    "Use another hub."
                )
            blobs.append(Blob(file.path, file.size, folder / "blobs" / file.lfs.sha256))
    return blobs


def download_blobs(
    repo: str,
    commit: str,
    blobs: Sequence[Blob],
    on_progress: OnProgress = lambda done, total: None,
    stop: threading.Event | None = None,
) -> None:
    """Download the blobs that are not in the cache, and continue those of an interrupted call. Raises CheckpointError.

    `on_progress(done, total)` receives bytes of all blobs, on this thread. `stop` ends the call from another thread
    with NotReadyError; KeyboardInterrupt ends it on this one.
    """
    stopped = stop or threading.Event()
    total = sum(blob.size for blob in blobs)
    waiting: SimpleQueue[Blob] = SimpleQueue()
    for blob in blobs:
        if not blob.path.exists():
            waiting.put(blob)
    errors: list[ClusterError | OSError] = []

    def download() -> None:
        try:
            with HubRepo(repo, commit) as source:
                while not stopped.is_set():
                    _download_one(source, waiting.get_nowait(), stopped)
        except Empty:
            pass
        except (ClusterError, OSError) as error:
            errors.append(error)
            stopped.set()

    # Daemon threads: the process must be able to end while one of them waits for the network.
    count = min(THREADS, waiting.qsize())
    threads = [threading.Thread(target=download, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not stopped.is_set():
            stopped.wait(REPORT_SECONDS)
            on_progress(sum(blob.done for blob in blobs), total)
        if stopped.is_set():
            raise errors[0] if errors else _interrupted(repo)
    finally:
        stopped.set()


def _download_one(source: HubRepo, blob: Blob, stop: threading.Event) -> None:
    """Download the missing bytes of a blob, or wait until another process has done it."""
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    file = shard.PartFile(blob.path, blob.size)

    def write_rest() -> None:
        for piece in source.read_range(blob.file, file.written, blob.size):
            file.write(piece)
            check_stop()

    def check_stop(seconds: float = 0.0) -> None:
        if stop.wait(seconds):
            raise _interrupted(source.repo)

    file.complete(write_rest, lambda: check_stop(REPORT_SECONDS))


def _interrupted(repo: str) -> NotReadyError:
    return NotReadyError(f"model {repo}: the download stopped. The next start continues it.")
