"""`mtp-coord serve`: one OpenAI-compatible endpoint over workers, or over this process alone."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli import options
from coordinator.cli.client import API_KEY
from coordinator.cli.trust_commands import StateOption
from coordinator.drafts.controller import MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.images.encoder import VisionMode
from coordinator.planning.capacity import DEFAULT_SEQUENCES
from coordinator.planning.groups import Parallel, Prefer
from coordinator.serve.served_parts import DEFAULT_WAIT, ServeOptions
from coordinator.serve.server import serve as run_server
from coordinator.trust.registry import KeyRing
from mtp.checkpoint.hub.resolve import BUILTIN
from proto.announcement import is_loopback, parse_address
from proto.control import Kernels
from proto.errors import UsageError
from proto.images import MAX_IMAGES
from proto.state_dir import state_dir as directory_of
from proto.terminal.logs import LogFormat, LogLevel, configure
from proto.terminal.progress import parse_size

log = logging.getLogger(__name__)

JOIN_PORT = 50504
"""Default port of --listen."""


def serve(
    argument: options.ModelArgument = None,
    model: options.ModelOption = None,
    host: Annotated[str, typer.Option(help="Address for HTTP.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for HTTP; 0 chooses a free one.")
    ] = 8080,
    worker: options.WorkersOption = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Wait for this many workers before the first plan.")
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds to look for workers; afterwards those that joined serve, or this process alone. With "
            f"--nodes, too few workers are then an error.  [default: {DEFAULT_WAIT:g}; no limit with --nodes]",
            show_default=False,
        ),
    ] = None,
    alone_ok: Annotated[
        bool,
        typer.Option("--alone-ok", help="Serve with fewer than --nodes, or alone, after --wait."),
    ] = False,
    parallel: options.ParallelOption = "pipeline",
    prefer: options.PreferOption = Prefer.latency,
    no_auto_replan: Annotated[
        bool,
        typer.Option(
            "--no-auto-replan",
            help="Use workers that join later only after mtp-coord replan, not when no answer is open.",
        ),
    ] = False,
    single_node: Annotated[
        bool, typer.Option("--single-node", help="Use no worker: serve in this process.")
    ] = False,
    no_mdns: options.NoMdnsOption = False,
    dtype: options.DtypeOption = None,
    mtp: options.MtpOption = "auto",
    ngram: options.NgramOption = NgramMode.auto,
    kv_bits: options.KvBitsOption = None,
    exact: options.ExactOption = False,
    slices: options.SlicesOption = None,
    max_sequences: Annotated[
        int, typer.Option(min=1, max=256, help="Most requests served at once; others queue.")
    ] = DEFAULT_SEQUENCES,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=8192,
            help="Most tokens of a prompt that travel together.  [default: 512; 1024 if all machines are M5]",
        ),
    ] = None,
    no_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--no-prefix-cache", help="Keep no state of prompts for later ones that begin the same."
        ),
    ] = False,
    prefix_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Keep the state of prompts on disk, such as 100GB, over restarts. Workers have the same flag.",
        ),
    ] = None,
    vision: Annotated[
        VisionMode,
        typer.Option(
            help="Read the part for images when the first one comes, at the start, or never."
        ),
    ] = VisionMode.auto,
    max_images: Annotated[
        int, typer.Option(min=0, max=MAX_IMAGES, help="Most images of one request.")
    ] = 32,
    share_weights: Annotated[
        bool,
        typer.Option(
            "--share-weights",
            help="Send workers that lack the model's files their layers from here. Without it they read "
            "them from the hub, where the model is a hub repo.",
        ),
    ] = False,
    failure_timeout: Annotated[
        float, typer.Option(min=0.2, help="Seconds of silence after which a worker counts as lost.")
    ] = 3.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar=API_KEY,
            help="Answer only who sends this key, or another one given; repeatable. The variable takes several, "
            "with spaces between, and is not seen in a list of processes.",
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A web page's origin, as https://chat.example, that may call from a browser, or '*' for any; "
            "repeatable.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another name of the model, for clients with a hard-coded one; repeatable.",
        ),
    ] = None,
    clamp_max_tokens: Annotated[
        bool,
        typer.Option(
            "--clamp-max-tokens",
            help="Lower a request's max_tokens to the room left instead of rejecting the request.",
        ),
    ] = False,
    allow_sleep: Annotated[
        bool, typer.Option("--allow-sleep", help="Let a Mac fall asleep while it serves.")
    ] = False,
    kernels: Annotated[
        Kernels,
        typer.Option(help="This project's kernels, MLX's operations, or on a Mac the faster ones."),
    ] = Kernels.auto,
    no_wired_memory: Annotated[
        bool,
        typer.Option(
            "--no-wired-memory",
            help="Let macOS page the weights of this process out. The default on machines of 16 GB and less.",
        ),
    ] = False,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where other machines join this cluster by a token (mtp-coord token create). The first start makes "
            "the cluster's certificate authority.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="Certificate of the HTTP server (PEM). Off loopback the default is one of the cluster."
        ),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of --tls-cert (PEM).")] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name of this server that clients may use besides its addresses and host name; repeatable.",
        ),
    ] = None,
    state_dir: StateOption = None,
    no_journal: Annotated[
        bool,
        typer.Option(
            "--no-journal",
            help="Keep stored answers in memory only. Without it they are kept in the state directory and continue "
            "after a restart.",
        ),
    ] = False,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Serve --host without TLS and keys, and use any worker on the network without encryption.",
        ),
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Least severity to log.")] = LogLevel.info,
    log_format: Annotated[
        LogFormat, typer.Option(help="Log lines for people or as JSON.")
    ] = LogFormat.text,
) -> None:
    """Serve a model to OpenAI clients at http://HOST:PORT/v1.

    The server finds workers by mDNS and --worker, splits the layers over them, and continues when one is lost. Without
    workers the same engine runs in this process.
    """
    configure(log_level, log_format)
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together. Give both, or neither")
    state = directory_of(state_dir)
    if not is_loopback(host) and not insecure and not (api_key or KeyRing(state).stored_keys()):
        raise UsageError(
            f"--host {host} is open to the network, so clients need an API key. Create one with mtp-coord key "
            "create NAME, or add --insecure to serve everyone without encryption"
        )
    if insecure:
        log.warning("insecure: HTTP is not encrypted, and any worker on the network is accepted")
    shared = _checked_parallel(parallel, nodes, single_node)
    if single_node and (worker or nodes):
        raise UsageError("--single-node uses no worker. Leave out --worker and --nodes")
    if alone_ok and nodes is None and shared.machines is None:
        raise UsageError("--alone-ok needs --nodes. Without it, serving alone is allowed")
    if prefix_disk is not None and no_prefix_cache:
        raise UsageError("--prefix-disk keeps prefixes on disk. Leave out --no-prefix-cache")
    settings = ServeOptions(
        model=options.named_model(argument, model, BUILTIN),
        host=host,
        port=port,
        workers=tuple(worker or ()),
        nodes=nodes,
        wait=wait,
        alone_ok=alone_ok,
        auto_replan=not no_auto_replan,
        single_node=single_node,
        mdns=not no_mdns,
        dtype=dtype,
        mtp=MtpMode.parse(mtp),
        ngram=ngram,
        kv_bits=None if kv_bits is None else int(kv_bits),
        exact=exact,
        slices=options.checked_slices(slices, exact, shared, nodes),
        failure_timeout=failure_timeout,
        max_sequences=max_sequences,
        prefill_chunk=prefill_chunk,
        prefix_cache=not no_prefix_cache,
        prefix_disk=None if prefix_disk is None else parse_size(prefix_disk),
        vision=vision,
        max_images=max_images,
        share_weights=share_weights,
        api_keys=_checked_keys(api_key),
        allowed_origins=tuple(allowed_origins or ()),
        served_names=tuple(served_model_name or ()),
        clamp_max_tokens=clamp_max_tokens,
        wired=not no_wired_memory,
        kernels=kernels,
        awake=not allow_sleep,
        insecure=insecure,
        join_address=None if listen is None else parse_address("--listen", listen, JOIN_PORT),
        state=state,
        tls_cert=tls_cert,
        tls_key=tls_key,
        allowed_hosts=tuple(allowed_host or ()),
        journal=not no_journal,
        parallel=shared,
        prefer=prefer,
        name=socket.gethostname().partition(".")[0],
    )
    asyncio.run(run_server(settings))


def _checked_keys(api_key: list[str] | None) -> tuple[str, ...]:
    """Return the values of --api-key. Raises UsageError for an empty one."""
    if any(not key.strip() for key in api_key or ()):
        raise UsageError("--api-key: an empty key would let everybody in")
    if not api_key and API_KEY in os.environ:
        raise UsageError(
            f"{API_KEY} is set and empty, which would let everybody in: unset it, or give a key"
        )
    return tuple(key.strip() for key in api_key or ())


def _checked_parallel(text: str, nodes: int | None, single_node: bool) -> Parallel:
    """Return the value of --parallel. Raises UsageError for flags that do not work with groups."""
    found = Parallel.parse(text)
    if found.size == 1 and not found.auto:
        return found
    if single_node:
        raise UsageError(
            f"--parallel {found} shares layers between workers. Leave out --single-node"
        )
    if nodes is not None and found.machines not in (None, nodes):
        raise UsageError(
            f"--parallel {found} needs {found.machines} machines, and --nodes is {nodes}"
        )
    return found
