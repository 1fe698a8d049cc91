"""`mtp-coord doctor` over real workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mtp.builtin import checkpoint_dir
from tests.cluster.conftest import Pool
from tests.cluster.test_join import completion, joined_cluster

SECONDS = 100.0


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, with `env` in its environment."""
    command = [sys.executable, "-c", "from coordinator.cli import main; main()", "doctor"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, **env},
    )


def test_the_doctor_checks_this_machine_and_every_worker(pool: Pool, tmp_path: Path) -> None:
    """The report has each worker and the kernels, and a closed port is the one failure.

    It has no secret of the environment, and no path of the user or of the model.
    """
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = f"127.0.0.1:{unused.getsockname()[1]}"
    addresses = pool(2)
    named = [flag for address in (*addresses, closed) for flag in ("--worker", address)]
    secrets = {"MTP_API_KEY": "a-key", "HF_TOKEN": "hf_token"}
    done = doctor("--no-mdns", "--json", *named, HOME=str(tmp_path), **secrets)
    assert done.returncode == 1, done.stderr
    for text in (*secrets.values(), str(tmp_path), str(checkpoint_dir()), str(Path.home())):
        assert text not in done.stdout
    found = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    failed = [name for name, check in found.items() if check["verdict"] == "fail"]
    assert failed == [f"worker {closed}"]
    assert "No worker listens there" in found[f"worker {closed}"]["advice"]
    reached = [check for name, check in found.items() if name.startswith("worker ") and name not in failed]
    assert [check["verdict"] for check in reached] == ["ok", "ok"]
    assert found["kernels"]["values"]["first_difference"] is None
    assert found["kernels"]["values"]["tokens_per_second"] > 0


@pytest.mark.slow
def test_the_full_report_takes_less_than_its_bound(tmp_path: Path) -> None:
    """The command with --full ends in time on a machine without a GPU, and its report has the costs."""
    done = doctor("--no-mdns", "--full", "--json", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = {check["check"]: check["values"] for check in json.loads(done.stdout)["checks"]}
    large = found["product 17408 x 5120, affine 4 bits in groups of 64"]
    assert large["rows"] == [1, 2, 4, 5, 8, 12, 16]
    assert large["ms"]["MLX"][0] > 0
    assert found["attention to 32768 tokens"]["ms"]["MLX"][0] > 0
    assert found["launch and memory"]["bytes_per_second"] > 0


@pytest.mark.slow
def test_the_doctor_reaches_secured_workers(tmp_path: Path) -> None:
    """With the cluster's state directory, joined workers are checked over mutual TLS.

    The commands for two Macs work with loopback addresses: both workers join and serve.
    """
    with joined_cluster("127.0.0.1", tmp_path) as (coordinator, workers, _):
        assert completion(coordinator.url)["choices"][0]["text"]
        assert len(coordinator.records("machine joined")) == 2
        assert all(worker.records("connected") for worker in workers)
        addresses = [str(w.wait_for("worker ready")["address"]) for w in workers]
        named = [flag for address in addresses for flag in ("--worker", address)]
        done = doctor("--no-mdns", "--json", "--state-dir", str(tmp_path / "a"), *named)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert {name for name in found if name.startswith("worker ")} == {
        "worker mac-1",
        "worker mac-2",
    }
