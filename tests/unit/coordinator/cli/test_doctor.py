"""The checks of the doctor, their run, and its report."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.cli import doctor_checks as checks
from coordinator.cli import doctor_command
from coordinator.cli.doctor_checks import (
    Finding,
    Verdict,
    check_costs,
    check_device,
    check_thunderbolt,
    check_versions,
    check_worker,
)
from coordinator.cli.doctor_command import Diagnosis, json_report
from coordinator.pipeline.worker_connection import Candidate, ConnectionPolicy
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError
from proto.frame import VERSION
from tests.support.processes.stub_worker import StubMember, stub_members


async def silent() -> Finding:
    """Represent a check that never ends."""
    await asyncio.sleep(60)
    raise AssertionError


async def broken() -> Finding:
    """Represent a check with a bug."""
    raise KeyError("interface")


async def refused() -> Finding:
    """Represent a check that raises an error of this project."""
    raise CheckpointError("the file is damaged")


async def test_a_check_that_fails_itself_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error and a deadline of a check become findings, and later checks run."""
    monkeypatch.setattr(doctor_command, "CHECK_SECONDS", 0.1)
    shown: list[Finding] = []
    run = Diagnosis(Checkpoint.open(checkpoint_dir()), shown.append)
    for name, check in (("silent", silent), ("broken", broken), ("refused", refused)):
        await run.check(name, check)
    await run.check("fine", lambda: Finding("fine", Verdict.OK, "1"))
    figures = [(f.check, f.verdict) for f in run.findings]
    assert figures == [
        ("silent", Verdict.FAIL),
        ("broken", Verdict.FAIL),
        ("refused", Verdict.FAIL),
        ("fine", Verdict.OK),
    ]
    assert "0.1 s" in shown[0].figure
    assert "interface" in shown[1].figure
    assert shown[2].figure == "the file is damaged"


@pytest.mark.parametrize("problem", ["", "own failed: unable to build"])
def test_a_kernel_that_fails_is_a_warning_beside_its_times(problem: str) -> None:
    """The finding has the times, and the cause with an advice if a kernel failed."""
    finding = check_costs("product", lambda: ("MLX 1 ms", {"ms": {"MLX": [1.0]}}, problem))
    assert finding.verdict is (Verdict.WARN if problem else Verdict.OK)
    assert finding.figure == "; ".join(filter(None, ("MLX 1 ms", problem)))
    assert bool(finding.advice) is bool(problem)
    assert finding.values == {"ms": {"MLX": [1.0]}, "problem": problem}


async def test_a_full_run_adds_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the report is a finding of its own, and a part that fails does not end the run."""
    parts = {"good": lambda: ("1 ms", {"ms": 1.0}, ""), "bad": lambda: [][0]}
    monkeypatch.setattr(doctor_command, "CostReport", lambda _: SimpleNamespace(parts=parts))
    monkeypatch.setattr(checks, "check_kernels", lambda _: Finding("kernels", Verdict.OK, "1"))
    for full in (False, True):
        run = Diagnosis(Checkpoint.open(checkpoint_dir()), lambda _: None, mdns=False, full=full)
        found = {finding.check: finding.verdict for finding in await run.run()}
        costs = {"good": Verdict.OK, "bad": Verdict.FAIL} if full else {}
        assert {name: found.get(name) for name in parts if name in found} == costs


def test_the_report_has_no_path_of_the_user() -> None:
    """In the JSON report the home directory is `~`, at any depth."""
    home = str(Path.home())
    values = {"a": [f"{home}/x"], home: {"b": (f"see {home}",)}}
    finding = Finding("c", Verdict.WARN, f"{home}/models", f"Free {home}.", values)
    text = json.dumps(json_report([finding]))
    assert home not in text or home == "/"
    assert "~/models" in text
    assert json.loads(text)["checks"][0]["verdict"] == "warn"


def on_mac(patch: pytest.MonkeyPatch, release: str, machine: str) -> None:
    """Pretend to run on macOS `release` with a Python for `machine`."""
    patch.setattr("sys.platform", "darwin")
    patch.setattr("platform.mac_ver", lambda: (release, ("", "", ""), machine))
    patch.setattr("platform.machine", lambda: machine)


@pytest.mark.parametrize(
    ("release", "machine", "verdict", "words"),
    [
        ("26.1", "arm64", Verdict.OK, ""),
        ("14.7", "arm64", Verdict.WARN, "Update macOS"),
        ("15.3", "x86_64", Verdict.FAIL, "Rosetta"),
    ],
)
def test_an_old_macos_and_rosetta_are_named(
    monkeypatch: pytest.MonkeyPatch, release: str, machine: str, verdict: Verdict, words: str
) -> None:
    """macOS 14 cannot wire weights, and a Python under Rosetta has no GPU."""
    on_mac(monkeypatch, release, machine)
    finding = check_versions()
    assert finding.verdict is verdict
    assert words in finding.advice
    assert f"macOS {release}" in finding.figure


@pytest.mark.parametrize(
    ("limit", "share", "words"),
    [(60.0, 2.0, ""), (0.0, 2.0, "answers slowly"), (60.0, -1.0, "swapped model")],
)
def test_a_slow_device_and_swap_are_named(
    monkeypatch: pytest.MonkeyPatch, limit: float, share: float, words: str
) -> None:
    """A round trip above the limit, or more swap than the share, is a warning. The report has the chip's speed."""
    monkeypatch.setattr(checks, "SLOW_SECONDS", limit)
    monkeypatch.setattr(checks, "SWAP_SHARE", share)
    finding = check_device()
    assert finding.verdict is (Verdict.WARN if words else Verdict.OK)
    assert words in finding.advice
    assert finding.values["bytes_per_second"] > 0
    assert finding.values["chip"] in finding.figure


BRIDGE = """bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmember: en2 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 8 priority 0 path cost 0
\tmember: en3 flags=3<LEARNING,DISCOVER>
\tstatus: active
"""


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to run on macOS."""
    monkeypatch.setattr("sys.platform", "darwin")


@pytest.mark.parametrize(
    ("workers", "up", "listed", "verdict", "words"),
    [
        (2, {"en2", "en3"}, set(), Verdict.WARN, "no loop protection"),
        (1, {"en2", "en3"}, set(), Verdict.OK, "2 of 2 ports"),
        (2, {"en2"}, set(), Verdict.OK, "rdma_ctl enable"),
        (2, {"rdma_en5"}, {"rdma_en4", "rdma_en5"}, Verdict.OK, "devices: rdma_en5"),
        (2, {"rdma_en4", "rdma_en5"}, {"rdma_en4", "rdma_en5"}, Verdict.WARN, "one cable"),
        (2, set(), {"rdma_en4"}, Verdict.OK, "devices: none"),
        (2, {"rdma_en3"}, {"rdma_en3"}, Verdict.WARN, "out of the bridge"),
    ],
)
@pytest.mark.usefixtures("mac")
def test_ports_and_devices_are_named(
    workers: int, up: set[str], listed: set[str], verdict: Verdict, words: str
) -> None:
    """From outputs in the form that `ifconfig`, `ibv_devices` and `ibv_devinfo` document."""
    rows = [f"    {name}        \t{0:016x}\n" for name in sorted(listed)]
    table = "    device          \t   node GUID\n    ------   ----\n" + "".join(rows)

    def output(*command: str) -> str:
        if command[-1] == "bridge0":
            return BRIDGE
        if command[0] == "ibv_devices":
            return table
        if command[0] == "ifconfig":
            return f"status: {'active' if command[-1] in up else 'inactive'}"
        state = "PORT_ACTIVE (4)" if command[-1] in up else "PORT_DOWN (1)"
        return f"hca_id:\t{command[-1]}\n\t\t\tstate:\t\t\t{state}\n"

    finding = check_thunderbolt(workers, output)
    assert finding.verdict is verdict
    assert words in f"{finding.figure} {finding.advice}"


ME = pb.Coordinator(id="c", name="doctor")
MODEL = pb.ModelRef(name="m", fingerprint="f" * 64)


OWN = "1.0, mlx 0.32.4"


async def ask(address: str) -> Finding:
    """Check the worker at `address`."""
    return await check_worker(Candidate(address, (address,)), MODEL, ME, ConnectionPolicy(), OWN)


async def test_another_release_and_another_checkpoint_are_named() -> None:
    """A worker of another release fails, and one with another checkpoint warns."""
    old = StubMember("old", "", fields={"protocol_version": VERSION + 1})
    other = StubMember("other", "", fields={"model": "another-model", "fingerprint": "0" * 64, "version": OWN})
    with stub_members(old, other):
        finding = await ask(old.address)
        assert (finding.verdict, "same release" in finding.advice) == (Verdict.FAIL, True)
        finding = await ask(other.address)
        assert (finding.check, finding.verdict) == ("worker other", Verdict.WARN)
        assert "another checkpoint" in finding.advice
        assert "same release" not in finding.advice
    assert "No worker listens there" in (await ask(old.address)).advice


@pytest.mark.parametrize(
    ("version", "verdict"), [(OWN, Verdict.OK), ("1.0, mlx 0.31.0", Verdict.WARN), ("", Verdict.WARN)]
)
async def test_other_versions_are_named(version: str, verdict: Verdict) -> None:
    """A worker with other packages is named, and so is one that does not report them."""
    member = StubMember("one", "", fields={"version": version})
    with stub_members(member):
        finding = await ask(member.address)
    assert finding.verdict is verdict
    assert finding.values["version"] == (version or "unknown")
    assert ((version or "unknown") in finding.advice) == (verdict is Verdict.WARN)


PLAIN = tuple(range(101))


@pytest.mark.parametrize(
    ("tokens", "place", "advice"), [(PLAIN, None, ""), ((*PLAIN[:40], 7, *PLAIN[41:]), 40, "--mtp off")]
)
async def test_drafts_that_change_an_answer_are_named(
    monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...], place: int | None, advice: str
) -> None:
    """An answer that drafts change is a warning with the place."""

    async def measure(_: Checkpoint, drafts: int) -> tuple[str, tuple[int, ...], float]:
        return "8 layers", tokens if drafts else PLAIN, 10.0

    monkeypatch.setattr(checks, "_measure", measure)
    finding = await checks.check_kernels(Checkpoint.open(checkpoint_dir()))
    assert finding.values["first_difference"] == place
    assert finding.verdict is (Verdict.WARN if advice else Verdict.OK)
    assert advice in finding.advice


@pytest.mark.slow
async def test_the_kernels_are_measured() -> None:
    """The built-in model gives its speeds, equal tokens, and the names of its layers."""
    values = (await checks.check_kernels(Checkpoint.open(checkpoint_dir()))).values
    assert values["first_difference"] is None
    assert values["tokens_per_second"] > 0
    assert values["drafted_tokens_per_second"] > 0
    assert values["layers"].startswith("8 ")
