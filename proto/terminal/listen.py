"""The rule for listeners that other machines can reach. The module does no I/O."""

from __future__ import annotations

from proto.address import is_loopback
from proto.errors import UsageError


def check_exposure(flag: str, host: str, *, insecure: bool) -> None:
    """Raise UsageError for a listener that other machines can reach, unless the user passed --insecure."""
    if not is_loopback(host) and not insecure:
        raise UsageError(
            f"{flag} {host} is open to the network, and connections are not encrypted yet. "
            "Add --insecure if you trust everyone on it"
        )
