"""A link in the relay loses, delays, duplicates and reorders the stated shares of packets."""

from __future__ import annotations

import random

from tests.chaos.network import netem_words
from tests.chaos.packet_link import QUEUE_SECONDS, Impairment, PacketLink

PACKETS, BYTES, GAP = 2000, 1000, 0.01


def sent_over(impairment: Impairment) -> list[list[float]]:
    """Return the delays of the copies of each of PACKETS packets that are sent every GAP seconds."""
    link = PacketLink(impairment, random.Random(1))
    times = [GAP * number for number in range(PACKETS)]
    return [[at - now for at in link.arrivals(BYTES, now)] for now in times]


def test_a_link_without_faults_forwards_at_once() -> None:
    """An impairment without values changes nothing."""
    assert sent_over(Impairment()) == [[0.0]] * PACKETS


def test_packets_are_lost_and_duplicated_at_random() -> None:
    """The shares of lost and duplicated packets are those of the impairment, and a cut loses all."""
    copies = [len(packet) for packet in sent_over(Impairment(loss=0.1, duplicate=0.2))]
    assert 150 < copies.count(0) < 250
    assert 300 < copies.count(2) < 420
    assert not any(sent_over(Impairment(loss=1.0)))


def test_delayed_packets_keep_their_order() -> None:
    """Jitter delays packets without reordering them. The share `reorder` overtakes the others."""
    found = sent_over(Impairment(delay=0.03, jitter=0.05))
    arrivals = [GAP * number + packet[0] for number, packet in enumerate(found)]
    assert arrivals == sorted(arrivals)
    assert min(packet[0] for packet in found) >= 0.03
    early = sum(packet == [0.0] for packet in sent_over(Impairment(delay=0.03, reorder=0.25)))
    assert 400 < early < 600


def test_a_rate_fills_a_queue_and_then_loses_packets() -> None:
    """Packets above the rate wait, up to the length of a router's queue."""
    found = sent_over(Impairment(rate=BYTES / GAP / 2))
    waits = [packet[0] for packet in found if packet]
    assert found[0] == [2 * GAP]
    assert max(waits) <= QUEUE_SECONDS + 2 * GAP
    assert 0.45 < sum(not packet for packet in found) / PACKETS < 0.51


def test_the_kernel_gets_the_same_impairment() -> None:
    """An impairment is written as the arguments of tc's netem."""
    faults = Impairment(0.05, 0.01, loss=0.02, duplicate=0.1, reorder=0.25, rate=125_000)
    words = "delay 50ms 10ms loss 2% duplicate 10% reorder 25% rate 1000000bit"
    assert netem_words(faults) == words.split()
