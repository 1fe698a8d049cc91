"""A router in user space that delays, loses, duplicates and reorders IP packets between network namespaces.

`python -m tests.chaos.relay SEED DEVICE...` opens one TUN device for each machine and forwards by the last byte of the
destination address: packets to x.x.x.1 go to the first device. A line on standard input replaces the impairments of all
links, as JSON: a list of [source, destination, impairment]. The relay confirms each line. It ends with its input.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import struct
import sys
import time

from tests.chaos.packet_link import Impairment, PacketLink

TUNSETIFF = 0x400454CA
"""The ioctl that attaches a descriptor of /dev/net/tun to a device, from linux/if_tun.h."""

TUN_WITHOUT_HEADER = 0x0001 | 0x1000
"""IFF_TUN and IFF_NO_PI: IP packets without a header of the driver."""

PACKET_BYTES = 65536
BURST = 64
"""Most packets that are read from one device before the other devices are read."""


def open_device(name: str) -> int:
    """Create the TUN device `name` and return its descriptor. It stays attached when the device changes namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN_WITHOUT_HEADER))
    return device


class Relay:
    """The router over the open TUN devices `devices`."""

    def __init__(self, devices: list[int], seed: int) -> None:
        self.devices = devices
        self.links: dict[tuple[int, int], PacketLink] = {}
        self._chance = random.Random(seed)
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()

    def configure(self, line: str) -> None:
        """Replace the impairments of all links by those of a line of input. Packets on their way still arrive."""
        self.links = {
            (source, destination): PacketLink(Impairment(**faults), self._chance)
            for source, destination, faults in json.loads(line)
        }

    def forward(self, source: int) -> None:
        """Read packets of machine `source`, and send or queue each."""
        for _ in range(BURST):
            try:
                packet = os.read(self.devices[source], PACKET_BYTES)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4 or not 1 <= packet[19] <= len(self.devices):
                continue  # IPv6 router solicitations, and multicast
            destination = packet[19] - 1
            link = self.links.get((source, destination))
            if link is None:
                self._write(destination, packet)
                continue
            for at in link.arrivals(len(packet), time.monotonic()):
                heapq.heappush(self._late, (at, next(self._count), destination, packet))

    def send_due(self) -> float | None:
        """Send every packet whose time has come. Return the seconds until the next one, or None if there is none."""
        while self._late:
            wait = self._late[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, _, destination, packet = heapq.heappop(self._late)
            self._write(destination, packet)
        return None

    def _write(self, destination: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # a device that is down loses packets, as a network does
            os.write(self.devices[destination], packet)

    def run(self) -> None:
        """Forward packets until standard input ends."""
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        for number, device in enumerate(self.devices):
            selector.register(device, selectors.EVENT_READ, number)
        while True:
            for key, _ in selector.select(self.send_due()):
                if key.data is not None:
                    self.forward(key.data)
                elif line := sys.stdin.readline():
                    self.configure(line)
                    print("configured", flush=True)
                else:
                    return


def main() -> None:
    """Run the router from the command line."""
    seed, *names = sys.argv[1:]
    relay = Relay([open_device(name) for name in names], int(seed))
    print("open", flush=True)
    relay.run()


if __name__ == "__main__":
    main()
