"""Announcements of workers, their addresses, and the addresses that users write, without a network."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.announcement import SERVICE_TYPE, Announcement, join_address, parse_address
from proto.errors import UsageError
from worker.node.announce import reachable_addresses

# ---- what is announced


@given(st.text(max_size=200), st.integers(1, 65535))
def test_an_announcement_survives_its_record(name: str, port: int) -> None:
    """Id, port, cluster and node survive any name, and fit the limits of mDNS."""
    sent = Announcement("0f" * 16, name, port, "ab" * 8, "cd" * 8)
    txt = {k.encode(): v.encode(errors="replace") for k, v in sent.to_txt().items()}
    assert all(len(k) + len(v) < 255 for k, v in txt.items())
    assert len(sent.instance.removesuffix(f".{SERVICE_TYPE}").encode()) <= 63
    back = Announcement.from_txt(txt, port)
    assert replace(back, name=name) == sent
    assert back.name.isprintable()


# ---- which address


def test_a_listener_is_announced_where_it_can_be_reached() -> None:
    """A loopback listener announces only loopback, and a network listener never does."""
    assert reachable_addresses("127.0.0.1") == ["127.0.0.1"]
    assert reachable_addresses("localhost") == ["127.0.0.1"]
    assert reachable_addresses("10.1.2.3") == ["10.1.2.3"]
    everywhere = reachable_addresses("0.0.0.0")
    assert everywhere
    assert everywhere == ["127.0.0.1"] or not any(a.startswith("127.") for a in everywhere)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("mac-2.local:50505", "mac-2.local:50505"),
        (" 10.0.0.7:1 ", "10.0.0.7:1"),
        ("[fd00::2]:99", "[fd00::2]:99"),
    ],
)
def test_addresses_are_read(text: str, address: str) -> None:
    """Host names, IPv4, and IPv6 in brackets."""
    assert join_address(*parse_address("--worker", text)) == address


@pytest.mark.parametrize(
    "text", ["", "mac-2", ":50505", "mac-2:", "mac-2:0", "mac-2:99999", "mac-2:x", "a b:1", "a,b:1"]
)
def test_a_malformed_address_is_refused(text: str) -> None:
    """A UsageError names the flag and shows how to write an address."""
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address("--worker", text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("0.0.0.0", "0.0.0.0", 50505),
        (":8000", "127.0.0.1", 8000),
        ("[fd00::2]", "fd00::2", 50505),
        ("mac-2:0", "mac-2", 0),
        ("[::1]:7", "::1", 7),
    ],
)
def test_a_listen_address_may_omit_host_or_port(text: str, host: str, port: int) -> None:
    """With a default port, the port may be absent or 0, and the host may be absent."""
    assert parse_address("--listen", text, 50505) == (host, port)


@pytest.mark.parametrize("text", ["a b:1", "host:65536", "host:-1", "a,b", "user@host:1"])
def test_a_malformed_listen_address_is_refused(text: str) -> None:
    """The listen flag follows the same rules as the worker flag."""
    with pytest.raises(UsageError, match="--listen"):
        parse_address("--listen", text, 50505)
