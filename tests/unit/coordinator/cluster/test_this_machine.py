"""Detection of workers on the coordinator's own machine."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from coordinator.cluster.discovery import on_this_machine


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:50505", True),
        ("localhost:50505", True),
        ("[::1]:50505", True),
        ("192.168.7.2:50505", True),
        ("192.168.7.3:50505", False),
        ("mac-2.local:50505", False),
    ],
)
def test_a_worker_on_this_machine_is_recognized(
    monkeypatch: pytest.MonkeyPatch, address: str, here: bool
) -> None:
    """A loopback address, or one of this machine's interfaces, is local; any other address is not."""
    interfaces = {"en0": [SimpleNamespace(address="192.168.7.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert on_this_machine(address) is here
