"""The files in deploy/ parse, and start our programs with flags that exist."""

from __future__ import annotations

import json
import plistlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import which

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from coordinator.status.cluster_status import ClusterStatus, NodeStatus
from coordinator.status.metrics import Metrics, RequestMeter
from tests.support.processes.programs import CommandLine, from_words

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PAGE = DEPLOY.parent / "docs" / "macs.md"
DAEMONS = sorted(DEPLOY.glob("launchd/*.plist"))
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
CONTAINERFILE = DEPLOY / "container" / "Containerfile"
PLACEHOLDER = re.compile(r"@[A-Z]+@")

each_daemon = pytest.mark.parametrize("path", DAEMONS, ids=lambda path: path.stem)


def read_containerfile() -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, without comments and with continued lines joined."""
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in pairs]


def calls() -> list[CommandLine]:
    """Return every call of our programs in deploy/, except those in pages (see tests/repository/test_docs.py)."""
    daemons = {path.name: plistlib.loads(path.read_bytes()) for path in DAEMONS}
    found = [from_words(name, daemon["ProgramArguments"]) for name, daemon in daemons.items()]
    starts = [(p.name, re.findall(r"^ExecStart=(.*)$", p.read_text(), re.M)) for p in UNITS]
    found += [from_words(name, shlex.split(line)) for name, (line,) in starts]
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
    """The commands of docs/macs.md replace every placeholder, since launchd expands neither ~ nor $HOME."""
    daemon = path.read_text().partition("<plist")[2]
    assert "~" not in daemon
    assert "$" not in daemon
    page = PAGE.read_text()
    filled = [line for line in page.replace("\\\n", " ").splitlines() if path.name in line]
    assert "@USER@" in daemon, "a daemon without a user runs as root"
    for placeholder in set(PLACEHOLDER.findall(daemon)):
        assert any(f"s|{placeholder}|" in line for line in filled)


@pytest.mark.skipif(which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_the_unit(path: Path, tmp_path: Path) -> None:
    """systemd's own verifier accepts the unit when the path of the program exists."""
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace("/opt/mtp-cluster/bin", sys.exec_prefix + "/bin"))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert [line for line in done.stderr.splitlines() if path.name in line] == []


def test_containerfile() -> None:
    """The image is built from files of the repository, does not run as root, and declares its port."""
    instructions = read_containerfile()
    words = [word for word, _ in instructions]
    assert words[0] == "FROM"
    known = "FROM WORKDIR COPY RUN ENV USER EXPOSE STOPSIGNAL CMD"
    assert set(words) <= set(known.split())
    assert [rest for word, rest in instructions if word == "USER"] not in ([], ["root"])
    assert words.index("USER") < words.index("CMD")
    copied = [rest for word, rest in instructions if word == "COPY" and not rest.startswith("--from")]
    sources = [source for rest in copied for source in rest.split()[:-1]]
    assert [source for source in sources if not (DEPLOY.parent / source).exists()] == []
    assert {"proto", "mtp", "worker", "coordinator"} <= set(sources)


def test_prometheus_scrapes_the_coordinator() -> None:
    """The configuration has one job, with the metrics path of the API and the default port of `serve`."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8080"]}]


class BusyCluster:
    """A status with every figure that `/metrics` shows."""

    def status(self) -> ClusterStatus:
        """Return a status of one node."""
        node = NodeStatus("mac-1", span="0-3", health="ready", memory_limit=2**31, stage_ms=12.5)
        return ClusterStatus(
            ready=True,
            model="tiny",
            epoch=1,
            mtp="auto",
            nodes=(node,),
            running_limit=16,
            waiting_limit=64,
            kv_limit=1000,
            drafted_by_position=(2,),
            accepted_by_position=(1,),
        )


def real_metrics() -> dict[str, set[str]]:
    """Return the samples of `/metrics` of a cluster after a request, and the labels of each."""
    metrics = Metrics(BusyCluster())
    meter = RequestMeter(metrics, "chat")
    meter.record_tokens(0, 1)
    meter.record_tokens(0, 1)
    meter.end("stop")
    families = text_string_to_metric_families(metrics.render().decode())
    return {s.name: set(s.labels) for family in families for s in family.samples}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every metric and label of the dashboard is one of `/metrics`, and every metric but the histograms' is shown."""
    real, shown = real_metrics(), set[str]()
    panels = json.loads((DEPLOY / "grafana" / "mtp-cluster.json").read_text())["panels"]
    for target in (target for panel in panels for target in panel["targets"]):
        names = re.findall(r"mtp_\w+", target["expr"])
        shown |= {*names}
        labels = set.intersection(*(real[name] for name in names))
        grouped = re.findall(r"by \((\w+)\)", target["expr"])
        assert {*grouped, *re.findall(r"{{(\w+)}}", target["legendFormat"])} <= labels
    of_histograms = re.compile(r".*_(sum|count|created)$")
    assert {name for name in real.keys() - shown if not of_histograms.match(name)} == set()


def test_the_formula_installs_the_programs() -> None:
    """The formula has the licenses and the programs of pyproject.toml, and the page fills its placeholders."""
    text = (DEPLOY / "homebrew" / "mtp-cluster.rb").read_text()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    licenses = re.findall(r'"([^"]+)"', text.partition("license all_of:")[2].partition("]")[0])
    assert " AND ".join(licenses) == project["license"]
    assert set(re.findall(r'venv/"bin/(mtp-\w+)"', text)) == project["scripts"].keys()
    placeholders = set(PLACEHOLDER.findall(text))
    assert all(f"s|{p}|" in PAGE.read_text() for p in placeholders)
