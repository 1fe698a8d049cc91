"""An app behind a real socket, in a thread of the test's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI


@contextmanager
def serving(app: FastAPI, tls: Path | None = None) -> Iterator[str]:
    """Serve the app on a free port and yield its URL. `tls` is a file with a key and certificates.

    Raises AssertionError if the server does not stop.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=2, ssl_certfile=tls)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn")
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(timeout=60)
            assert not thread.is_alive(), "the server did not stop"
