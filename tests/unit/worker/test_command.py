"""The command line of a worker, and where one without --listen listens."""

from __future__ import annotations

import pytest

from proto.rpc.listener import reachable_address
from proto.trust.joining import new_token
from worker.cli import _with_join
from worker.node.process import cluster_host

TOKEN = str(new_token("0123456789abcdef", bytes(32), "192.0.2.1:50504"))


@pytest.mark.parametrize(
    "typed",
    [
        [TOKEN],
        ["--join", TOKEN],
        ["join", TOKEN],
        ["mtp-worker", "--join", TOKEN],
        ["--join", "mtp-worker", "--join", TOKEN],
        ["--name", "mac-2", TOKEN],
        ["service", "install", TOKEN],
    ],
)
def test_a_token_is_read_wherever_users_paste_it(typed: list[str]) -> None:
    """A token alone, and the printed line after the program or after --join, mean one --join."""
    found = _with_join([*typed, "--no-mdns"])
    assert found[-3:] == ["--join", TOKEN, "--no-mdns"]
    assert found[:-3] == [word for word in typed if word in ("--name", "mac-2", "service", "install")]


@pytest.mark.parametrize("typed", [[f"--join={TOKEN}"], ["--join", f"mtp-worker --join {TOKEN}"], ["--name", "join"]])
def test_other_arguments_are_unchanged(typed: list[str]) -> None:
    """The parser of tokens reads a whole line in one argument."""
    assert _with_join(typed) == typed


def test_a_worker_without_listen_follows_the_cluster_of_its_machine() -> None:
    """It listens where others join, if that is an address of this machine. A damaged or old token changes nothing."""
    own = reachable_address()
    assert cluster_host(str(new_token("0123456789abcdef", bytes(32), f"{own}:50504"))) == own
    for token in (None, "mtp1.damaged", TOKEN, str(new_token("0123456789abcdef", bytes(32), "127.0.0.1:9"))):
        assert cluster_host(token) == "127.0.0.1"
