"""`mtp-coord doctor`: checks of this machine and of the workers it reaches, with advice."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from coordinator.cli import options
from coordinator.cli.trust_commands import StateOption
from coordinator.doctor.checks import Finding, Verdict, forget_trials
from coordinator.doctor.diagnosis import Diagnosis
from coordinator.pipeline.worker_client import ConnectionPolicy
from coordinator.trust.cluster_trust import ClusterTrust
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from proto.state_dir import state_dir

SIGNS = {
    Verdict.OK: "[green]✓[/]",
    Verdict.WARN: "[yellow]![/]",
    Verdict.FAIL: "[red]✗[/]",
    Verdict.SKIP: "[dim]-[/]",
}


def doctor(
    argument: options.ModelArgument = None,
    option: options.ModelOption = None,
    worker: options.WorkersOption = None,
    no_mdns: options.NoMdnsOption = False,
    full: Annotated[
        bool, typer.Option("--full", help="Take minutes: longer texts, more depths, a pause.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Forget which kernels failed or were slower here.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Connect to workers without encryption.")
    ] = False,
    state: StateOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check this machine, its kernels and its workers, and print advice.

    Takes about 30 seconds with the built-in model. With another MODEL the answers come from it. Exits with status 1 if
    a check fails. With --retry this check and the next start of a worker try the optional kernels again.
    """
    logging.getLogger().setLevel(logging.ERROR)
    if retry:
        forget_trials()
    checkpoint = Checkpoint.open(resolve_model(options.named_model(argument, option, BUILTIN)))
    trust = None if insecure else ClusterTrust.open(state_dir(state), create=False)
    policy = ConnectionPolicy(trust.trust if trust else None, insecure)
    console = Console(emoji=False, stderr=as_json, quiet=as_json)
    diagnosis = Diagnosis(
        checkpoint, partial(show, console), tuple(worker or ()), not no_mdns, full, policy
    )
    findings = asyncio.run(diagnosis.run())
    counts = Counter(finding.verdict for finding in findings)
    if as_json:
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
