"""One line about the present activity of a cluster, and one about what would make it faster. Pure functions."""

from __future__ import annotations

from coordinator.status.bottleneck import UNBALANCED, PassLog
from coordinator.status.cluster_status import ClusterStatus, NodeStatus
from proto.terminal.size import format_size


def describe_activity(status: ClusterStatus) -> str:
    """Return what the cluster does now, such as `Computing prompts: 704 of 2,812 tokens`."""
    if not status.ready:
        return _describe_start(status)
    if status.prefilling:
        done = sum(prompt.done for prompt in status.prefilling)
        total = sum(prompt.total for prompt in status.prefilling)
        return f"Computing prompts: {done:,} of {total:,} tokens"
    if status.running:
        answers = "1 answer" if status.running == 1 else f"{status.running} answers"
        queued = f", {status.waiting} queued" if status.waiting else ""
        return f"Generating {answers}{queued}"
    return "Ready"


def _describe_start(status: ClusterStatus) -> str:
    loading = [node for node in status.nodes if node.health == "loading"]
    if loading:
        done = sum(node.loaded_bytes for node in loading)
        total = sum(node.load_bytes for node in loading)
        progress = f": {format_size(done)} of {format_size(total)}" if total else ""
        machines = "1 machine" if len(loading) == 1 else f"{len(loading)} machines"
        return f"Loading layers on {machines}{progress}"
    lost = [node.name for node in status.nodes if node.health == "lost"]
    if status.recoveries and lost:
        return f"Recovering from the loss of {', '.join(lost)}"
    found = sum(node.health == "idle" for node in status.nodes)
    if status.workers_wanted and found < status.workers_wanted:
        return f"Waiting for workers: {found} of {status.workers_wanted} ready"
    detail = status.detail or "starting"
    return f"{detail[:1].upper()}{detail[1:]}"


def suggest_improvement(status: ClusterStatus, passes: PassLog | None = None) -> str:
    """Return one sentence that names the change with the largest effect on speed, or an empty text.

    `passes` has the measured times of the last frames. Without them the stages' own times are compared.
    """
    if not status.ready:
        return ""
    idle = [node.name for node in status.nodes if node.health == "idle" and not node.detail]
    if idle:
        return (
            f"{', '.join(idle)} can serve but holds no layers: a new plan would use every worker."
        )
    stages = [node for node in status.nodes if node.span]
    if passes and (sentence := passes.explain([node.name for node in stages])):
        return sentence
    stages = [node for node in stages if node.stage_ms]
    if len(stages) < 2:
        return ""
    return _compare_stages(stages)


def _compare_stages(stages: list[NodeStatus]) -> str:
    times = {node.name: node.stage_ms or 0.0 for node in stages}
    slowest = max(stages, key=lambda node: node.stage_ms or 0.0)
    ratio = (slowest.stage_ms or 0.0) * len(times) / sum(times.values())
    if ratio < UNBALANCED:
        return "The stages take about the same time: no cut would be faster."
    return (
        f"{slowest.name} sets the pace: its stage takes {ratio:.1f} times the mean. "
        "Fewer layers there, or a faster machine, would help."
    )
