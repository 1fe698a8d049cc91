"""`mtp-coord doctor`: checks of this machine and of the workers it reaches, with advice."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from coordinator.cli import doctor_checks as checks
from coordinator.cli.doctor_checks import Finding, Verdict
from coordinator.cluster.discovery import Discovery
from coordinator.pipeline.worker_connection import ConnectionPolicy
from coordinator.serve.options import ModelOption, NoMdnsOption, WorkersOption
from coordinator.trust.cluster_trust import ClusterTrust
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from proto import cluster_pb2 as pb
from proto.errors import ClusterError
from proto.state_dir import state_dir
from proto.terminal.options import JsonOption, StateOption, takes_options
from worker.engine import hardware
from worker.engine.cost_report import CostReport

CHECK_SECONDS = 600.0
"""Seconds. Longest single check. That of the kernels loads a model, which may be large."""

MDNS_SECONDS = 3.0
"""Seconds. Time for workers to answer on the network. A local answer takes about one."""


@dataclass
class Diagnosis:
    """A run of all checks with one model, of this machine and of the workers at `addresses` or found by mDNS.

    `findings` holds the results, and `report` gets each as soon as it is known. `policy` decides how to connect to
    workers. `full` adds the times of a window's parts.
    """

    checkpoint: Checkpoint
    report: Callable[[Finding], None]
    addresses: tuple[str, ...] = ()
    mdns: bool = True
    policy: ConnectionPolicy = field(default_factory=ConnectionPolicy)
    full: bool = False
    findings: list[Finding] = field(default_factory=list)

    async def run(self) -> list[Finding]:
        """Check the versions, the device, the kernels, the workers and the network, and return the findings."""
        await self.check("versions", checks.check_versions)
        await self.check("device", checks.check_device)
        await self.check("kernels", checks.check_kernels, self.checkpoint)
        if self.full:
            for name, measure in CostReport(self.checkpoint).parts.items():
                await self.check(name, checks.check_costs, name, measure)
        await self._check_network()
        return self.findings

    async def check(self, name: str, check: Callable[..., Finding | Awaitable[Finding]], *arguments: Any) -> None:
        """Run a check on this thread, because MLX's arrays belong to it. Its error or deadline becomes a finding."""
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                found = check(*arguments)
                finding = found if isinstance(found, Finding) else await found
        except TimeoutError:
            text = f"no result within {CHECK_SECONDS:g} s"
            finding = Finding(name, Verdict.FAIL, text, "Run it again on an idle machine.")
        except ClusterError as error:
            finding = Finding(name, Verdict.FAIL, str(error), "See the message.")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            advice = "This check failed itself. Please report it with the output of --json."
            finding = Finding(name, Verdict.FAIL, text, advice)
        self.findings.append(finding)
        self.report(finding)

    async def _check_network(self) -> None:
        seconds = MDNS_SECONDS if self.mdns else 0.0
        async with Discovery(self.addresses, mdns=self.mdns) as discovery:
            await asyncio.sleep(seconds)
            found, problem = discovery.candidates(), discovery.problem
        await self.check("mDNS", checks.check_discovery, found, self.mdns, problem, seconds)
        fingerprint = await asyncio.to_thread(self.checkpoint.fingerprint) if found else ""
        model = pb.ModelRef(name="doctor", fingerprint=fingerprint)
        me = pb.Coordinator(id=secrets.token_hex(8), name="mtp-coord doctor")
        for candidate in found:
            arguments = (candidate, model, me, self.policy, hardware.own_version())
            await self.check(f"worker {candidate.name}", checks.check_worker, *arguments)
        failed = [one.check for one in self.findings if one.verdict is Verdict.FAIL]
        reached = sum(f"worker {candidate.name}" not in failed for candidate in found)
        await self.check("Thunderbolt", checks.check_thunderbolt, reached)


SIGNS = {Verdict.OK: "[green]✓[/]", Verdict.WARN: "[yellow]![/]", Verdict.FAIL: "[red]✗[/]", Verdict.SKIP: "[dim]-[/]"}


@dataclass(frozen=True)
class DoctorOptions:
    """The flags of `mtp-coord doctor`."""

    model: ModelOption = BUILTIN
    worker: WorkersOption = ()
    no_mdns: NoMdnsOption = False
    insecure: Annotated[bool, typer.Option("--insecure", help="Connect to workers without encryption.")] = False
    full: Annotated[bool, typer.Option("--full", help="Time products, attention and memory, up to a minute.")] = False
    state_dir: StateOption = None
    json: JsonOption = False


@takes_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check this machine, its kernels and its workers, and print advice.

    Takes about 30 seconds with the built-in model, and a minute more with --full. With another MODEL the answers come
    from it. Exits with status 1 if a check fails.
    """
    logging.getLogger().setLevel(logging.ERROR)
    checkpoint = Checkpoint.open(resolve_model(options.model))
    state = state_dir(options.state_dir)
    trust = None if options.insecure else ClusterTrust.open(state, create=False)
    policy = ConnectionPolicy(trust.trust if trust else None, options.insecure)
    console = Console(emoji=False, stderr=options.json, quiet=options.json)
    diagnosis = Diagnosis(checkpoint, partial(show, console), options.worker, not options.no_mdns, policy, options.full)
    findings = asyncio.run(diagnosis.run())
    counts = Counter(finding.verdict for finding in findings)
    if options.json:
        typer.echo(json.dumps(json_report(findings), indent=2))
    else:
        fine, warned, failed = (counts[each] for each in (Verdict.OK, Verdict.WARN, Verdict.FAIL))
        console.print(f"{fine} fine, {warned} to look at, {failed} failed")
    if counts[Verdict.FAIL]:
        raise typer.Exit(1)


def show(console: Console, finding: Finding) -> None:
    """Print a finding as one line, with its advice below."""
    sign, check = SIGNS[finding.verdict], escape(finding.check)
    console.print(f"{sign} [bold]{check}[/]: {escape(finding.figure)}", soft_wrap=True)
    if finding.advice:
        console.print(f"    {escape(finding.advice)}", soft_wrap=True)


def json_report(findings: list[Finding]) -> dict[str, Any]:
    """Return the report as plain JSON values, without paths of this user."""
    text = json.dumps([asdict(finding) for finding in findings])
    home = json.dumps(str(Path.home()))[1:-1]
    return {"checks": json.loads(text.replace(home, "~"))}
