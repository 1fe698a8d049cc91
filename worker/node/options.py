"""The options of `mtp-worker`."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from proto.announcement import is_loopback, join_address, parse_address
from proto.errors import UsageError
from proto.kernels import Kernels
from proto.rpc.listener import thunderbolt_host
from proto.span import Span
from proto.terminal import console
from proto.terminal.logs import LogFormat, LogLevel
from proto.terminal.options import KernelsOption, LogFileOption, LogFormatOption, LogLevelOption, Parsed, StateOption
from proto.terminal.progress import parse_size

PROGRAM = "mtp-worker"

DEFAULT_PORT = 50505

LOOPBACK = f"127.0.0.1:{DEFAULT_PORT}"
EVERYWHERE = f"0.0.0.0:{DEFAULT_PORT}"
"""The defaults of --listen: for a worker alone, and for one that joins over the network."""


@dataclass(frozen=True)
class WorkerOptions:
    """The flags of `mtp-worker`. Sizes are in bytes."""

    layers: Annotated[
        Span | None,
        typer.Option(
            metavar="A-B",
            help="Hold exactly these layers, both included. Without it the coordinator decides.",
        ),
        Parsed(Span.parse),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint on this machine: a directory, a hub repo, or 'builtin'. Without it the "
            "coordinator's path or repo is looked up here, and what is missing of the layers is fetched."
        ),
    ] = None
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; port 0 takes any free one.  "
            f"[default: as at the last --join, which takes {EVERYWHERE}; else where others join a coordinator of this "
            f"machine, or {LOOPBACK}]",
            show_default=False,
        ),
    ] = None
    data_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65532,
            help="Port for frames, for a firewall. A process for a group takes the next three.  [default: any]",
            show_default=False,
        ),
    ] = 0
    name: Annotated[
        str,
        typer.Option(
            help=f"Name shown in status and logs.  [default: host name, with a port other than {DEFAULT_PORT}]",
            show_default=False,
        ),
    ] = ""
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory to use, such as 48GB.  [default: on a Mac 85 % of what Metal recommends]",
        ),
        Parsed(parse_size),
    ] = None
    prefix_disk: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            help="Keep the state of prompts on this machine's disk, such as 100GB, for later ones that begin the same. "
            "When the limit is reached, the least recently used prompts are deleted.",
        ),
        Parsed(parse_size),
    ] = None
    kernels: KernelsOption = Kernels.auto
    no_wired_memory: Annotated[
        bool,
        typer.Option(
            "--no-wired-memory",
            help="Let macOS page the weights out. The default on machines of 16 GB and less.",
        ),
    ] = False
    allow_sleep: Annotated[bool, typer.Option("--allow-sleep", help="Let a Mac fall asleep while the worker runs.")] = (
        False
    )
    no_mdns: Annotated[bool, typer.Option("--no-mdns", help="Do not announce this worker on the network.")] = False
    state_dir: StateOption = None
    join: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="MTP_JOIN_TOKEN",
            help="Join the cluster that made this token. Later starts need no token. Other users of this machine "
            "can see the flag in the process list, but not the variable.",
        ),
    ] = field(default=None, repr=False)
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Accept any coordinator on the network, unencrypted. Anyone who reaches the port can use this worker.",
        ),
    ] = False
    direct: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address of this machine on a direct link, such as a Thunderbolt cable. Machines that share layers "
            "exchange partial results there, unencrypted.  [default: the Thunderbolt bridge]",
        ),
    ] = None
    rdma: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="RDMA device of the Thunderbolt 5 cable to the other Mac of a group of two, such as rdma_en5. Without "
            "it the two exchange partial results over TCP.",
        ),
    ] = ""
    member: Annotated[bool, typer.Option("--member", hidden=True, help="Be the process of a worker for a group.")] = (
        False
    )
    owned: Annotated[bool, typer.Option("--owned", hidden=True, help="End when the standard input ends.")] = False
    log_level: LogLevelOption = LogLevel.info
    log_file: LogFileOption = None
    log_format: LogFormatOption = LogFormat.text
    version: Annotated[bool, console.version_option(PROGRAM)] = False

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of --listen. Raises UsageError."""
        return parse_address("--listen", self.listen or LOOPBACK, DEFAULT_PORT)

    @property
    def own_name(self) -> str:
        """The name of this worker: --name, or the host name, with the port of a second worker of this machine."""
        _, port = self.address
        host_name = socket.gethostname().partition(".")[0]
        return self.name or (host_name if port in (0, DEFAULT_PORT) else f"{host_name}-{port}")

    def check(self) -> None:
        """Raise UsageError for addresses that cannot be used."""
        _ = self.address, self.direct_host()

    def direct_host(self) -> str:
        """Return the host of the direct link, or "" without one. Raises UsageError for IPv6, which MLX's ring lacks."""
        if self.direct is not None:
            if ":" in self.direct:
                raise UsageError(f"--direct {self.direct}: give an IPv4 address or a host name")
            return self.direct
        host, _ = self.address
        return host if is_loopback(host) else thunderbolt_host()

    def member_flags(self, model: Path | None, memory_limit: int, *, secured: bool) -> tuple[str, ...]:
        """Return the flags of the process of this worker for a group."""
        flags = ["--listen", join_address(self.address[0], 0), "--name", self.own_name]
        flags += ["--direct", self.direct_host()]
        flags += ["--data-port", str(self.data_port + 1)] if self.data_port else []
        flags += ["--rdma", self.rdma] if self.rdma else []
        flags += ["--memory-limit", f"{memory_limit}B", "--kernels", self.kernels.value]
        flags += ["--prefix-disk", f"{self.prefix_disk}B"] if self.prefix_disk else []
        flags += ["--log-level", self.log_level, "--log-format", "json"]
        flags += ["--model", str(model)] if model else []
        flags += ["--state-dir", str(self.state_dir)] if self.state_dir else []
        flags += ["--no-wired-memory"] if self.no_wired_memory else []
        return (*flags, *(() if secured else ("--insecure",)))
