"""The mDNS announcement of this worker at the addresses where others reach it.

A failed announcement never stops a worker. When multicast is blocked, one warning says what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator

import psutil
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from proto.announcement import SERVICE_TYPE, Announcement

log = logging.getLogger(__name__)

RESCAN_SECONDS = 5.0
"""Seconds between two scans of the addresses. A machine may start its workers before its network."""

STEP_SECONDS = 5.0
"""Seconds. Maximum wait for one step. An announcement takes about a second to check that its name is free."""

TTL_SECONDS = 60
"""Seconds for which others keep the record of a worker that ended without a goodbye."""

VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "utun", "tun", "awdl", "llw", "anpi", "ap")
"""Prefixes of the names of interfaces whose multicast reaches no other machine."""


@contextlib.asynccontextmanager
async def announced(announcement: Announcement, host: str) -> AsyncIterator[None]:
    """Announce a listener on `host` while the block runs, then send a goodbye."""
    task = asyncio.create_task(_announce(announcement, host), name="mdns announcement")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=STEP_SECONDS)
        if task.done() and not task.cancelled() and task.exception():
            log.error("the mDNS announcement failed", exc_info=task.exception())


def reachable_addresses(host: str) -> list[str]:
    """Return the addresses, in a fixed order, at which others reach a listener on `host`; loopback at least."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        return sorted({str(entry[4][0]) for entry in found})
    if not address.is_unspecified:
        return [host]
    stats = psutil.net_if_stats()
    networks = [
        str(entry.address)
        for name, entries in psutil.net_if_addrs().items()
        if not name.startswith(VIRTUAL) and name in stats and stats[name].isup
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    return sorted(networks) or ["127.0.0.1"]


async def _announce(announcement: Announcement, host: str) -> None:
    """Announce until cancelled, anew whenever the addresses change."""
    warned = False
    while True:
        try:
            addresses = await asyncio.to_thread(reachable_addresses, host)
            async with _registered(announcement, addresses):
                warned = False
                log.debug("announced by mDNS", extra={"addresses": " ".join(addresses)})
                changed = False
                while not changed:
                    await asyncio.sleep(RESCAN_SECONDS)
                    changed = await asyncio.to_thread(reachable_addresses, host) != addresses
        except Exception as error:  # such as RuntimeError without an interface
            if not warned:
                log.warning(
                    "mDNS is unavailable. Pass this worker's address to the coordinator with --worker",
                    extra={"error": f"{type(error).__name__}: {error}"},
                )
            warned = True
            await asyncio.sleep(RESCAN_SECONDS)


@contextlib.asynccontextmanager
async def _registered(announcement: Announcement, addresses: list[str]) -> AsyncIterator[None]:
    """Register at `addresses` while the block runs. Raises the errors of zeroconf."""
    info = AsyncServiceInfo(
        SERVICE_TYPE,
        announcement.instance,
        port=announcement.port,
        properties=announcement.to_txt(),
        server=f"mtp-{announcement.worker_id[:32]}.local.",
        parsed_addresses=addresses,
        host_ttl=TTL_SECONDS,
        other_ttl=TTL_SECONDS,
    )
    zeroconf = AsyncZeroconf(interfaces=addresses)
    try:
        async with asyncio.timeout(STEP_SECONDS):
            # async_register_service returns a task, which announces.
            await (await zeroconf.async_register_service(info))
        yield
    finally:
        with contextlib.suppress(OSError, ZeroconfError):
            try:
                async with asyncio.timeout(STEP_SECONDS):
                    await zeroconf.async_close()  # sends a goodbye
            except TimeoutError:  # on a busy machine; its sockets must not stay open
                zeroconf.zeroconf.engine.close()
                raise
