"""A port that is kept for a process whose address must be known before it starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Keep a port of `host` for a process that gets its number as an argument. No other process gets it meanwhile.

    It is `port`, if that is given and no process listens there. The socket does not listen, so a listener that sets
    SO_REUSEADDR may use its port.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
        yield int(held.getsockname()[1])
