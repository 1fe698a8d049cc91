"""The fuzz target of a hub's answers: status and headers, config, index and shards."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import httpx

from mtp.checkpoint.hub import repo
from mtp.checkpoint.hub.remote_checkpoint import open_remote
from mtp.checkpoint.hub.repo import HubRepo
from proto.errors import CheckpointError
from tests.fuzz.mutation import SEPARATOR

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")

MAX_REQUESTS = 200
"""Requests after which a reader that gets no valid answer must have stopped. An index names at most a few files."""


def fuzz_hub(data: bytes) -> None:
    """Read the headers of a repo from a hub that answers with the parts of `data`."""
    hub, answers = _hub()
    answers.replace(data)
    hub.revision = "main"
    with (
        patch.object(repo, "FIRST_PAUSE", 0.0),
        patch.object(repo, "try_to_load_from_cache", lambda *_, **__: None),
        contextlib.suppress(CheckpointError),
    ):
        open_remote(hub)


@cache
def _hub() -> tuple[HubRepo, _Answers]:
    """Return the reader that all inputs share, because a client takes milliseconds to make, and its answers."""
    hub, answers = HubRepo("owner/name", "main"), _Answers()
    hub.__exit__()
    hub._client = httpx.Client(transport=httpx.MockTransport(answers.answer), trust_env=False)
    return hub, answers


class _Answers:
    """The answers that one input describes. The header `Size` is the size that the hub reports for every file."""

    def replace(self, data: bytes) -> None:
        """Use the parts of `data`: status and headers, config, index, and the content of every other file."""
        head, config, index, self._shard = [*data.split(SEPARATOR), b"", b"", b"", b""][:4]
        self._files = {"config.json": config, "model.safetensors.index.json": index}
        self._status, self._headers = _head(head)
        self._requests = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Return the range of a file, with the status and headers of the input."""
        self._requests += 1
        assert self._requests < MAX_REQUESTS, "the reader does not stop"
        content = self._files.get(request.url.path.rpartition("/")[2], self._shard)
        match = _RANGE.fullmatch(request.headers["Range"])
        assert match is not None
        start, end = int(match[1]), min(int(match[2]) + 1, len(content))
        size = self._headers.get("Size", str(len(content)))
        own = {"Content-Range": f"bytes {start}-{max(start, end - 1)}/{size}"}
        pairs = {**own, **self._headers}.items()
        raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
        body = _Body(content[start:end])
        return httpx.Response(self._status if content else 404, headers=raw, stream=body)


class _Body(httpx.SyncByteStream):
    """The body of an answer, sent in pieces of 100 bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._content), 100):
            yield self._content[start : start + 100]


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers that the first part of an input describes."""
    first, *lines = head.decode("latin-1").splitlines() or [""]
    status = int(first) if re.fullmatch(r"[2-5]\d\d", first, re.ASCII) else 206
    pairs = (line.partition(":") for line in lines)
    names = {name.strip(): value.strip() for name, _, value in pairs}
    return status, {n: v for n, v in names.items() if re.fullmatch(r"[A-Za-z-]+", n) and v}
