"""The credentials of a worker, chosen by its command line: none, those it has, or those of a new join."""

from __future__ import annotations

import logging
from pathlib import Path

from proto.address import is_loopback
from proto.errors import UsageError
from proto.trust.join_client import join
from proto.trust.join_token import JoinToken
from proto.trust.node_trust import NodeTrust
from proto.trust.state_dir import read_text, state_dir

log = logging.getLogger(__name__)

LOCAL_TOKEN = Path("authority", "local.token")
"""The file in the state directory where a coordinator on this machine keeps a token for its user's workers."""

_PREFIX = "worker"
"""The folder of the worker's credentials in the state directory."""


async def worker_trust(
    host: str, name: str, token: str | None, given: Path | None, *, insecure: bool
) -> NodeTrust | None:
    """Return the credentials of a worker that listens on `host`, or None for a listener without TLS.

    Only a listener on loopback, or with `insecure`, has no TLS. `token` is the value of --join, `given` that of
    --state-dir. Raises UsageError when the worker has no credentials, and the errors of a join.
    """
    if token and (insecure or is_loopback(host)):
        raise UsageError(
            "--join secures connections from other machines. Use it without --insecure, and with --listen and an "
            "address that they reach"
        )
    if insecure and not is_loopback(host):
        log.warning(
            "insecure: any machine that reaches this worker can use it, and read its traffic"
        )
    if insecure or is_loopback(host):
        return None
    state = state_dir(given)
    directory = state / _PREFIX
    if token:
        return await _join(token, name, directory)
    trust, problem = _stored(directory)
    if trust is None and (local := read_text(state / LOCAL_TOKEN)):
        return await _join(local, name, directory)
    if trust is None:
        raise problem or UsageError(
            f"--listen {host} is open to the network, and this machine has joined no cluster. Run mtp-coord token "
            "create at the coordinator and start this worker with --join TOKEN, or add --insecure"
        )
    log.info(
        "member of a cluster",
        extra={"cluster": trust.identity.cluster, "node": trust.identity.node},
    )
    return trust


def _stored(directory: Path) -> tuple[NodeTrust | None, UsageError | None]:
    """Return the stored credentials, and why they are unusable."""
    try:
        return NodeTrust.load(directory), None
    except UsageError as error:
        return None, error


async def _join(token: str, name: str, directory: Path) -> NodeTrust:
    trust = await join(JoinToken.parse(token), name, directory)
    log.info("joined", extra={"cluster": trust.identity.cluster, "node": trust.identity.node})
    return trust
