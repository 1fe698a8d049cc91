"""Announces this worker by mDNS for as long as it runs, at the addresses it can be reached at.

Announcing never stops a worker: where multicast is blocked, one warning says how to do without.
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
"""How often addresses are looked at again: a machine may start its workers before its network."""

STEP_SECONDS = 5.0
"""Longest wait for one step. Announcing takes about a second, for it asks whether the name is free."""

TTL_SECONDS = 60
"""How long others remember a worker that vanished without a word."""

VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "utun", "tun", "awdl", "llw", "anpi", "ap")
"""Interfaces by the start of their names that lead to no other machine's multicast."""


@contextlib.asynccontextmanager
async def announced(announcement: Announcement, host: str) -> AsyncIterator[None]:
    """Announce while inside; `host` is what the worker listens on. Says goodbye when left."""
    task = asyncio.create_task(_announce(announcement, host), name="mdns announcement")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=STEP_SECONDS)
        if task.done() and not task.cancelled() and task.exception():
            log.error("the mDNS announcement failed", exc_info=task.exception())


def reachable_addresses(host: str) -> list[str]:
    """The addresses others can reach a listener on `host` at, in a fixed order.

    A listener on loopback has only its own; one on every interface has those of the network, and
    loopback where there is no network.
    """
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
    """Announce, and again whenever the addresses change, until cancelled."""
    warned = False
    while True:
        try:
            addresses = await asyncio.to_thread(reachable_addresses, host)
            async with _registered(announcement, addresses):
                warned = False
                log.debug("announced by mDNS", extra={"addresses": " ".join(addresses)})
                await _change_of(host, addresses)
        except (OSError, TimeoutError, ZeroconfError) as error:
            if not warned:
                log.warning(
                    "mDNS is not to be had: give coordinators this worker's address with --worker",
                    extra={"error": f"{type(error).__name__}: {error}"},
                )
            warned = True
            await asyncio.sleep(RESCAN_SECONDS)


async def _change_of(host: str, addresses: list[str]) -> None:
    """Return once `host` stands for other addresses."""
    while True:
        await asyncio.sleep(RESCAN_SECONDS)
        if await asyncio.to_thread(reachable_addresses, host) != addresses:
            return


@contextlib.asynccontextmanager
async def _registered(announcement: Announcement, addresses: list[str]) -> AsyncIterator[None]:
    """One registration at fixed addresses; raises what zeroconf raises."""
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
            # Registering returns a task of its own, which does the announcing.
            await (await zeroconf.async_register_service(info))
        yield
    finally:
        with contextlib.suppress(OSError, TimeoutError, ZeroconfError):
            async with asyncio.timeout(STEP_SECONDS):
                await zeroconf.async_close()  # says goodbye first
