"""Announcement by macOS's own mDNS responder, for a Mac on which this process cannot use the mDNS port itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from proto.announcement import SERVICE_TYPE, Announcement

STOP_SECONDS = 2.0
"""Seconds. Longest wait for `dns-sd` to end."""


@contextlib.asynccontextmanager
async def registered_by_dns_sd(
    announcement: Announcement,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Announce inside the block by a `dns-sd` process, and give that process.

    The responder adds this Mac's addresses by itself. Raises OSError if the program is missing.
    """
    service = SERVICE_TYPE.removesuffix(".local.")
    name = announcement.instance.removesuffix(f".{SERVICE_TYPE}")
    process = await asyncio.create_subprocess_exec(
        "dns-sd",
        "-R",
        name,
        service,
        "local.",
        str(announcement.port),
        *(f"{key}={value}" for key, value in announcement.to_txt().items()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
