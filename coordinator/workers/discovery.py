"""Finds workers by mDNS, beside those the user names. All of it hearsay: Describe before trust."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import psutil
from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from proto.address import join_address, parse_address
from proto.announcement import SERVICE_TYPE, Announcement
from proto.errors import ProtocolError

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 3.0
"""Longest wait for the address and TXT record of a worker whose name was heard."""

RESCAN_SECONDS = 5.0
"""How often the network interfaces are looked at again, and multicast is tried again where it failed."""

CLOSE_SECONDS = 3.0
MAX_CANDIDATES = 256
"""More workers than any cluster has; a network that names more is lying."""

MAX_ADDRESSES = 16


@dataclass(frozen=True)
class Candidate:
    """Where a worker may be. `id` names the source: the mDNS instance, or the address itself.

    `addresses` are host:port, the likeliest first. All are said to be one worker's:
    the one whose Describe bears `announcement.worker_id` is it. `announcement` is None for a worker
    the user named.
    """

    id: str
    addresses: tuple[str, ...]
    announcement: Announcement | None = None

    @property
    def name(self) -> str:
        return self.announcement.name if self.announcement else self.addresses[0]


class Discovery:
    """`async with Discovery(...) as discovery:` keeps `discovery.candidates()` up to date.

    Addresses in `static` are candidates from the start and are never lost; what mDNS says of them too is
    left out. Raises UsageError for a malformed one. Where multicast cannot be had, one warning says so.
    """

    def __init__(self, static: Sequence[str] = (), *, mdns: bool = True) -> None:
        self._static = tuple(
            dict.fromkeys(join_address(*parse_address("--worker", text)) for text in static)
        )
        self._mdns = mdns
        self._known: dict[str, Candidate] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._browser: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        for address in self._static:
            self._note(Candidate(address, (address,)))
        if self._mdns:
            self._browser = asyncio.create_task(self._browse(), name="mdns browser")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._resolving.values(), *([self._browser] if self._browser else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception():
                log.error("looking for workers failed", exc_info=task.exception())

    def candidates(self) -> list[Candidate]:
        """Those known now, first found first. Who said goodbye, or was not heard for a minute, is not among them, and
        may be alive all the same."""
        return list(self._known.values())

    # ---- mDNS

    async def _browse(self) -> None:
        """Browse, starting over when multicast fails, until cancelled."""
        warned = False
        while True:
            try:
                async with _browsing(self._heard) as zeroconf:
                    while True:
                        await asyncio.sleep(RESCAN_SECONDS)
                        await zeroconf.zeroconf.async_update_interfaces()
            except (OSError, ZeroconfError) as error:
                if not warned:
                    log.warning(
                        "mDNS is not to be had: name workers with --worker HOST:PORT",
                        extra={"error": f"{type(error).__name__}: {error}"},
                    )
                warned = True
                await asyncio.sleep(RESCAN_SECONDS)

    def _heard(self, zeroconf: Zeroconf, name: str, change: ServiceStateChange) -> None:
        """News of one service instance, on the event loop."""
        earlier = self._resolving.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        if change is ServiceStateChange.Removed:
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
                self._note(Candidate(name, tuple(addresses), announcement))
        except (ProtocolError, ValueError, OSError, ZeroconfError) as error:
            log.debug("mDNS record passed over", extra={"instance": name, "error": str(error)})
        finally:
            if self._resolving.get(name) is asyncio.current_task():
                del self._resolving[name]

    # ---- what is known

    def _note(self, candidate: Candidate) -> None:
        if candidate.id in self._known or len(self._known) < MAX_CANDIDATES:
            self._known[candidate.id] = candidate


@contextlib.asynccontextmanager
async def _browsing(
    heard: Callable[[Zeroconf, str, ServiceStateChange], None],
) -> AsyncIterator[AsyncZeroconf]:
    """A running browser; raises what zeroconf raises."""

    def on_change(
        zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        heard(zeroconf, name, state_change)

    zeroconf = AsyncZeroconf()
    browser = None
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[on_change])
        yield zeroconf
    finally:
        with contextlib.suppress(OSError, TimeoutError, ZeroconfError):
            async with asyncio.timeout(CLOSE_SECONDS):
                if browser is not None:
                    await browser.async_cancel()
                await zeroconf.async_close()


def own_networks() -> list[ipaddress.IPv4Network]:
    """The IPv4 networks this machine is on, loopback left out."""
    return [
        ipaddress.IPv4Network(f"{entry.address}/{entry.netmask}", strict=False)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and entry.netmask
        if not ipaddress.ip_address(entry.address).is_loopback
    ]


def order_hosts(hosts: Sequence[str], networks: Sequence[ipaddress.IPv4Network]) -> list[str]:
    """Hosts of our own networks first, loopback last: no other worker could send to it."""

    def rank(host: str) -> int:
        address = ipaddress.ip_address(host)
        if address.is_loopback:
            return 2
        return 0 if any(address in network for network in networks) else 1

    return sorted(dict.fromkeys(hosts), key=rank)


async def collect(discovery: Discovery, seconds: float) -> list[Candidate]:
    """All candidates that turn up within `seconds`."""
    await asyncio.sleep(seconds)
    return discovery.candidates()
