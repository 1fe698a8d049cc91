"""Images from other servers, for `--fetch-images`. A client must not reach this network's machines through it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from urllib.parse import urljoin, urlsplit

import httpx

from proto.errors import RequestError

FETCH_SECONDS = 15.0
"""Seconds. Bound of one image, with its redirects."""

MAX_FETCHED_BYTES = 20 * 2**20

MAX_REDIRECTS = 3

_NAMES = ThreadPoolExecutor(4, thread_name_prefix="names")
"""Threads of their own, because a search for a name may outlive its request by far, and other work needs threads."""

_tls = cache(partial(httpx.create_ssl_context, trust_env=False))
"""Returns the context of all connections, which takes 30 ms to make."""


async def fetch_image(url: str, param: str) -> bytes:
    """Return what `url` names. Raises RequestError, with the field `param`, for an address or an answer not allowed."""
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            for _ in range(MAX_REDIRECTS + 1):
                found = await _fetch_once(url)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        problem = f"more than {MAX_REDIRECTS} redirects"
    except TimeoutError:
        problem = f"no answer within {FETCH_SECONDS:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        problem = str(error) or type(error).__name__
    raise RequestError(
        f"{param}: the image {url!r:.100} cannot be loaded: {problem:.200}", param=param
    )


async def _fetch_once(url: str) -> bytes | str:
    """Return the body, or the address of a redirect. The connection goes to the address that was checked."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an http address")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = await _public_address(parts.hostname, port)
    host = f"[{address}]" if ":" in address else address
    target = httpx.URL(url).copy_with(host=host.strip("[]"))
    # A compressed body may grow a thousandfold before its size is known.
    headers = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity"}
    async with (
        httpx.AsyncClient(timeout=FETCH_SECONDS, trust_env=False, verify=_tls()) as client,
        client.stream(
            "GET", target, headers=headers, extensions={"sni_hostname": parts.hostname}
        ) as answer,
    ):
        if answer.is_redirect:
            return str(answer.headers.get("location", ""))
        answer.raise_for_status()
        content = bytearray()
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise ValueError("a compressed answer")
        async for chunk in answer.aiter_raw():
            content += chunk
            if len(content) > MAX_FETCHED_BYTES:
                raise ValueError(f"more than {MAX_FETCHED_BYTES} bytes")
        return bytes(content)


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_OLD_FORMS = [ipaddress.ip_network(net) for net in ("::/96", "fec0::/10", "2001::/32")]
"""Addresses of IPv6 that stand for others, or for sites of the past: compatible, site-local and Teredo."""


def is_public(address: str) -> bool:
    """Return whether an IP address, and the one of IPv4 within it, is on the public Internet."""
    found = ipaddress.ip_address(address)
    inner: list[ipaddress.IPv4Address | ipaddress.IPv6Address | None] = [found]
    if isinstance(found, ipaddress.IPv6Address):
        if any(found in net for net in _OLD_FORMS):
            return False
        nat64 = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else None
        inner += [found.ipv4_mapped, found.sixtofour, nat64]
    return all(each.is_global and not each.is_multicast for each in inner if each is not None)


async def _public_address(host: str, port: int) -> str:
    """Return an address of `host`. Raises ValueError if one of them is not on the public Internet."""
    search = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_NAMES, search)
    addresses = [str(address[0]) for *_, address in found]
    if not addresses or not all(is_public(each) for each in addresses):
        raise ValueError(f"{host} is no address of the public Internet")
    return addresses[0]
