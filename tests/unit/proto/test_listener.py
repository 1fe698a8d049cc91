"""Listeners and names: ports that are taken are refused, and names of the local network are found."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proto.errors import UsageError
from proto.rpc.listener import bind_listener, has_listener

SECONDS = 60.0


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_port_of_another_program_is_refused(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words are the same whether the system refuses the port, or the program that listens there answers."""
    monkeypatch.setattr(sys, "platform", platform)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert has_listener("0.0.0.0", port)
        with pytest.raises(UsageError, match=f"--listen x:{port}: another program listens there"):
            bind_listener(f"--listen x:{port}", "127.0.0.1", port)
    assert not has_listener("127.0.0.1", port)
    bind_listener("--listen", "127.0.0.1", port).close()


RESOLVER = """
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
typedef int (*lookup)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
int getaddrinfo(const char *n, const char *s, const struct addrinfo *h, struct addrinfo **r) {
    if (n && !strcmp(n, "mac-2.local")) n = "127.0.0.1";
    return ((lookup)dlsym(RTLD_NEXT, "getaddrinfo"))(n, s, h, r);
}
"""
"""A library that knows a name of the local network, as macOS does and as only `getaddrinfo` can ask it."""

CONNECT = """
import asyncio, socket
from proto.rpc.channels import open_channel

async def main():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with open_channel(f"mac-2.local:{listener.getsockname()[1]}", None) as channel:
            channel.get_state(try_to_connect=True)
            connection, _ = await asyncio.get_running_loop().run_in_executor(None, listener.accept)
            connection.close()

asyncio.run(asyncio.wait_for(main(), 20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the library is made for Linux")
def test_names_of_the_local_network_are_found(tmp_path: Path) -> None:
    """A channel asks the system for `mac-2.local`, which gRPC's own resolver does not know."""
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler is installed")
    library = tmp_path / "resolver.so"
    subprocess.run(
        [compiler, "-x", "c", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(library), "-"],
        input=RESOLVER.encode(),
        check=True,
        timeout=SECONDS,
    )
    subprocess.run(
        [sys.executable, "-c", CONNECT],
        env={**os.environ, "LD_PRELOAD": str(library)},
        check=True,
        timeout=SECONDS,
    )
