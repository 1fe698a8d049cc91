"""The workers on this network, found by mDNS, and which of them run here."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

import psutil
from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from coordinator.pipeline.worker_connection import Candidate
from proto.announcement import SERVICE_TYPE, Announcement, is_loopback, join_address, parse_address
from proto.errors import ProtocolError
from proto.local_network import own_networks

log = logging.getLogger(__name__)


def on_this_machine(address: str) -> bool:
    """Return whether the host of `HOST:PORT` is loopback or an address of one of this machine's interfaces."""
    host, _ = parse_address("--worker", address)
    if is_loopback(host):
        return True
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return host in own


RESOLVE_SECONDS = 3.0
"""Seconds. Maximum wait for the address and the TXT record of an announced worker."""

RESCAN_SECONDS = 5.0
"""Seconds between two scans of the network interfaces, and between two attempts after multicast failed."""

CLOSE_SECONDS = 3.0
MAX_CANDIDATES = 256
"""Bounds the candidates, against a network that announces arbitrarily many workers. No cluster is as large."""

MAX_ADDRESSES = 16


class Discovery:
    """The current candidates. `async with Discovery(...) as discovery:` keeps `discovery.candidates()` up to date.

    The addresses in `static` are always candidates, and mDNS records for them are ignored. Raises UsageError for a
    malformed address. If multicast is unavailable, one warning says so.
    """

    def __init__(self, static: Sequence[str] = (), *, mdns: bool = True) -> None:
        self._static = tuple(dict.fromkeys(join_address(*parse_address("--worker", text)) for text in static))
        self._mdns = mdns
        self._known: dict[str, Candidate] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._browser: asyncio.Task[None] | None = None
        self.problem = ""
        """The error that makes mDNS unavailable, or nothing."""

    async def __aenter__(self) -> Self:
        for address in self._static:
            self._add_candidate(Candidate(address, (address,)))
        if self._mdns:
            self._browser = asyncio.create_task(self._browse(), name="mdns browser")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._resolving.values(), *([self._browser] if self._browser else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * CLOSE_SECONDS)
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception():
                log.error("discovery failed", exc_info=task.exception())

    def candidates(self) -> list[Candidate]:
        """Return the current candidates. One whose announcement ended is not among them, although it may run."""
        return list(self._known.values())

    # ---- mDNS

    async def _browse(self) -> None:
        """Browse until cancelled. Start again when multicast fails."""
        while True:
            try:
                async with _browsing(self._resolve_change) as zeroconf:
                    while True:
                        await asyncio.sleep(RESCAN_SECONDS)
                        await zeroconf.zeroconf.async_update_interfaces()
            except Exception as error:  # such as RuntimeError without an interface
                if not self.problem:
                    self.problem = f"{type(error).__name__}: {error}"
                    log.warning(
                        "mDNS is unavailable. Name workers with --worker HOST:PORT",
                        extra={"error": self.problem},
                    )
                await asyncio.sleep(RESCAN_SECONDS)

    def _resolve_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Handle the change of one service instance, on the event loop."""
        earlier = self._resolving.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        if state_change is ServiceStateChange.Removed:
            self._known.pop(name, None)
        elif len(self._resolving) < MAX_CANDIDATES:
            self._resolving[name] = asyncio.create_task(self._resolve(zeroconf, name))

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        try:
            info = AsyncServiceInfo(SERVICE_TYPE, name)
            if not await info.async_request(zeroconf, RESOLVE_SECONDS * 1000):
                log.debug("mDNS name without an address", extra={"instance": name})
                return
            announcement = Announcement.from_txt(info.properties, info.port)
            hosts = order_hosts(info.parsed_addresses(IPVersion.V4Only), own_networks())
            hosts += info.parsed_scoped_addresses(IPVersion.V6Only)
            addresses = [join_address(h, announcement.port) for h in hosts[:MAX_ADDRESSES]]
            if addresses and not set(addresses) & set(self._static):
                self._add_candidate(Candidate(name, tuple(addresses), announcement))
        except (ProtocolError, ValueError, OSError, ZeroconfError) as error:
            log.debug("mDNS record ignored", extra={"instance": name, "error": str(error)})
        finally:
            if self._resolving.get(name) is asyncio.current_task():
                del self._resolving[name]

    def _add_candidate(self, candidate: Candidate) -> None:
        if candidate.id in self._known or len(self._known) < MAX_CANDIDATES:
            self._known[candidate.id] = candidate


@contextlib.asynccontextmanager
async def _browsing(handler: Callable[..., None]) -> AsyncIterator[AsyncZeroconf]:
    """Run a browser that calls `handler` for each change. Raises the errors of zeroconf."""
    zeroconf = AsyncZeroconf()
    browser = None
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[handler])
        yield zeroconf
    finally:
        with contextlib.suppress(OSError, ZeroconfError):
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    if browser is not None:
                        await browser.async_cancel()
                    await zeroconf.async_close()
            except TimeoutError:  # on a busy machine; its sockets must not stay open
                zeroconf.zeroconf.engine.close()


def order_hosts(hosts: Sequence[str], networks: Sequence[ipaddress.IPv4Network]) -> list[str]:
    """Return `hosts` with those of `networks` first and loopback last, which no other machine can reach."""

    def rank(host: str) -> tuple[bool, bool]:
        address = ipaddress.ip_address(host)
        return address.is_loopback, not any(address in network for network in networks)

    return sorted(dict.fromkeys(hosts), key=rank)
