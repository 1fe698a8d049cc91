"""A laptop and a member of the cluster as clients: `connect`, the servers that commands find, and their keys."""

from __future__ import annotations

import json
import os
import pty
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app as commands
from coordinator.cli import cluster_commands, import_command
from coordinator.cli.known_servers import find_server
from coordinator.trust.authority import Authority
from coordinator.trust.client_access import ClientAccess
from coordinator.trust.keys import KeyRing
from coordinator.trust.registry import Registry
from coordinator.web.context import ApiOptions
from proto.errors import AccessError, ClusterError, NotReadyError, UsageError
from proto.state_dir import STATE_DIR, claim
from proto.trust.certificates import NodeIdentity, Role, key_to_pem, new_id, new_key
from proto.trust.joining import JoinToken, new_token
from proto.trust.node_trust import NodeTrust
from tests.support.api.api_client import ApiClient
from tests.support.api.api_server import serving


@dataclass
class Server:
    """A server over HTTPS, with the state directory of its machine."""

    url: str
    state: Path
    authority: Authority
    ring: KeyRing

    def line(self, *words: str) -> str:
        """Return the words of a line that `mtp-coord token create` prints."""
        return run("token", "create", *words, "--state-dir", str(self.state)).splitlines()[0]


def run(*words: str) -> str:
    """Return what a command prints. Raises its error."""
    done = CliRunner().invoke(commands, words)
    if isinstance(done.exception, ClusterError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def certificate(authority: Authority, folder: Path) -> Path:
    key, chain = authority.issue_to_coordinator(("127.0.0.1", "localhost"))
    (folder / "server.pem").write_text(key_to_pem(key) + chain)
    return folder / "server.pem"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a server. The commands of the test run on a laptop, whose state directory is empty."""
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "laptop"))
    state = tmp_path / "mac-1"
    authority = Authority.open(state, create=True)
    assert authority is not None
    ring = KeyRing(state, required=True)
    options = ApiOptions(key_ring=ring, clients=ClientAccess(state, authority, ring, ""))
    with serving(ApiClient(options=options).app, certificate(authority, tmp_path)) as url:
        ring.admit_machines(url, frozenset())
        yield Server(url, state, authority, ring)


def connect(server: Server) -> str:
    """Run the line for a laptop, and return the output."""
    program, *words = server.line("--client").split()
    assert program == "mtp-coord"
    return run(*words, "--name", "laptop")


def test_a_laptop_needs_one_line(server: Server, tmp_path: Path) -> None:
    """After it, commands find the server and have a key, until the key is revoked. The files are private."""
    output = connect(server)
    assert "tiny" in run("status")
    assert "tiny" in run("status", "--url", server.url.replace("127.0.0.1", "localhost"))
    files = sorted((tmp_path / "laptop" / "client").iterdir())
    assert [file.name for file in files] == ["authorities.pem", "curl", "server.json"]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    key = json.loads(files[2].read_text())["key"]
    assert key in files[1].read_text()
    assert key not in output
    with pytest.raises(UsageError, match="needs the scope admin"):
        run("load", "other")
    (name,) = [one.name for one in server.ring.stored_keys()]
    assert name.startswith("laptop-")
    server.ring.revoke(name)
    with pytest.raises(AccessError, match="token create --client"):
        run("status")


def test_a_token_admits_one_client_and_no_machine(server: Server) -> None:
    """A second use, a wrong secret, and the token of a worker are refused. No worker joins by a client's token."""
    words = server.line("--client").split()[1:]
    run(*words)
    with pytest.raises(UsageError, match="it is used"):
        run(*words)
    token = JoinToken.parse(server.line("--client", "--bare"))
    wrong = JoinToken(token.cluster, token.authority, token.token_id, bytes(16), token.address)
    with pytest.raises(UsageError, match="its secret is wrong"):
        run("connect", str(wrong))
    with pytest.raises(AccessError, match="mtp-coord connect"):
        Registry(server.state).use_token(token.token_id, token.proof(b"s", "r"), b"s", "r")
    worker = new_token(server.authority.cluster, server.authority.fingerprint, server.url)
    Registry(server.state).add_token(worker, 60.0, 1)
    with pytest.raises(UsageError, match="mtp-worker --join"):
        run("connect", str(worker))
    with pytest.raises(UsageError, match="mtp-worker --join TOKEN"):
        run("connect", server.line("--bare", "--address", "127.0.0.1:1"))
    assert len(server.ring.stored_keys()) == 1


def test_a_token_is_for_the_server_of_its_authority(server: Server, tmp_path: Path) -> None:
    """The holder of another certificate at the address gets no proof, and the laptop keeps nothing."""
    token = JoinToken.parse(server.line("--client", "--bare"))
    other = JoinToken(token.cluster, bytes(32), token.token_id, token.secret, token.address)
    with pytest.raises(AccessError, match="Nothing was sent"):
        run("connect", str(other))
    assert not (tmp_path / "laptop" / "client").exists()
    run("connect", str(token))


def test_https_mistakes_have_their_own_words(server: Server) -> None:
    """An unknown certificate, HTTP to HTTPS and HTTPS to HTTP are told from a server that does not run."""
    with pytest.raises(NotReadyError, match=r"certificate of .* is not trusted here.*token create --client"):
        run("status", "--url", server.url)
    for url in (server.url.replace("https", "http"), server.url.removeprefix("https://")):
        with pytest.raises(NotReadyError, match="speaks HTTPS"):
            run("status", "--url", url)
    with serving(ApiClient().app) as plain, pytest.raises(NotReadyError, match="does not speak HTTPS"):
        run("status", "--url", plain.replace("http", "https"))
    with socket.socket() as taken:  # no process listens on this port
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(NotReadyError, match="no coordinator answers"):
            run("status", "--url", f"https://127.0.0.1:{taken.getsockname()[1]}")


def member_trust(server: Server, state: Path) -> NodeTrust:
    """Return the credentials of a machine that has joined."""
    key, identity = new_key(), NodeIdentity(server.authority.cluster, Role.WORKER, new_id())
    chain = server.authority.issue(key.public_key(), identity)
    trust = NodeTrust(key, chain, server.authority.bundle, directory=state / "worker")
    trust.write_files()
    return trust


def test_a_member_finds_the_server_until_it_is_removed(server: Server, tmp_path: Path) -> None:
    """It gets URL and key by the trust update. A removal makes a new key, and no other start does."""
    update = json.loads((server.state / "keys" / "machines.json").read_text())
    member_trust(server, tmp_path / "laptop").save_server(update["url"], update["key"])
    for words in ((), ("--url", server.url), ("--url", server.url.replace("127.0.0.1", "localhost"))):
        assert "tiny" in run("status", *words)
    server.ring.admit_machines(server.url, frozenset())
    assert "tiny" in run("status")
    server.ring.admit_machines(server.url, frozenset({"0123456789abcdef"}))
    with pytest.raises(AccessError):
        run("status")


def test_no_other_server_gets_a_key(server: Server, tmp_path: Path) -> None:
    """A server of another authority, and one without TLS at the same port, are no known servers."""
    connect(server)
    (tmp_path / "foreign").mkdir()
    foreign = Authority.open(tmp_path / "foreign", create=True)
    assert foreign is not None
    with serving(ApiClient().app, certificate(foreign, tmp_path / "foreign")) as url:
        assert not find_server(url, None).key
        with pytest.raises(NotReadyError, match="not trusted"):
            cluster_commands.fetch(url, None)
    assert not find_server(server.url.replace("https", "http"), None).key
    assert find_server("", None).key
    assert find_server("", "mine other").key == "mine"


def test_the_own_server_comes_first_while_it_runs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's file names the URL, also that of HTTPS, and the server of an earlier start does not hide others."""
    monkeypatch.setenv(STATE_DIR, str(server.state))
    server.ring.admit_owner(server.url)
    connect(server)
    assert find_server("", None).key == json.loads((server.state / "client" / "server.json").read_text())["key"]
    claim(server.state)
    found = find_server("", None)
    assert found.is_own
    assert found.key == json.loads((server.state / "keys" / "owner.json").read_text())["key"]
    assert "tiny" in run("status")


def test_agents_get_a_key_and_the_authority(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`launch` passes a file with the authorities of the cluster and those that its user had. The owner's key stays."""
    own = tmp_path / "own.pem"
    own.write_text((tmp_path / "server.pem").read_text())
    started: list[dict[str, str]] = []
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("os.execve", lambda program, words, environment: started.append(environment))
    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", str(own))
    connect(server)
    import_command("launch").main(["claude"], standalone_mode=False)
    (found,) = started
    assert found["ANTHROPIC_BASE_URL"] == server.url
    assert found["ANTHROPIC_AUTH_TOKEN"] == find_server("", None).key
    assert found["NODE_EXTRA_CA_CERTS"] == found["SSL_CERT_FILE"]
    assert own.read_text().strip() in Path(found["SSL_CERT_FILE"]).read_text()
    context = ssl.create_default_context(cafile=found["SSL_CERT_FILE"])
    address = server.url.removeprefix("https://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as plain:
        context.wrap_socket(plain, server_hostname=address[0]).close()
    assert context.cert_store_stats()["x509_ca"] > 10
    settings = json.loads((tmp_path / "laptop" / "launch" / "claude" / "settings.json").read_text())
    assert settings["env"]["NODE_EXTRA_CA_CERTS"] == found["SSL_CERT_FILE"]
    monkeypatch.setenv(STATE_DIR, str(server.state))
    server.ring.admit_owner(server.url)
    import_command("launch").main(["goose"], standalone_mode=False)
    machines = json.loads((server.state / "keys" / "machines.json").read_text())["key"]
    assert started[1]["OPENAI_API_KEY"] == machines


@pytest.mark.parametrize("answer", ["n", "y"])
def test_the_first_key_is_asked_for_on_a_terminal(answer: str, tmp_path: Path) -> None:
    """It makes every client need a key, so the question says so, with the way back. `n` makes no key."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", "from coordinator.cli import main; main()", "key", "create", "laptop"]
    os.write(ours, answer.encode() + b"\n")
    done = subprocess.run(
        [*words, "--state-dir", str(tmp_path)], stdin=theirs, stderr=theirs, stdout=theirs, timeout=30
    )
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    os.close(theirs)
    assert "every client needs one" in shown
    assert "revoke all keys, and start" in shown
    assert done.returncode == (0 if answer == "y" else 1)
    assert [key.name for key in KeyRing(tmp_path).stored_keys()] == (["laptop"] if answer == "y" else [])
    assert ("mtp-" in shown.replace("mtp-coord", "")) == (answer == "y")
