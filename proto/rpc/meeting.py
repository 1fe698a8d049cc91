"""A meeting of programs at the address of one of them, before another library opens its own connections."""

from __future__ import annotations

import contextlib
import socket
import time

RETRY_SECONDS = 0.05
"""Seconds between two attempts to connect."""


def accept_callers(address: tuple[str, int], count: int, due: float) -> None:
    """Accept connections of `count` programs at `address` until `due`, which close them. Raises OSError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.create_server(address, family=family, backlog=count) as listener:
        for _ in range(count):
            listener.settimeout(max(0.01, due - time.monotonic()))
            caller, _ = listener.accept()
            with caller, contextlib.suppress(OSError):
                caller.settimeout(max(0.01, due - time.monotonic()))
                caller.recv(1)


def call_until_accepted(address: tuple[str, int], due: float) -> None:
    """Connect to `address` as soon as a program listens there, and close the connection. Raises OSError at `due`."""
    while True:
        left = due - time.monotonic()
        try:
            with socket.create_connection(address, timeout=max(0.01, left)):
                return
        except OSError:
            if left <= 0:
                raise
        time.sleep(RETRY_SECONDS)
