"""A server without free descriptors logs one warning, and accepts again later."""

from __future__ import annotations

import socket
import subprocess
import sys

SERVER = """
import asyncio, contextlib, logging, sys
from proto.rpc.accept_warning import warn_once_of_shortage

async def greet(reader, writer):
    with contextlib.suppress(ConnectionError):
        writer.write(b"hello")
        await reader.read()

    writer.close()

async def main():
    logging.basicConfig(format="%(message)s")
    warn_once_of_shortage(asyncio.get_running_loop())
    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)

asyncio.run(main())
"""

DESCRIPTORS, CLIENTS = 24, 60


def test_a_shortage_of_descriptors_is_one_warning() -> None:
    """Connections beyond the limit give one warning without a traceback, and are served once others end."""
    limited = ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*limited, sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        clients = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(CLIENTS)]
        assert clients[0].recv(5) == b"hello"
        for client in clients[:-1]:
            client.close()
        assert clients[-1].recv(5) == b"hello"
        clients[-1].close()
        _, log = server.communicate(timeout=20)
    assert log.count("connections wait: Too many open files. Raise the limit") == 1
    assert log.count("Traceback") == log.count("ZeroDivisionError") == 1, log
