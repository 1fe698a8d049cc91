"""The files in deploy/ parse, and start our programs with flags that exist."""

from __future__ import annotations

import configparser
import json
import plistlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

from tests.support.processes.programs import CommandLine, from_words

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DAEMONS = sorted(DEPLOY.glob("launchd/*.plist"))
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
CONTAINERFILE = DEPLOY / "container" / "Containerfile"
PLACEHOLDER = re.compile(r"@[A-Z]+@")

each_daemon = pytest.mark.parametrize("path", DAEMONS, ids=lambda path: path.stem)
each_unit = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)


def read_daemon(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        daemon = plistlib.load(file)
    assert isinstance(daemon, dict)
    return daemon


class UnitParser(configparser.ConfigParser):
    """A parser of systemd units, which resemble INI files; `%` has no meaning, and a repeated key is an error."""

    def __init__(self) -> None:
        super().__init__(interpolation=None, strict=True)

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def read_unit(path: Path) -> UnitParser:
    unit = UnitParser()
    unit.read_string(path.read_text())
    return unit


def read_containerfile() -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, without comments and with continued lines joined."""
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in pairs]


def calls() -> list[CommandLine]:
    """Return every call of our programs in deploy/, except those in pages (see tests/repository/test_docs.py)."""
    found = [from_words(path.name, read_daemon(path)["ProgramArguments"]) for path in DAEMONS]
    found += [from_words(p.name, shlex.split(read_unit(p)["Service"]["ExecStart"])) for p in UNITS]
    commands = [json.loads(rest) for word, rest in read_containerfile() if word == "CMD"]
    found += [from_words(CONTAINERFILE.name, words) for words in commands]
    return [call for call in found if call is not None]


@pytest.mark.parametrize("call", calls(), ids=str)
def test_services_start_with_flags_that_exist(call: CommandLine) -> None:
    """A service has only flags that exist: with an unknown flag it would restart without end."""
    assert call.unknown_flags() == []


@pytest.mark.parametrize("call", calls(), ids=str)
def test_listening_elsewhere_is_said_aloud(call: CommandLine) -> None:
    """Workers use the cluster's certificates outside loopback. Only HTTP in a container is --insecure."""
    words = " ".join(call.args)
    elsewhere = re.search(r"--(listen|host) (?!127\.0\.0\.1)", words) is not None
    assert ("--insecure" in call.args) == (elsewhere and call.program == "mtp-coord")


@each_daemon
def test_launchd_placeholders_are_filled_by_the_page(path: Path) -> None:
    """The commands of deploy/README.md replace every placeholder, since launchd expands neither ~ nor $HOME."""
    daemon = path.read_text().partition("<plist")[2]
    assert "~" not in daemon
    assert "$" not in daemon
    page = (DEPLOY / "README.md").read_text()
    filled = [line for line in page.replace("\\\n", " ").splitlines() if path.name in line]
    assert "@USER@" in daemon, "a daemon without a user runs as root"
    for placeholder in set(PLACEHOLDER.findall(daemon)):
        assert any(f"s|{placeholder}|" in line for line in filled)


@each_unit
@pytest.mark.skipif(which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(path: Path, tmp_path: Path) -> None:
    """systemd's own verifier accepts the unit when the path of the program exists."""
    installed = Path(sys.executable).parent
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace("/opt/mtp-cluster/bin", str(installed)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    about_ours = [line for line in done.stderr.splitlines() if path.name in line]
    assert about_ours == []


def test_containerfile() -> None:
    """The image is built from files of the repository, does not run as root, and declares its port."""
    instructions = read_containerfile()
    words = [word for word, _ in instructions]
    assert words[0] == "FROM"
    assert set(words) <= {
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "EXPOSE",
        "STOPSIGNAL",
        "CMD",
    }
    assert [rest for word, rest in instructions if word == "USER"] not in ([], ["root"])
    assert words.index("USER") < words.index("CMD")
    copied = [
        rest for word, rest in instructions if word == "COPY" and not rest.startswith("--from")
    ]
    sources = [source for rest in copied for source in rest.split()[:-1]]
    assert [source for source in sources if not (DEPLOY.parent / source).exists()] == []
    assert {"proto", "mtp", "worker", "coordinator"} <= set(sources)


def test_prometheus_scrapes_the_coordinator() -> None:
    """The configuration has one job, with the metrics path of the API and the default port of `serve`."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8080"]}]
