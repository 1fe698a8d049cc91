"""Byte ranges of the files of a hub repo: `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE` and the standard cache hold.

The hub's own library downloads whole files. What a stage needs of one is a run of bytes, and every server of files can
send that.
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
READ_SECONDS = 20.0
"""Of silence in the middle of an answer; then what is left is asked for again. All attempts together take less than the
two minutes after which a coordinator gives a silent worker up: it should hear why."""

ATTEMPTS = 5
"""Failures in a row, with nothing received between them, after which a read is given up."""

FIRST_PAUSE = 0.5
"""Seconds before the second attempt; twice as many before each further one."""

PIECE_BYTES = 1024 * 1024
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class TransientError(Exception):
    """The hub failed in a way that may pass."""


class HubRepo:
    """Reads files of `repo` as they are at `revision`: a branch, pinned to its commit by the first answer, or a commit.

    One thread at a time; to be closed. `received` counts bytes of files that came over the network; what the local
    cache has is read there. Every failure is a CheckpointError that says what to do.
    """

    def __init__(self, repo: str, revision: str = "main") -> None:
        self.repo = repo
        self.revision = revision
        self.received = 0
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx.Client(follow_redirects=True, timeout=timeout)

    def close(self) -> None:
        self._client.close()

    def size(self, file: str) -> int | None:
        """Bytes of a file; None when the repo has no such file."""
        if (cached := self._cached(file)) is not None:
            return cached.stat().st_size
        patience = _Patience(f"{self.repo}/{file}")
        while True:
            try:
                with self._get(file, 0, 1) as response:
                    return _content_range(response)[1]
            except FileNotFoundError:
                return None
            except (TransientError, httpx.TransportError) as error:
                patience.wait(error)

    def read(self, file: str) -> bytes | None:
        """All of a small file; None when the repo has no such file."""
        size = self.size(file)
        return None if size is None else b"".join(self.read_range(file, 0, size))

    def read_header(self, file: str) -> Header:
        """What a safetensors file holds, and where."""
        size = self.size(file)
        if size is None:
            raise self._missing(file)
        name = Path(file)
        prefix = b"".join(self.read_range(file, 0, min(LENGTH_BYTES, size)))
        end = LENGTH_BYTES + header_bytes(name, prefix, size)
        return parse_header(name, b"".join(self.read_range(file, LENGTH_BYTES, end)), size)

    def read_range(self, file: str, start: int, end: int) -> Iterator[bytes]:
        """Bytes `[start, end)` of a file, in pieces. After a broken connection only the rest is asked for."""
        if (cached := self._cached(file)) is not None:
            yield from _read_local(cached, start, end)
            return
        patience = _Patience(f"{self.repo}/{file}")
        while start < end:
            try:
                with self._get(file, start, end) as response:
                    for piece in response.iter_raw():
                        piece = piece[: end - start]
                        patience.reset()
                        self.received += len(piece)
                        start += len(piece)
                        yield piece
            except FileNotFoundError:
                raise self._missing(file) from None
            except (TransientError, httpx.TransportError) as error:
                patience.wait(error)

    def _cached(self, file: str) -> Path | None:
        found = try_to_load_from_cache(self.repo, file, revision=self.revision)
        if not isinstance(found, str):
            return None
        self.revision = Path(found).parent.name
        return Path(found)

    @contextmanager
    def _get(self, file: str, start: int, end: int) -> Iterator[httpx.Response]:
        """An answer whose body is `[start, end)`. Raises FileNotFoundError, TransientError and CheckpointError."""
        if is_offline_mode():
            raise CheckpointError(
                f"{self.repo}: {file} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it"
            )
        url = hf_hub_url(self.repo, file, revision=self.revision)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"
        with self._client.stream("GET", url, headers=headers) as response:
            self._check(response, file)
            if _content_range(response)[0] != start:
                raise CheckpointError(f"{self.repo}: {file}: the hub sent another range than asked")
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
                f"{self.repo}: its owner asks you to accept terms first; do so on its page, then set HF_TOKEN"
            )
        if code == "RepoNotFound" or status in (401, 403):
            raise CheckpointError(
                f"{self.repo}: there is no such repo on the hub, or you may not read it; check the spelling, and "
                "HF_TOKEN if it is private"
            )
        if status == 404 and code != "RevisionNotFound":
            raise FileNotFoundError(file)
        if status == 200:
            raise CheckpointError(
                f"{self.repo}: {constants.ENDPOINT} does not serve byte ranges of {file}; download the "
                "checkpoint whole and give its directory"
            )
        raise CheckpointError(
            f"{self.repo}: the hub refuses {file} at {self.revision}: {status} {code}".rstrip()
        )

    def _pin(self, response: httpx.Response) -> None:
        """Stay with the commit of the first answer, whatever its branch does meanwhile."""
        for answer in (*response.history, response):
            self.revision = answer.headers.get("X-Repo-Commit", self.revision)

    def _missing(self, file: str) -> CheckpointError:
        return CheckpointError(f"{self.repo}: has no file {file} at {self.revision}")


class _Patience:
    """Waits between attempts, the longer the more of them failed in a row, and gives up after ATTEMPTS."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.failures = 0

    def reset(self) -> None:
        self.failures = 0

    def wait(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == ATTEMPTS:
            raise CheckpointError(
                f"{self.what}: the hub at {constants.ENDPOINT} cannot be reached, or breaks off: "
                f"{str(error) or type(error).__name__}; what has arrived is kept: try again later",
                public="a download failed",
            ) from error
        time.sleep(FIRST_PAUSE * 2 ** (self.failures - 1))


def _content_range(response: httpx.Response) -> tuple[int, int]:
    """First byte, and size of the whole file."""
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
                raise CheckpointError(f"{file}: truncated; remove it from the cache, and try again")
            start += len(piece)
            yield piece
