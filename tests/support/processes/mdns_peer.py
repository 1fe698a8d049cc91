"""One side of an mDNS conversation, run as a process: `announce NAME HOST` or `browse NAME`.

`announce` prints a line once it has begun and continues until its input ends. `browse` prints the addresses of the
worker called NAME as a JSON list, or null after 60 seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys

from coordinator.cluster.discovery import Discovery
from proto.announcement import Announcement
from worker.node.announce import announced

PORT = 4711


async def announce(name: str, host: str) -> None:
    """Announce a worker `name` at `host` until standard input ends."""
    announcement = Announcement(f"id-of-{name}", name, PORT)
    async with announced(announcement, host):
        print("announcing", flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def browse(name: str) -> tuple[str, ...] | None:
    """Return the addresses of the worker `name`, or None if it is not found within 60 seconds."""
    try:
        async with asyncio.timeout(60), Discovery() as discovery:
            while True:
                for candidate in discovery.candidates():
                    if candidate.name == name:
                        return candidate.addresses
                await asyncio.sleep(0.02)
    except TimeoutError:
        pass
    return None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["announce", name, host]:
            asyncio.run(announce(name, host))
        case ["browse", name]:
            print(json.dumps(asyncio.run(browse(name))))
        case _:
            sys.exit(2)
