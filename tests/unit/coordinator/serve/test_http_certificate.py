"""The certificate of the HTTP server while the server runs: renewal, rotation, and files of the user."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.serve.certificate import TlsFiles, issue_certificate, renew_in_context
from coordinator.trust.authority import Authority
from proto.trust.certificates import check_issued_by, from_pem, renewal_time, utc_now
from tests.support.trust.cluster_ca import make_authority


@pytest.fixture
def options(tmp_path: Path) -> Any:
    return SimpleNamespace(state=tmp_path, host="127.0.0.1")


def context_of(files: TlsFiles) -> ssl.SSLContext:
    """Return a server's context with the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


async def served_certificate(context: ssl.SSLContext) -> str:
    """Return the certificate that a new connection gets."""
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context
    )
    async with server:
        address = server.sockets[0].getsockname()
        return await asyncio.to_thread(ssl.get_server_certificate, address)


async def test_a_rotation_and_age_renew_the_certificate(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections get a certificate of the newest authority, and another one after two thirds of its life."""
    authority = make_authority(tmp_path)
    files = issue_certificate(authority, options)
    context = context_of(files)
    loaded = renew_in_context(options, files, context, 0)
    first = await served_certificate(context)
    assert renew_in_context(options, files, context, loaded) == loaded
    authority.rotate()
    loaded = renew_in_context(options, files, context, loaded)
    second = await served_certificate(context)
    assert second != first
    newest = Authority.open(tmp_path)
    assert newest is not None
    check_issued_by(from_pem(second)[0], newest.certificates[:1], utc_now())
    later = renewal_time(from_pem(second)[0])
    monkeypatch.setattr("proto.trust.certificates.utc_now", lambda: later)
    assert renew_in_context(options, files, context, loaded) != loaded
    assert await served_certificate(context) != second


async def test_a_changed_file_of_the_user_is_used(options: Any, tmp_path: Path) -> None:
    """The files of --tls-cert are read again when they change. Damaged ones are an error, and the old ones serve."""
    other = make_authority(tmp_path / "other")
    made = issue_certificate(other, options)
    files = TlsFiles(made.certificate, made.key)
    context = context_of(files)
    loaded = renew_in_context(options, files, context, 0)
    before = await served_certificate(context)
    issue_certificate(other, options)
    loaded = renew_in_context(options, files, context, loaded)
    after = await served_certificate(context)
    assert after != before
    files.certificate.write_text("damaged")
    with pytest.raises(ssl.SSLError):
        renew_in_context(options, files, context, loaded)
    assert await served_certificate(context) == after
