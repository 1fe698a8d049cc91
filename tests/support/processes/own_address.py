"""An address of this machine for tests that listen off loopback."""

from __future__ import annotations

import pytest

from proto.rpc.listener import own_addresses

TEST_NETWORKS = "10.214."
"""The addresses of tests/chaos/network.py, which disappear while other tests run."""


def network_address() -> str:
    """Return an IPv4 address of this machine that is not loopback and stays. Skip the test if there is none."""
    for address in own_addresses():
        if "." in address and not address.startswith(("127.", TEST_NETWORKS)):
            return address
    pytest.skip("this machine has no network address")
