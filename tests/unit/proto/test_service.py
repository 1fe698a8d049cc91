"""Services of launchd and systemd, by the calls that they get, and the files of flags that services read."""

from __future__ import annotations

import os
import plistlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coordinator.cli import app as commands
from coordinator.cli.serve_command import CONFIG
from coordinator.planning.groups import Parallel
from coordinator.serve.options import ServeOptions
from proto.errors import UsageError
from proto.span import Span
from proto.terminal.config_file import write_flags
from proto.terminal.options import takes_options

Calls = Callable[[], list[str]]


@pytest.fixture(params=["linux", "darwin"])
def calls(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Install programs that record their arguments for launchctl and systemctl, and pretend to be on such a system."""
    folder, record = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("launchctl", "systemctl", "mtp-coord"):
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {record}\necho active\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MTP_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", request.param)
    monkeypatch.setattr(sys, "argv", ["mtp-coord"])
    return lambda: record.read_text().splitlines() if record.exists() else []


def service(*words: str) -> str:
    """Run `mtp-coord service` and return its output. Raises its error."""
    result = CliRunner().invoke(commands, ["service", *words])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_service_is_installed_twice_shown_and_removed(calls: Calls, tmp_path: Path) -> None:
    """The definition names the program, the flags are in the file, and a second call replaces the first."""
    mac = sys.platform == "darwin"
    service("install", "builtin", "--own-worker", "--nodes", "1")
    flags = (tmp_path / "state" / CONFIG).read_text().splitlines()
    assert flags[1:] == ["nodes = 1", "own-worker = true"]
    service("install", "builtin", "--port", "9000")
    assert "port = 9000" in (tmp_path / "state" / CONFIG).read_text()
    (file,) = (tmp_path / "home").rglob("*mtp-coord*")
    state, program = str(tmp_path / "state"), str(tmp_path / "bin" / "mtp-coord")
    log = f"{state}/logs/mtp-coord.log"
    command = [program, "serve", "--state-dir", state, "--log-file", log]
    if mac:
        assert plistlib.loads(file.read_bytes())["ProgramArguments"] == command
        verbs = ["bootstrap", "bootout", "bootstrap"]
    else:
        assert f"ExecStart={' '.join(f'{chr(34)}{part}{chr(34)}' for part in command)}" in file.read_text()
        verbs = ["daemon-reload", "enable", "restart"] * 2
    assert [line.replace("--user ", "").split()[1] for line in calls()] == verbs
    assert "active" in service("status")
    service("uninstall")
    assert not file.exists()
    for action in ("status", "uninstall"):
        with pytest.raises(UsageError, match="no service is installed"):
            service(action)


def test_a_moved_program_is_told(calls: Calls, tmp_path: Path) -> None:
    service("install", "builtin")
    moved = tmp_path / "elsewhere"
    (tmp_path / "bin").rename(moved)
    os.environ["PATH"] = f"{moved}:{os.environ['PATH']}"
    assert "Run service install again" in service("status")
    assert calls()


def definition(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "home").rglob("*mtp-coord*")
    return file


def script(tmp_path: Path, text: str) -> None:
    """Replace launchctl and systemctl by a shell script, in which $verb is the command's verb."""
    for name in ("launchctl", "systemctl"):
        head = f'#!/bin/sh\nverb=$1; [ "$1" = --user ] && verb=$2\necho "{name} $verb" >> {tmp_path}/calls\n'
        (tmp_path / "bin" / name).write_text(head + text)


FAILS_AFTER_START = """
case $verb in bootstrap|restart)
    [ -e {flag} ] && {{ rm {flag}; echo "Unit has a bad setting" >&2; exit 78; }}
    cat "{state}/serve.toml" > "{state}/seen" ;;
esac
"""


def test_a_failed_install_puts_the_earlier_service_back(calls: Calls, tmp_path: Path) -> None:
    """Definition and flags are those of before when it starts again. A first install that fails leaves nothing."""
    flag, state = tmp_path / "fail", tmp_path / "state"
    script(tmp_path, FAILS_AFTER_START.format(flag=flag, state=state))
    flag.touch()
    with pytest.raises(UsageError, match=r"bad setting\. Nothing was installed"):
        service("install", "builtin")
    assert not list((tmp_path / "home").rglob("*mtp-coord*"))
    assert not (state / CONFIG).exists()
    service("install", "builtin", "--nodes", "1", "--own-worker")
    file = definition(tmp_path)
    link = tmp_path / "kept-elsewhere"
    file.rename(link)
    file.symlink_to(link)
    link.write_bytes(link.read_bytes().replace(b"mtp-coord of mtp", b"my own of mtp").replace(b"</dict>", b"\n</dict>"))
    before, flags = file.read_bytes(), (state / CONFIG).read_text()
    flag.touch()
    with pytest.raises(UsageError, match=r"bad setting\. The earlier service runs again"):
        service("install", "builtin", "--port", "9000")
    assert file.read_bytes() == before
    assert file.is_symlink()
    assert (state / CONFIG).read_text() == (state / "seen").read_text() == flags
    assert calls()[-1].split()[-1] in ("bootstrap", "restart")
    assert {each.name for each in file.parent.iterdir()} <= {file.name}


def test_without_a_manager_of_services_nothing_is_left(calls: Calls, tmp_path: Path) -> None:
    for name in ("launchctl", "systemctl"):
        (tmp_path / "bin" / name).write_text("#!/no/such/program\n")
    with pytest.raises(UsageError, match="Nothing was installed; mtp-coord runs"):
        service("install", "builtin")
    assert not list((tmp_path / "home").rglob("*mtp-coord*"))
    assert calls() == []


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a directory that nobody can write to")
def test_a_definition_that_cannot_be_written_stops_nothing(calls: Calls, tmp_path: Path) -> None:
    service("install", "builtin")
    file, count = definition(tmp_path), len(calls())
    file.unlink()
    file.symlink_to("/proc/version")
    with pytest.raises(UsageError, match=r"cannot be written.*Nothing was changed"):
        service("install", "builtin", "--port", "9000")
    assert file.is_symlink()
    assert len(calls()) == count


def test_launchd_gets_the_time_that_an_earlier_service_needs(calls: Calls, tmp_path: Path) -> None:
    """It refuses a label whose service still ends, with status 5 or 37. Other failures are final."""
    if sys.platform != "darwin":
        pytest.skip("systemd waits itself")
    busy = tmp_path / "busy"
    drop = f"tail -n +2 {busy} > {busy}.rest; mv {busy}.rest {busy}"
    script(tmp_path, f"[ $verb = bootstrap ] && read status < {busy} && {{ {drop}; exit $status; }}\nexit 0\n")
    busy.write_text("5\n37\n5\n")
    service("install", "builtin")
    service("install", "builtin")
    assert [line.split()[1] for line in calls()] == [*["bootstrap"] * 4, "bootout", "bootstrap"]
    busy.write_text("5\n78\n")
    with pytest.raises(UsageError, match="status 78"):
        service("install", "builtin")


@pytest.mark.parametrize("name", ["a & b", "<a>", 'a"b', "100%", "a$b", "a\\b", '$HOME %h &amp; "x"'])
def test_a_program_at_any_path_is_this_one(calls: Calls, name: str, tmp_path: Path) -> None:
    """Its own definition names it. One that only begins so, and a definition that cannot be read, are others'."""
    folder = tmp_path / name
    (tmp_path / "bin").rename(folder)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    service("install", "builtin")
    assert "active" in service("status")
    file = definition(tmp_path)
    text = file.read_text()
    for changed in (text.replace("mtp-coord<", "mtp-coord-old<").replace('mtp-coord"', 'mtp-coord-old"'), "damaged"):
        file.write_text(changed)
        assert "Run service install again" in service("status")
    assert calls()


def test_the_log_is_shown(calls: Calls, tmp_path: Path) -> None:
    """Its last lines are printed. Before the first start there is none."""
    with pytest.raises(UsageError, match="no log yet"):
        service("logs")
    log = tmp_path / "state" / "logs" / "mtp-coord.log"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(map(str, range(100))) + "\n")
    assert service("logs").split() == [str(n) for n in range(60, 100)]
    assert calls() == []


# ---- the file of flags

found: list[ServeOptions] = []
OPTIONS = ServeOptions(
    model="qwen3.6:27b",
    worker=("10.0.0.2:50505", "10.0.0.3:50505"),
    nodes=2,
    parallel=Parallel.parse("1x2"),
    own_layers=Span(0, 32),
    own_worker=True,
    wait=2.5,
    kv_bits=8,
    prefix_disk=10**11,
    listen=("10.0.0.1", 50504),
    api_key=('a "quoted" key',),
    tls_cert=Path("/etc/cert.pem"),
)


def serve(*words: str) -> ServeOptions:
    """Return the options that a command line gives together with the file."""
    app = typer.Typer()

    @app.command()
    @takes_options(ServeOptions, file=CONFIG)
    def keep(options: ServeOptions) -> None:
        found.append(options)

    result = CliRunner().invoke(app, words)
    if result.exception is not None:
        raise result.exception
    return found.pop()


def test_written_flags_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form of value survives, and only the owner can read the file. A flag on the command line wins."""
    monkeypatch.setenv("MTP_STATE_DIR", str(tmp_path))
    assert serve() == ServeOptions(state_dir=tmp_path)
    write_flags(tmp_path / CONFIG, OPTIONS)
    assert (tmp_path / CONFIG).stat().st_mode & 0o777 == 0o600
    assert serve() == replace(OPTIONS, state_dir=tmp_path)
    given = serve("builtin", "--nodes", "3", "--parallel", "auto", "--mtp", "auto")
    changed = {"model": "builtin", "nodes": 3, "parallel": Parallel.parse("auto")}
    assert given == replace(OPTIONS, state_dir=tmp_path, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes = 'two'", "nodes = 'two'"),
        ("modle = 'a'", "'modle' is not a flag"),
        ("nodes = ", "is not TOML"),
        ("port = 70000", "from 0 to 65535"),
        ("kv-bits = 5", "4 or 8 is needed"),
        ("own-worker = 1", "own-worker = 1"),
        ("parallel = '3'", "--parallel '3'"),
        ("state-dir = '/tmp'", "'state-dir' is not a flag that a file may hold"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "flags.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        serve("--config", str(file))
    assert problem in str(error.value)
    with pytest.raises(UsageError, match="no such file"):
        serve("--config", str(tmp_path / "none.toml"))
