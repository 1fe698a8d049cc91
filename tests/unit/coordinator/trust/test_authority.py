"""The certificate authority: identities, rotation, and its files."""

from __future__ import annotations

import contextlib
import shutil
import stat
from datetime import timedelta
from pathlib import Path

import pytest

from coordinator.trust import authority as authorities
from coordinator.trust.authority import MAX_AUTHORITIES, Authority
from proto.errors import AccessError, UsageError
from proto.state_dir import write_private
from proto.trust.certificates import (
    Role,
    check_issued_by,
    from_pem,
    identity_of,
    renewal_time,
    signing_request,
    utc_now,
)
from proto.trust.node_trust import NodeTrust
from tests.support.trust.cluster_ca import expired_trust, make_authority, trust_of


def test_only_the_owner_reads_the_key(tmp_path: Path) -> None:
    """Every file of the authority has mode 0600, and its directory 0700."""
    directory = make_authority(tmp_path).directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in directory.iterdir()} == {0o600}


def test_certificates_carry_the_identity(tmp_path: Path) -> None:
    """A certificate names cluster, role and node, and lives 30 days; its renewal is due after 20."""
    trust = trust_of(make_authority(tmp_path), Role.WORKER, "0123456789abcdef")
    (certificate,) = from_pem(trust.certificate)
    assert identity_of(certificate) == trust.identity
    days = (renewal_time(certificate) - utc_now()).total_seconds() / 86400
    assert 19.9 < days < 20.1
    assert trust.due_request() == ""


def test_another_authority_is_refused(tmp_path: Path) -> None:
    """A certificate of one cluster is worth nothing in another."""
    own, other = make_authority(tmp_path / "a"), make_authority(tmp_path / "b")
    (certificate,) = from_pem(trust_of(other, Role.WORKER).certificate)
    with pytest.raises(AccessError, match="another authority"):
        check_issued_by(certificate, own.certificates, utc_now())


def test_rotation_overlaps(tmp_path: Path) -> None:
    """After a rotation old certificates stay valid, new ones reach old nodes, and old nodes ask for renewal."""
    authority = make_authority(tmp_path)
    before = authority.certificates[0]
    node = trust_of(authority, Role.WORKER)
    authority.rotate()
    assert len(authority.certificates) == 2
    chain = from_pem(trust_of(authority, Role.COORDINATOR).certificate)
    check_issued_by(chain[0], [chain[1]], utc_now())
    check_issued_by(chain[1], [before], utc_now())
    node.install(authority.bundle, frozenset())
    assert node.due_request()
    node.install(authority.bundle, frozenset(), authority.issue(node.key.public_key(), node.identity))
    assert node.due_request() == ""


def test_a_node_that_missed_rotations_is_still_a_member(tmp_path: Path) -> None:
    """A node that knows only the first authority accepts newer chains, and its certificate is accepted."""
    authority = make_authority(tmp_path)
    (first,) = authority.certificates
    node = trust_of(authority, Role.WORKER)
    for _ in range(MAX_AUTHORITIES):
        authority.rotate()
    with pytest.raises(UsageError, match="Rotate again when"):
        authority.rotate()
    chain = from_pem(trust_of(authority, Role.COORDINATOR).certificate)
    for certificate, issuer in zip(chain, [*chain[1:], first], strict=True):
        check_issued_by(certificate, [issuer], utc_now())
    check_issued_by(from_pem(node.certificate)[0], from_pem(authority.bundle), utc_now())
    node.install(authority.bundle, frozenset())
    assert node.due_request()
    found = Authority.open(tmp_path)
    assert found is not None
    assert (found.certificates, found.crosses) == (authority.certificates, authority.crosses)


def test_expired_authorities_are_dropped_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each earlier authority is accepted until its last certificate has expired, and no longer."""
    authority = make_authority(tmp_path)
    for _ in range(3):
        authority.rotate()
    newest = authority.certificates
    late = authority.crosses[2].not_valid_after_utc + timedelta(seconds=1)
    monkeypatch.setattr("coordinator.trust.authority.utc_now", lambda: late)
    assert authority.drop_expired()
    assert authority.certificates == newest[: len(authority.crosses) + 1]
    assert not authority.drop_expired()


def test_a_node_keeps_what_it_had_when_an_update_is_wrong(tmp_path: Path) -> None:
    """Authorities that did not issue the certificate, and certificates of other nodes, are refused."""
    authority, other = make_authority(tmp_path / "a"), make_authority(tmp_path / "b")
    node = trust_of(authority, Role.WORKER)
    before = (node.certificate, node.authorities, node.removed)
    stranger = authority.issue(node.key.public_key(), trust_of(authority, Role.WORKER).identity)
    for bundle, removed, chain in (
        (other.bundle, frozenset[str](), ""),
        (authority.bundle, frozenset({"../x"}), ""),
        (authority.bundle, frozenset[str](), stranger),
        (authority.bundle, frozenset[str](), trust_of(authority, Role.WORKER).certificate),
        ("", frozenset[str](), ""),
    ):
        with pytest.raises(AccessError):
            node.install(bundle, removed, chain)
        assert (node.certificate, node.authorities, node.removed) == before


def test_credentials_survive_a_restart(tmp_path: Path) -> None:
    """Saved credentials load again. Damaged or expired ones say what to do."""
    authority = make_authority(tmp_path / "ca")
    node = trust_of(authority, Role.WORKER, removed=frozenset({"0123456789abcdef"}))
    node.directory = tmp_path / "node"
    assert NodeTrust.load(node.directory) is None
    node.write_files()
    loaded = NodeTrust.load(node.directory)
    assert loaded is not None
    assert (loaded.identity, loaded.removed) == (node.identity, node.removed)
    node.certificate = expired_trust(authority, Role.WORKER).certificate
    node.write_files()
    with pytest.raises(UsageError, match="--join"):
        NodeTrust.load(node.directory)


def test_a_copy_of_the_directory_moves_the_cluster(tmp_path: Path) -> None:
    """Another state directory with a copy of the authority's files has the same authority."""
    authority = make_authority(tmp_path / "a")
    authority.rotate()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    moved = Authority.open(tmp_path / "b")
    assert moved is not None
    assert (moved.cluster, moved.bundle) == (authority.cluster, authority.bundle)


def test_a_request_needs_the_private_key(tmp_path: Path) -> None:
    """A changed request has no valid signature."""
    from proto.trust.certificates import requested_key

    request = signing_request(trust_of(make_authority(tmp_path), Role.WORKER).key)
    requested_key(request)
    lines = request.splitlines()
    lines[-2] = lines[-2][::-1]
    for hostile in ("\n".join(lines), "", "-----BEGIN CERTIFICATE REQUEST-----", request[:200]):
        with pytest.raises(AccessError):
            requested_key(hostile)


def test_a_certificate_of_a_wrong_clock_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the clock was days ahead, a node asks for a new certificate instead of waiting for the old one."""
    authority = make_authority(tmp_path)
    node = trust_of(authority, Role.COORDINATOR)
    assert node.due_request() == ""
    with monkeypatch.context() as patch:
        patch.setattr(authorities, "utc_now", lambda: utc_now() + timedelta(days=3))
        node.certificate = authority.issue(node.key.public_key(), node.identity)
    assert node.due_request()
    assert authority.must_renew(from_pem(node.certificate)[0])
    with pytest.raises(AccessError, match="clock of this machine says"):
        node.install(authority.bundle, node.removed)


def test_a_full_disk_does_not_delay_a_removal(tmp_path: Path) -> None:
    """A removal that cannot be saved is in force at once, and saved with the next update."""
    authority, lost = make_authority(tmp_path / "ca"), "0123456789abcdef"
    node = trust_of(authority, Role.WORKER)
    node.directory = tmp_path / "node"
    node.write_files()
    applied: list[frozenset[str]] = []
    node.on_removed = applied.append
    away = node.directory.rename(tmp_path / "away")
    node.directory.write_text("not a directory")
    with pytest.raises(UsageError, match="cannot be written"):
        node.install(authority.bundle, frozenset({lost}))
    assert applied == [{lost}]
    node.directory.unlink()
    away.rename(node.directory)
    node.install(authority.bundle, frozenset({lost}))
    loaded = NodeTrust.load(node.directory)
    assert loaded is not None
    assert loaded.removed == {lost}


@pytest.mark.parametrize("written", range(5))
def test_an_interrupted_rotation_has_no_effect(written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after some files of a rotation leaves the earlier authority, which rotates again later."""
    authority = make_authority(tmp_path)
    authority.rotate()
    node = trust_of(authority, Role.WORKER)
    files: list[Path] = []

    def write(file: Path, text: str) -> None:
        files.append(file)
        if len(files) > written:
            raise UsageError("no space left")
        write_private(file, text)

    monkeypatch.setattr(authorities, "write_private", write)
    again = make_authority(tmp_path)
    with pytest.raises(UsageError) if written < 4 else contextlib.nullcontext():
        again.rotate()
    monkeypatch.undo()
    found = make_authority(tmp_path)
    assert len(found.certificates) == len(found.crosses) + 1 == (2 if written < 4 else 3)
    peer = trust_of(found, Role.WORKER)
    assert peer.identity.cluster == node.identity.cluster
    peer.install(found.bundle, peer.removed)
    found.rotate()
    node.install(found.bundle, node.removed)
