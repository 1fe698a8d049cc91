"""A local stand-in for the hub: an HTTP server on loopback that serves directories as repos, with ranges.

It answers the requests of the hub's own library (info, tree, resolve) and redirects weights to another path, as the
hub does. It counts the bytes it sends, and fails on request.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

import pytest

TOKEN = "hf_right"

_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/?]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/?]+)")
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")
_STORAGE = re.compile(r"/storage/(?P<repo>[^/]+/[^/]+)/(?P<file>[^?]+)")


@dataclass
class Repo:
    """A directory served as a repo. `gate` is the error code for clients without TOKEN; None lets everybody read."""

    path: Path
    gate: str | None = None

    @property
    def commit(self) -> str:
        """A commit hash of real length that differs between directories."""
        return hashlib.sha1(str(self.path).encode()).hexdigest()


@dataclass
class Faults:
    """The faults of the server.

    Each number of `cut_after` ends one reply after that many bytes. `unavailable` replies are 503.
    """

    cut_after: list[int] = field(default_factory=list)
    unavailable: int = 0
    ignore_ranges: bool = False
    flip: dict[str, int] = field(default_factory=dict)
    """For each file, the offset of a byte that is sent with one bit flipped."""
    hold_at: float = math.inf
    """The server pauses after this many bytes of weights until a test raises the limit."""


class Hub:
    """The server, as a context manager. `sent` counts content bytes by file, `requests` counts method and path."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults = Faults()
        self.sent: Counter[str] = Counter()
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self._etags: dict[tuple[Path, int, int], str] = {}
        hub = self

        class Handler(_Handler):
            """A handler bound to this hub."""

            server_hub = hub

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Root of the server."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, path: Path) -> None:
        """Serve the directory `path` as the repo `name`."""
        self.repos[name] = Repo(path)

    @property
    def weights_sent(self) -> int:
        """Return the bytes of weights sent so far."""
        return sum(count for file, count in self.sent.items() if file.endswith(".safetensors"))

    def etag(self, file: Path) -> str:
        """Return the ETag of a file: SHA-256 for weights, as on a hub, and a shorter hash for small files."""
        state = file.stat()
        key = (file, state.st_mtime_ns, state.st_size)
        if key not in self._etags:
            with file.open("rb") as stream:
                kind = "sha256" if file.suffix == ".safetensors" else "sha1"
                self._etags[key] = hashlib.file_digest(stream, kind).hexdigest()
        return self._etags[key]

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment for a process that uses this hub and its own cache at `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def install(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """Make this process use the hub. The library reads its environment once, when it is imported."""
        constants = "huggingface_hub.constants"
        monkeypatch.setattr(f"{constants}.ENDPOINT", self.url)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(f"{constants}.HF_HOME", str(home))
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *args: Any) -> None:
        """Ignore clients that disconnect, which many tests provoke."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: Hub

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        hub, path = self.server_hub, unquote(self.path)
        with hub.lock:
            hub.requests.append(f"{self.command} {path}")
            if hub.faults.unavailable:
                hub.faults.unavailable -= 1
                self._empty(503)
                return
        for pattern, answer in (
            (_TREE, self._tree),
            (_INFO, self._info),
            (_STORAGE, self._storage),
            (_RESOLVE, self._resolve),
        ):
            found = pattern.match(path)
            if found is not None:
                repo = hub.repos.get(found["repo"])
                if repo is None:
                    self._empty(401, {"X-Error-Code": "RepoNotFound"})
                elif repo.gate and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    status = 403 if repo.gate == "GatedRepo" else 401
                    self._empty(status, {"X-Error-Code": repo.gate})
                else:
                    answer(repo, found)
                return
        self._empty(404)

    do_GET = do_HEAD = _answer

    def _info(self, repo: Repo, found: re.Match[str]) -> None:
        self._json({"id": found["repo"], "sha": repo.commit, "siblings": []})

    def _lfs(self, file: Path) -> dict[str, Any]:
        """Return the entry that a hub has for a file it stores by SHA-256."""
        if file.suffix != ".safetensors":
            return {}
        size = file.stat().st_size
        return {"lfs": {"oid": self.server_hub.etag(file), "size": size, "pointerSize": 134}}

    def _tree(self, repo: Repo, found: re.Match[str]) -> None:
        self._json(
            [
                {
                    "type": "file",
                    "path": file.relative_to(repo.path).as_posix(),
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.name.encode()).hexdigest(),
                    **self._lfs(file),
                }
                for file in sorted(repo.path.rglob("*"))
                if file.is_file()
            ]
        )

    def _resolve(self, repo: Repo, found: re.Match[str]) -> None:
        file = repo.path / found["file"]
        if found["revision"] not in ("main", repo.commit):
            self._empty(404, {"X-Error-Code": "RevisionNotFound"})
        elif not file.is_file():
            self._empty(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
        elif file.suffix == ".safetensors":
            size = str(file.stat().st_size)
            etag = f'"{self.server_hub.etag(file)}"'
            self._empty(
                302,
                {
                    "Location": f"/storage/{found['repo']}/{found['file']}",
                    "X-Repo-Commit": repo.commit,
                    "X-Linked-Size": size,
                    "X-Linked-ETag": etag,
                },
            )
        else:
            self._file(repo, file)

    def _storage(self, repo: Repo, found: re.Match[str]) -> None:
        self._file(repo, repo.path / found["file"])

    def _file(self, repo: Repo, file: Path) -> None:
        hub, size = self.server_hub, file.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = 0, size
        if asked is not None and not hub.faults.ignore_ranges:
            start, end = int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        else:
            self.send_response(200)
        for name, value in {
            "Content-Length": str(end - start),
            "ETag": f'"{hub.etag(file)}"',
            "X-Repo-Commit": repo.commit,
            "Accept-Ranges": "bytes",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self._send(file, start, end)

    def _send(self, file: Path, start: int, end: int) -> None:
        hub = self.server_hub
        with file.open("rb") as stream:
            stream.seek(start)
            content = bytearray(stream.read(end - start))
        if (flipped := hub.faults.flip.get(file.name)) is not None and start <= flipped < end:
            content[flipped - start] ^= 1
        with hub.lock:
            cut = hub.faults.cut_after.pop(0) if hub.faults.cut_after else end
        first, last = start, min(end, start + cut)
        while start < last:
            piece = content[start - first : min(start + 65536, last) - first]
            while hub.weights_sent >= hub.faults.hold_at:
                time.sleep(0.01)
            with hub.lock:  # counted first, because the client may check right after the last byte
                hub.sent[file.name] += len(piece)
            try:
                self.wfile.write(piece)
            except OSError:  # the client was killed
                with hub.lock:
                    hub.sent[file.name] -= len(piece)
                return
            start += len(piece)
        if last < end:
            self.close_connection = True

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _empty(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()
