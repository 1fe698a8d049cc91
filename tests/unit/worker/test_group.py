"""The variables with which MLX forms a group, and the errors of groups that cannot be formed."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import mlx.core as mx
import pytest

from coordinator.cluster.plan_start import choose_backend
from proto.control import Backend
from proto.errors import NotReadyError, UsageError
from proto.span import Span
from worker.engine import group as engine_group
from worker.engine import host as engine_host
from worker.engine.group import GroupSpec, await_members, join_group
from worker.engine.host import EngineHost, StageSpec
from worker.node.member import group_address


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that `join_group` sets."""
    for name in ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"):
        monkeypatch.setenv(name, "")


HOSTS = ("10.0.0.1:5001", "10.0.0.2:5002")


@pytest.mark.parametrize(
    ("backend", "variables", "written"),
    [
        (Backend.ring, {"MLX_HOSTFILE": "FILE"}, [[host] for host in HOSTS]),
        (
            Backend.jaccl,
            {"MLX_IBV_DEVICES": "FILE", "MLX_JACCL_COORDINATOR": HOSTS[0]},
            [[None, "rdma_en5"], ["rdma_en2", None]],
        ),
        (
            Backend.nccl,
            {"MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "5001"},
            None,
        ),
    ],
)
def test_the_environment_of_a_member(
    tmp_path: Path, backend: Backend, variables: dict[str, str], written: object
) -> None:
    """Each backend of MLX has variables of its own, and the hosts or devices of all members in a file."""
    file = tmp_path / "group.json"
    found = GroupSpec(1, HOSTS, backend, ("rdma_en5", "rdma_en2")).environment(file)
    expected = {name: str(file) if value == "FILE" else value for name, value in variables.items()}
    assert found == {"MLX_RANK": "1", **expected}
    assert written is None or json.loads(file.read_text()) == written


@pytest.mark.parametrize(
    ("arithmetic", "rdma", "backend"),
    [
        ("metal applegpu_g16s, mlx 0.32.4", ("rdma_en5", "rdma_en2"), Backend.jaccl),
        ("metal applegpu_g16s, mlx 0.32.4", ("rdma_en5", ""), Backend.ring),
        ("metal applegpu_g16s, mlx 0.32.4", ("a", "b", "c"), Backend.ring),
        ("cuda sm_90, mlx 0.32.4", ("", ""), Backend.nccl),
        ("cpu x86_64, mlx 0.32.4", ("", ""), Backend.ring),
    ],
)
def test_the_backend_follows_from_the_machines(arithmetic: str, rdma: tuple[str, ...], backend: Backend) -> None:
    """RDMA needs a declared device on both machines of a pair."""
    assert choose_backend(arithmetic, rdma) is backend


@pytest.mark.parametrize(("hosts", "rdma"), [((*HOSTS, "10.0.0.3:5003"), ("a", "b", "c")), (HOSTS, ())])
def test_jaccl_joins_a_pair(hosts: tuple[str, ...], rdma: tuple[str, ...]) -> None:
    """A machine does not know the devices that lead to two others."""
    with pytest.raises(UsageError, match="joins two machines"):
        GroupSpec(0, hosts, Backend.jaccl, rdma)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "[jaccl] Changing queue pair to RTR failed with errno 22",
            "out of the Thunderbolt Bridge",
        ),
        ("[jaccl] Couldn't open device with errno 2", "rdma_ctl enable"),
        ("[jaccl] connecting failed with errno 60", "does not answer on this cable"),
        ("[ring] connecting failed with errno 60", ""),
        ("[jaccl] connecting failed with errno 7", ""),
    ],
)
def test_errors_that_users_report_have_advice(monkeypatch: pytest.MonkeyPatch, text: str, advice: str) -> None:
    """The text of MLX stays, and the advice follows it."""

    def fail(**_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(mx.distributed, "init", fail)
    with pytest.raises(NotReadyError) as error:
        join_group(GroupSpec(0, HOSTS, Backend.jaccl, ("rdma_en5", "rdma_en2")), exact=False)
    assert text in str(error.value) and str(error.value).count(advice or text) == 1


def test_a_backend_that_this_machine_lacks_is_named() -> None:
    """MLX's own backend fails at once, and the error names the backend and the machines."""
    if mx.distributed.is_available("jaccl"):
        pytest.skip("this machine has RDMA")
    with pytest.raises(NotReadyError, match=r"10.0.0.1:5001, 10.0.0.2:5002 cannot be formed by jaccl"):
        join_group(GroupSpec(0, HOSTS, Backend.jaccl, ("rdma_en5", "rdma_en2")), exact=False)


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2)])
def test_members_meet_before_they_join(order: tuple[int, ...]) -> None:
    """The last member goes on when all others are here, whoever comes first, and its address is free for MLX then."""
    hosts = tuple(group_address("127.0.0.1") for _ in order)
    with ThreadPoolExecutor(len(order)) as pool:
        meeting = dict[int, Future[None]]()
        for rank in order:
            assert 2 not in meeting or not meeting[2].done(), "a member has not come"
            meeting[rank] = pool.submit(await_members, GroupSpec(rank, hosts))
            time.sleep(0.02)
        for one in meeting.values():
            one.result(timeout=5)
    host, _, port = hosts[-1].rpartition(":")
    assert group_address(host, int(port)) == hosts[-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_wait_for_a_member_has_a_deadline(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The error names the machines."""
    monkeypatch.setattr(engine_group, "JOIN_SECONDS", 0.1)
    hosts = tuple(group_address("127.0.0.1") for _ in range(2))
    with pytest.raises(NotReadyError, match=f"{hosts[0]}, {hosts[1]} did not meet in 0.1 s"):
        await_members(GroupSpec(rank, hosts))


async def test_a_group_measures_a_sum_of_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with four residual streams sums one row of `hidden_size`, and not the streams that a hop carries."""
    measured: list[int] = []

    def measure(group: object, hidden: int, dtype: mx.Dtype) -> float:
        """Record the width, and end the load."""
        measured.append(hidden)
        raise NotReadyError("measured")

    monkeypatch.setattr(engine_host, "join_group", lambda spec, exact: MagicMock(rank=0, size=2))
    monkeypatch.setattr(engine_host, "measure_collective", measure)
    checkpoint = MagicMock()
    share = checkpoint.cut_for.return_value
    share.config.hidden_size, share.config.shape.hop_width = 64, 256
    share.part_bytes.return_value, share.stage_parts.return_value = {"layer": 8}, ["layer"]
    host, spec = EngineHost(), StageSpec(Span(0, 1), True, False, group=GroupSpec(0, HOSTS))
    with pytest.raises(NotReadyError, match="measured"):
        await host.thread.call(lambda: host.load(lambda: checkpoint, spec, None))
    await host.close()
    assert measured == [64]
