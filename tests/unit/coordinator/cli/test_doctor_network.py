"""Discovery and versions in the doctor's report."""

from __future__ import annotations

import pytest

from coordinator.cli.doctor_checks import Finding, Verdict, check_thunderbolt, check_worker
from coordinator.pipeline.worker_connection import Candidate, ConnectionPolicy
from proto import cluster_pb2 as pb
from proto.frame import VERSION
from tests.support.processes.stub_worker import StubMember, stub_members

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
