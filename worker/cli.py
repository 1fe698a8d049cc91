"""`mtp-worker`: the command line of one worker process."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Annotated

import typer

from proto.announcement import parse_address
from proto.control import Kernels
from proto.span import Span
from proto.terminal import console
from proto.terminal.logs import LogFormat, LogLevel, configure
from proto.terminal.progress import parse_size

log = logging.getLogger(__name__)

PROGRAM = "mtp-worker"

DEFAULT_PORT = 50505

app = typer.Typer(
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def worker(
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="A-B",
            help="Hold exactly these layers, both included. Without it the coordinator decides.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint on this machine: a directory, a hub repo, or 'builtin'. Without it the "
            "coordinator's path or repo is looked up here, and what is missing of the layers is fetched."
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes any free one.")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    data_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for frames, for a firewall.  [default: any]")
    ] = 0,
    name: Annotated[
        str | None,
        typer.Option(
            help=f"Name shown in status and logs.  [default: host name, with a port other than {DEFAULT_PORT}]"
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory to use, such as 48GB.  [default: 3/4]"),
    ] = None,
    prefix_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Keep the state of prompts on this machine's disk, such as 100GB, for later ones that begin the same.",
        ),
    ] = None,
    kernels: Annotated[
        Kernels,
        typer.Option(help="This project's kernels, MLX's operations, or on a Mac the faster ones."),
    ] = Kernels.auto,
    no_wired_memory: Annotated[
        bool,
        typer.Option(
            "--no-wired-memory",
            help="Let macOS page the weights out. The default on machines of 16 GB and less.",
        ),
    ] = False,
    allow_sleep: Annotated[
        bool, typer.Option("--allow-sleep", help="Let a Mac fall asleep while the worker runs.")
    ] = False,
    no_mdns: Annotated[
        bool, typer.Option("--no-mdns", help="Do not announce this worker on the network.")
    ] = False,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of this machine's certificate.  [default: MTP_STATE_DIR, or the user's state directory]"
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="MTP_JOIN_TOKEN",
            help="Join the cluster that made this token. Later starts need no token. Other users of this machine "
            "can see the flag in the process list, but not the variable.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Accept any coordinator on the network, unencrypted. Anyone who reaches the port can use this worker.",
        ),
    ] = False,
    direct: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address of this machine on a direct link, such as a Thunderbolt cable. Machines that share layers "
            "exchange partial results there, unencrypted.  [default: the Thunderbolt bridge]",
        ),
    ] = None,
    rdma: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="RDMA device of the Thunderbolt 5 cable to the other Mac of a group of two, such as rdma_en5. Without "
            "it the two exchange partial results over TCP.",
        ),
    ] = "",
    member: Annotated[
        bool, typer.Option("--member", hidden=True, help="Be the process of a worker for a group.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Least severity to log.")] = LogLevel.info,
    log_format: Annotated[
        LogFormat, typer.Option(help="Log lines for people or as JSON.")
    ] = LogFormat.text,
    version: Annotated[bool, console.version_option(PROGRAM)] = False,
) -> None:
    """Hold some of a model's layers and run them for a coordinator.

    Start one on each machine, then `mtp-coord serve` on one of them. On Ctrl-C or SIGTERM the worker waits until the
    coordinator has planned without it, and ends.
    """
    configure(log_level, log_format)
    span = Span.parse(layers) if layers is not None else None
    host, port = parse_address("--listen", listen, DEFAULT_PORT)
    # These modules import MLX, which --help and a wrong flag do not need.
    from mtp.checkpoint.hub.resolve import find_model
    from worker.engine.hardware import default_memory_limit
    from worker.node.process import WorkerOptions, run

    own = find_model(model) if model is not None else None
    if model is not None and own is None:
        log.info(
            "the model is not on this machine. Its layers will be fetched when a coordinator serves it",
            extra={"model": model},
        )
    own_name = socket.gethostname().partition(".")[0]
    if port not in (0, DEFAULT_PORT):  # a second worker of this machine
        own_name += f"-{port}"
    options = WorkerOptions(
        host=host,
        port=port,
        data_port=data_port,
        name=name or own_name,
        layers=span,
        model=own,
        memory_limit=parse_size(memory_limit) if memory_limit else default_memory_limit(),
        mdns=not no_mdns,
        state_dir=state_dir,
        wired=not no_wired_memory,
        kernels=kernels,
        awake=not allow_sleep,
        insecure=insecure,
        join=join,
        direct=direct,
        rdma=rdma,
        prefix_disk=parse_size(prefix_disk) if prefix_disk else None,
        member=member,
        logs=(log_level, log_format),
    )
    asyncio.run(run(options))


def main() -> None:
    """Entry point of `mtp-worker`."""
    console.run_process(PROGRAM, lambda: app(prog_name=PROGRAM))
