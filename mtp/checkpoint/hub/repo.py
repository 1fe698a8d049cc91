"""Byte ranges of the files of a hub repo.

The hub's own library downloads whole files. A stage needs a range of bytes, which every file server can send.
`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE` and the standard cache apply.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from huggingface_hub import (
    constants,
    get_token,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)

from mtp.checkpoint.format.header import LENGTH_BYTES, Header, header_bytes, parse_header
from proto.errors import CheckpointError

CONNECT_SECONDS = 10.0
"""Seconds. Deadline of a connection to the hub."""

READ_SECONDS = 20.0
"""Seconds of silence within an answer, after which the rest is requested again.

All attempts together take less than two minutes. A coordinator gives up a silent worker after two minutes, so the
worker can report the cause before that.
"""

ATTEMPTS = 5
"""Consecutive failures without received bytes after which a read fails."""

FIRST_PAUSE = 0.5
"""Seconds before the second attempt. The pause doubles before each further attempt."""

PIECE_BYTES = 1024 * 1024
"""Bytes per piece that is read from a file of the local cache."""

MAX_SMALL_BYTES = 64 * 2**20
"""Bytes. Bounds a file that is read into memory as a whole. The index of the largest checkpoints takes 10 MB."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class TransientError(Exception):
    """A failure of the hub that may be temporary."""


class HubRepo:
    """A reader of the files of `repo` at `revision`, a branch or a commit. Close it after use.

    The first answer pins a branch to its commit. Files in the local cache are read there. `received` counts the bytes
    of files received over the network. Every failure is raised as a CheckpointError that says what to do. The reader
    is for one thread at a time.
    """

    def __init__(self, repo: str, revision: str = "main") -> None:
        self.repo = repo
        self.revision = revision
        self.received = 0
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx.Client(follow_redirects=True, timeout=timeout)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def size(self, file: str) -> int | None:
        """Return the bytes of a file; None when the repo does not have this file."""
        if (cached := self._cached(file)) is not None:
            return cached.stat().st_size
        pauses = _RetryPauses(f"{self.repo}/{file}")
        while True:
            try:
                with self._get(file, 0, 1) as response:
                    return _content_range(response)[1]
            except FileNotFoundError:
                return None
            except (TransientError, httpx.TransportError) as error:
                pauses.wait_after(error)

    def read(self, file: str) -> bytes | None:
        """Return the content of a small file; None when the repo does not have this file."""
        size = self.size(file)
        if size is None:
            return None
        if size > MAX_SMALL_BYTES:
            raise CheckpointError(
                f"{self.repo}: {file}: {size} bytes exceed the limit of {MAX_SMALL_BYTES}. Give another repo."
            )
        return b"".join(self.read_range(file, 0, size))

    def read_header(self, file: str) -> Header:
        """Read the header of a safetensors file."""
        size = self.size(file)
        if size is None:
            raise self._missing(file)
        name = Path(file)
        prefix = b"".join(self.read_range(file, 0, min(LENGTH_BYTES, size)))
        end = LENGTH_BYTES + header_bytes(name, prefix, size)
        return parse_header(name, b"".join(self.read_range(file, LENGTH_BYTES, end)), size)

    def read_range(self, file: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes `[start, end)` of a file in pieces; after a broken connection, request only the rest."""
        if (cached := self._cached(file)) is not None:
            yield from _read_local(cached, start, end)
            return
        pauses = _RetryPauses(f"{self.repo}/{file}")
        while start < end:
            try:
                with self._get(file, start, end) as response:
                    for piece in response.iter_raw():
                        piece = piece[: end - start]
                        pauses.reset()
                        self.received += len(piece)
                        start += len(piece)
                        yield piece
                if start < end:
                    pauses.wait_after(TransientError("the hub's answer ended early"))
            except FileNotFoundError:
                raise self._missing(file) from None
            except (TransientError, httpx.TransportError) as error:
                pauses.wait_after(error)

    def _cached(self, file: str) -> Path | None:
        found = try_to_load_from_cache(self.repo, file, revision=self.revision)
        if not isinstance(found, str):
            return None
        self.revision = Path(found).parent.name
        return Path(found)

    @contextmanager
    def _get(self, file: str, start: int, end: int) -> Iterator[httpx.Response]:
        """Open an answer whose body is `[start, end)`. Raises FileNotFoundError, TransientError and CheckpointError."""
        if is_offline_mode():
            raise CheckpointError(
                f"{self.repo}: {file} is not in the local cache, and HF_HUB_OFFLINE is set. Unset it to "
                "download the file."
            )
        url = hf_hub_url(self.repo, file, revision=self.revision)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"
        with self._client.stream("GET", url, headers=headers) as response:
            self._check(response, file)
            if _content_range(response)[0] != start:
                raise CheckpointError(
                    f"{self.repo}: {file}: the hub sent another byte range than requested. Try again."
                )
            self._pin(response)
            yield response

    def _check(self, response: httpx.Response, file: str) -> None:
        status, code = response.status_code, response.headers.get("X-Error-Code", "")
        if status == 206:
            return
        if status in (408, 429) or status >= 500:
            raise TransientError(f"the hub answers {status}")
        if code == "GatedRepo":
            raise CheckpointError(
                f"{self.repo}: the owner requires you to accept terms. Accept them on the page of the repo, then set "
                "HF_TOKEN."
            )
        if code == "RepoNotFound" or status in (401, 403):
            raise CheckpointError(
                f"{self.repo}: repo not found on the hub, or not readable by you. Check the spelling, and HF_TOKEN if "
                "the repo is private."
            )
        if status == 404 and code != "RevisionNotFound":
            raise FileNotFoundError(file)
        if status == 200:
            raise CheckpointError(
                f"{self.repo}: {constants.ENDPOINT} does not serve byte ranges of {file}. Download the whole "
                "checkpoint and give its directory."
            )
        raise CheckpointError(
            f"{self.repo}: the hub refuses {file} at {self.revision}: {status} {code}".rstrip()
        )

    def _pin(self, response: httpx.Response) -> None:
        """Use the commit of the first answer from now on, even when the branch changes."""
        for answer in (*response.history, response):
            self.revision = answer.headers.get("X-Repo-Commit", self.revision)

    def _missing(self, file: str) -> CheckpointError:
        return CheckpointError(f"{self.repo}: file {file} not found at revision {self.revision}")


class _RetryPauses:
    """The pauses between attempts: they double with each consecutive failure, up to ATTEMPTS failures."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.failures = 0

    def reset(self) -> None:
        """Start again with the shortest pause, after received bytes."""
        self.failures = 0

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt. Raises CheckpointError after the last one."""
        self.failures += 1
        if self.failures == ATTEMPTS:
            raise CheckpointError(
                f"{self.what}: the hub at {constants.ENDPOINT} is unavailable or interrupts the download: "
                f"{str(error) or type(error).__name__}. Try again later: the received bytes are kept.",
                public="a download failed",
            ) from error
        time.sleep(FIRST_PAUSE * 2 ** (self.failures - 1))


def _content_range(response: httpx.Response) -> tuple[int, int]:
    """Return the first byte of the range and the size of the whole file."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if found is None:
        raise TransientError("the hub's answer has no Content-Range")
    return int(found[1]), int(found[2])


def _read_local(file: Path, start: int, end: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        stream.seek(start)
        while start < end:
            piece = stream.read(min(PIECE_BYTES, end - start))
            if not piece:
                raise CheckpointError(
                    f"{file}: truncated. Remove it from the cache, and try again."
                )
            start += len(piece)
            yield piece
