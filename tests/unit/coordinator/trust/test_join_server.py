"""Joins on loopback: limits, and connections that are no joins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.trust import authority as authorities
from coordinator.trust import cluster_trust
from coordinator.trust.authority import Authority
from coordinator.trust.cluster_trust import JoinServer
from coordinator.trust.registry import Registry
from proto.errors import AccessError
from proto.rpc.channels import open_channel
from proto.trust import certificates
from proto.trust.certificates import Role, from_pem, new_key, utc_now
from proto.trust.joining import JoinToken, _check_server, join, new_token
from tests.support.trust.cluster_ca import make_authority, trust_of


@asynccontextmanager
async def joining(folder: Path) -> AsyncIterator[tuple[Authority, JoinToken]]:
    """Run a join server, and yield its authority and a token for many machines."""
    authority, registry = make_authority(folder / "a"), Registry(folder / "a")
    async with JoinServer(authority, registry).listening("127.0.0.1", 0) as port:
        token = new_token(authority.cluster, authority.fingerprint, f"127.0.0.1:{port}")
        registry.add_token(token, 60.0, 1000)
        yield authority, token


async def test_connections_without_a_request_do_not_close_the_joins(tmp_path: Path) -> None:
    """A gRPC client that dials the join server again and again leaves it open for machines that join.

    A coordinator does that when --worker names the join address, or a port that the join server got later.
    """
    async with joining(tmp_path) as (authority, token):
        trust = trust_of(authority, Role.COORDINATOR)
        for _ in range(25):
            channel = open_channel(token.address, trust)
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/a/b")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=5)
            await channel.close()
            _, writer = await asyncio.open_connection(*token.address.split(":"))
            writer.close()
        joined = await join(token, "mac-2", tmp_path / "b")
    assert joined.identity.cluster == authority.cluster


@pytest.mark.parametrize("rotations", [1, 2])
async def test_machines_join_after_rotations(tmp_path: Path, rotations: int) -> None:
    """Tokens from before and after a rotation admit machines, without a restart of the coordinator."""
    async with joining(tmp_path) as (authority, token):
        await join(token, "mac-1", tmp_path / "b")
        for _ in range(rotations):
            authority.rotate()
        registry = Registry(tmp_path / "a")
        newer = new_token(authority.cluster, authority.fingerprint, token.address)
        registry.add_token(newer, 60.0, 1)
        for number, one in enumerate((token, newer)):
            joined = await join(one, f"mac-{number}", tmp_path / f"c{number}")
            assert joined.authorities == authority.bundle
            assert joined.due_request() == ""


async def test_a_certificate_of_the_join_server_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines join a server that runs for longer than a certificate lives."""
    life = timedelta(seconds=2)
    monkeypatch.setattr(cluster_trust, "CERTIFICATE_LIFE", life)
    monkeypatch.setattr(Authority.issue, "__defaults__", ((), life))
    async with joining(tmp_path) as (_, token):
        for number in range(4):
            await join(token, f"mac-{number}", tmp_path / f"m{number}")
            await asyncio.sleep(1.0)


async def test_the_clock_of_the_coordinator_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines join a server that started with a clock days ahead, as soon as the clock is right."""
    authority = make_authority(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(authorities, "utc_now", lambda: utc_now() + timedelta(days=3))
        server = JoinServer(authority, Registry(tmp_path / "a"))
    registry = Registry(tmp_path / "a")
    async with server.listening("127.0.0.1", 0) as port:
        token = new_token(authority.cluster, authority.fingerprint, f"127.0.0.1:{port}")
        registry.add_token(token, 60.0, 1)
        await join(token, "mac-1", tmp_path / "m")


@pytest.mark.parametrize("days", [-3, 40])
async def test_a_machine_with_a_wrong_clock_learns_why(
    days: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a join names both times, and the token is not used."""
    async with joining(tmp_path) as (_, token):
        with monkeypatch.context() as patch:
            patch.setattr(certificates, "utc_now", lambda: utc_now() + timedelta(days=days))
            with pytest.raises(AccessError, match="clock of this machine says"):
                await join(token, "mac-1", tmp_path / "m")
        assert Registry(tmp_path / "a").tokens()[token.token_id]["uses"] == 1000


async def test_a_full_disk_is_no_wrong_token(tmp_path: Path) -> None:
    """A machine learns that the coordinator cannot keep it, and may try as often as it likes with the same token."""
    async with joining(tmp_path) as (authority, token):
        away = authority.directory.rename(tmp_path / "away")
        authority.directory.write_text("not a directory")
        for _ in range(3):
            with pytest.raises(AccessError, match="cannot write its registry"):
                await join(token, "mac-1", tmp_path / "m")
        authority.directory.unlink()
        away.rename(authority.directory)
        await join(token, "mac-1", tmp_path / "m")


def test_a_node_may_not_issue_the_certificate_of_the_server(tmp_path: Path) -> None:
    """A member that signs a certificate with its own key is no authority, although the authority issued its own."""
    authority = make_authority(tmp_path / "a")
    member = trust_of(authority, Role.WORKER)
    token = new_token(authority.cluster, authority.fingerprint, "127.0.0.1:1")
    (own,) = from_pem(member.certificate)
    forger = replace(authority, key=member.key, certificates=(own,), crosses=())
    forged = from_pem(forger.issue(new_key().public_key(), trust_of(authority, Role.COORDINATOR).identity))[0]
    forged.verify_directly_issued_by(own)
    greeting, known = authority.bundle + member.certificate, frozenset([token.authority])
    with pytest.raises(AccessError):
        _check_server(forged.public_bytes(Encoding.DER), greeting, token.cluster, known)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("used", "it is used"),
        ("expired", "it has expired"),
        ("wrong", "its secret is wrong"),
        *((cause, "it is revoked, expired long ago, or is of another cluster") for cause in ("revoked", "unknown")),
    ],
)
async def test_each_cause_of_a_refused_token_has_its_text(tmp_path: Path, cause: str, words: str) -> None:
    """The refusal of a machine says the reason and what to do."""
    authority, registry = make_authority(tmp_path / "a"), Registry(tmp_path / "a")
    async with JoinServer(authority, registry).listening("127.0.0.1", 0) as port:
        token = new_token(authority.cluster, authority.fingerprint, f"127.0.0.1:{port}")
        other = new_token(authority.cluster, authority.fingerprint, token.address)
        registry.add_token(token, -1.0 if cause == "expired" else 60.0, 1)
        if cause == "used":
            await join(token, "mac-1", tmp_path / "b")
        elif cause == "wrong":
            token = replace(token, secret=other.secret)
        elif cause == "revoked":
            registry.revoke_token(token.token_id)
        elif cause == "unknown":
            token = other
        with pytest.raises(AccessError, match=f"refused the token: {words}.* Get a new one"):
            await join(token, "mac-2", tmp_path / "c")
