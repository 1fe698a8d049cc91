"""The network interface on the way to a peer: by macOS' hardware ports, by Linux' sysfs, and on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from proto.rpc.network import linux_kind, mac_kind

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:00:00:00:03

Hardware Port: USB 10/100/1000 LAN
Device: en10
Ethernet Address: 00:00:00:00:00:04
"""


@pytest.mark.parametrize(
    ("interface", "kind"),
    [
        ("bridge0", "Thunderbolt Bridge"),
        ("en0", "Ethernet"),
        ("en1", "Wi-Fi"),
        ("en10", "USB 10/100/1000 LAN"),
        ("utun3", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_mac_names_the_hardware_port(interface: str, kind: str) -> None:
    """The kind on macOS is the name of the hardware port, and interfaces without one are unknown."""
    assert mac_kind(interface, PORTS) == kind


def test_linux_tells_kinds_by_sysfs(tmp_path: Path) -> None:
    """Wi-Fi, Thunderbolt, interfaces without hardware, and Ethernet differ in what Linux says about them."""
    sysfs, devices = tmp_path / "class", tmp_path / "devices"
    sysfs.mkdir()
    for name, folder in (
        ("eth0", "pci"),
        ("wlan0", "pci"),
        ("thunderbolt0", "pci"),
        ("veth1", "virtual"),
    ):
        (devices / folder / "net" / name).mkdir(parents=True)
        (sysfs / name).symlink_to(devices / folder / "net" / name)
    (sysfs / "wlan0" / "wireless").mkdir()
    (devices / "drivers" / "thunderbolt-net").mkdir(parents=True)
    (sysfs / "thunderbolt0" / "device").mkdir()
    (sysfs / "thunderbolt0" / "device" / "driver").symlink_to(
        devices / "drivers" / "thunderbolt-net"
    )
    kinds = {name: linux_kind(name, sysfs) for name in ("eth0", "wlan0", "thunderbolt0", "veth1")}
    assert kinds == {
        "eth0": "Ethernet",
        "wlan0": "Wi-Fi",
        "thunderbolt0": "Thunderbolt",
        "veth1": "virtual",
    }
