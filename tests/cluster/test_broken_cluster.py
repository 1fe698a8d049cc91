"""A bug in the view of the cluster ends the coordinator, because no plan could start any more."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes.processes import as_coordinator, ending, launch, running_workers


def test_a_coordinator_that_cannot_plan_any_more_ends(toy: Path, tmp_path: Path) -> None:
    """It names the exception and exits with a status after which systemd and launchd start it again."""
    with running_workers(tmp_path, toy, 2) as workers:
        flags = [flag for worker in workers for flag in ("--worker", worker.address)]
        launched = launch(
            tmp_path,
            "coordinator",
            "tests.support.processes.broken_cluster_coordinator",
            ["serve", "--model", str(toy), "--port", "0", "--no-mdns", *flags],
            env={"MTP_STATE_DIR": str(tmp_path / "state")},
        )
        with ending(launched):
            as_coordinator(launched)
            workers[1].kill()
            assert launched.wait(timeout=30.0) == 1
        last = launched.text().splitlines()[-1]
    assert "the cluster cannot plan: OverflowError: int too large to convert to float." in last
    assert "Start again, and report this bug" in last
