"""The app of a Mac's services: its files byte for byte, its launcher's format and signature, and how a child ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import plistlib
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proto.terminal import mac_app
from proto.terminal.user_service import Service

SOURCE = Path(__file__).resolve().parents[3] / "deploy" / "macos" / "launcher.c"
COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the launcher for this machine."""
    program = tmp_path_factory.mktemp("launcher") / "launcher"
    subprocess.run([str(COMPILER), "-Wall", "-Wextra", "-Werror", "-o", program, SOURCE], check=True, timeout=60)
    return program


INFO = """\
<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0">
<dict>
	<key>CFBundleExecutable</key>
	<string>mtp-cluster</string>
	<key>CFBundleIdentifier</key>
	<string>mtp-cluster.service</string>
	<key>CFBundleName</key>
	<string>mtp-cluster</string>
	<key>CFBundlePackageType</key>
	<string>APPL</string>
	<key>CFBundleVersion</key>
	<string>1</string>
	<key>LSUIElement</key>
	<true/>
	<key>MTPLauncherDigest</key>
	<string>ec9a6e9fe278eb1a471fbab6f40367d8548078b651d9c71581c57c2a6ca379e0</string>
	<key>NSLocalNetworkUsageDescription</key>
	<string>The machines of your cluster find each other and compute together.</string>
</dict>
</plist>
"""


def test_the_app_has_these_files() -> None:
    """The tree is a pure function of the launcher."""
    files = {str(name): content for name, content in mac_app.app_files(b"launcher").items()}
    assert files == {"Contents/Info.plist": INFO.encode(), "Contents/MacOS/mtp-cluster": b"launcher"}


# ---- the committed launcher


def load_commands(data: bytes) -> dict[int, bytes]:
    """Return the load commands of a Mach-O file by their type, the last of each."""
    magic, cpu, _, kind, count, _, _, _ = struct.unpack_from("<8I", data)
    assert (magic, cpu, kind) == (0xFEEDFACF, 0x0100000C, 2), "not a program for Apple Silicon"
    found, at = {}, 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, at)
        found[command] = data[at : at + size]
        at += size
    return found


def test_the_launcher_is_a_signed_program_with_a_uuid() -> None:
    """Every page has the hash of the signature, which names the app. macOS kills a program with another one."""
    data = mac_app.LAUNCHER.read_bytes()
    commands = load_commands(data)
    assert any(commands[0x1B][8:]), "LC_UUID, by which macOS tells programs apart"
    start, size = struct.unpack_from("<2I", commands[0x1D], 8)
    blob = data[start : start + size]
    assert struct.unpack_from(">3I", blob) == (0xFADE0CC0, size, 1)
    directory = blob[struct.unpack_from(">I", blob, 16)[0] :]
    assert struct.unpack_from(">I", directory) == (0xFADE0C02,)
    _, flags, hashes, name, _, pages, limit = struct.unpack_from(">7I", directory, 8)
    assert flags & 2, "ad hoc"
    assert directory[name:].partition(b"\0")[0].decode() == mac_app.IDENTIFIER
    page = 1 << directory[39]
    assert (limit, pages) == (start, -(-start // page))
    for i in range(pages):
        part = data[i * page : min((i + 1) * page, limit)]
        assert directory[hashes + 32 * i : hashes + 32 * i + 32] == hashlib.sha256(part).digest()


def test_the_launcher_is_compiled_from_its_source(tmp_path: Path) -> None:
    """The command in the source gives the committed bytes."""
    pytest.importorskip("ziglang", reason="needs the compiler that the source names")
    shutil.copy(SOURCE, tmp_path)
    (line,) = (found for found in SOURCE.read_text().splitlines() if "-m ziglang" in found)
    words = line.removeprefix(" * python").split()
    subprocess.run([sys.executable, *words], check=True, timeout=100, cwd=tmp_path)
    assert (tmp_path / mac_app.IDENTIFIER).read_bytes() == mac_app.LAUNCHER.read_bytes()


# ---- the launcher at work


@needs_compiler
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["/bin/sh", "-c", 'test "$0 $*" = "a b  c"', "a", "b ", "c"], 0),
        (["/bin/sh", "-c", "exit 7"], 7),
        (["/bin/sh", "-c", "kill -KILL $$"], -signal.SIGKILL),
        (["/no/such/program"], 127),
        ([], 2),
    ],
)
def test_the_launcher_ends_as_its_child(native: Path, words: list[str], status: int) -> None:
    """launchd reads the status of the program, so that it starts a crashed one again."""
    assert subprocess.run([native, *words], check=False, timeout=10, stderr=subprocess.DEVNULL).returncode == status


@needs_compiler
@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_reaches_the_child(native: Path, tmp_path: Path, *, ignored: bool) -> None:
    """SIGTERM drains the program as without a launcher. An ignored SIGHUP, as of nohup, stays ignored in the child."""
    ready = tmp_path / "ready"
    script = f"trap 'exit 9' TERM; touch {ready}; kill -HUP $$; while :; do sleep .01; done"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        process = subprocess.Popen([native, "/bin/sh", "-c", script])
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        deadline = time.monotonic() + 10
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        if ignored:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == (9 if ignored else -signal.SIGHUP)
    finally:
        process.kill()


# ---- the installation, with the launcher of this machine


@pytest.fixture
def mac(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Pretend to be on a Mac, with tools that record their calls, and return those of codesign."""
    folder, record = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("launchctl", "codesign", "mtp-coord"):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {record}\n')
        (folder / name).chmod(0o755)
    record.touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["mtp-coord"])
    monkeypatch.setattr(mac_app, "LAUNCHER", native)
    return lambda: [line for line in record.read_text().splitlines() if line.startswith("codesign")]


def install(home: Path) -> Service:
    """Install the service of the coordinator, and return it."""
    service = Service("mtp-coord", ("serve",), home / "state")
    service.install(contextlib.nullcontext())
    return service


def agent(home: Path) -> dict[str, object]:
    file = home / "Library" / "LaunchAgents" / "mtp-cluster.mtp-coord.plist"
    return dict(plistlib.loads(file.read_bytes()))


@needs_compiler
def test_a_service_runs_in_the_app_which_a_second_install_leaves_alone(
    mac: Callable[[], list[str]], tmp_path: Path
) -> None:
    """The app is signed once. It changes with the launcher alone, and goes with the last service."""
    app = mac_app.installed_app()
    service = install(tmp_path)
    words = agent(tmp_path)["ProgramArguments"]
    assert isinstance(words, list)
    assert words[:3] == [str(app / mac_app.PROGRAM), str(tmp_path / "bin" / "mtp-coord"), "serve"]
    assert agent(tmp_path)["AssociatedBundleIdentifiers"] == [mac_app.IDENTIFIER]
    assert "Run service install again" not in service.status()
    made = (app / mac_app.PROGRAM).stat()
    install(tmp_path)
    assert (app / mac_app.PROGRAM).stat().st_mtime_ns == made.st_mtime_ns
    assert len(mac()) == 1
    (app / mac_app.INFO).write_text("of an earlier release")
    install(tmp_path)
    assert (len(mac()), (app / mac_app.PROGRAM).stat().st_ino == made.st_ino) == (2, False)
    assert [found.name for found in app.parent.iterdir()] == [app.name]
    other = tmp_path / "Library" / "LaunchAgents" / "mtp-cluster.mtp-worker.plist"
    other.touch()
    service.uninstall()
    assert app.exists()
    other.unlink()
    install(tmp_path)
    service.uninstall()
    assert not app.exists()


@needs_compiler
def test_without_a_launcher_that_runs_the_service_is_installed_as_before(
    mac: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An app that does not start is not installed, and the earlier one stays."""
    install(tmp_path)
    app = mac_app.installed_app()
    before = (app / mac_app.INFO).read_bytes()
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/program\n")
    monkeypatch.setattr(mac_app, "LAUNCHER", broken)
    install(tmp_path)
    assert "macOS may refuse the service the local network" in capsys.readouterr().err
    words = agent(tmp_path)["ProgramArguments"]
    assert isinstance(words, list)
    assert words[0] == str(tmp_path / "bin" / "mtp-coord")
    assert (app / mac_app.INFO).read_bytes() == before
    assert mac()
