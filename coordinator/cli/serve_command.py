"""`mtp-coord serve`: one OpenAI-compatible endpoint over workers, or over this process alone."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace

import typer

from coordinator.serve.options import ServeOptions
from coordinator.serve.server import serve as run_server
from coordinator.trust.keys import API_KEY, KeyRing
from mtp.checkpoint.hub.missing_head import with_fetched_head
from mtp.checkpoint.hub.remote_checkpoint import open_model
from mtp.checkpoint.hub.repo import repo_name
from mtp.checkpoint.hub.resolve import BUILTIN, find_model
from proto.errors import ClusterError, UsageError
from proto.terminal.logs import configure
from proto.terminal.options import takes_options

log = logging.getLogger(__name__)


def _wants_head(options: ServeOptions) -> bool:
    """Ask on a terminal for the head of a model that lacks it, and return whether to download it."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or options.mtp.depth == 0:
        return False
    try:
        path = find_model(options.model)
        checkpoint = open_model(options.model if path is None else str(with_fetched_head(path)))
    except ClusterError:
        return False  # the server says what is wrong
    if checkpoint.mtp.complete or checkpoint.config.shape.head is None:
        return False
    return typer.confirm(
        f"{options.model} has no complete MTP head, so it would decode without drafts. Download the head alone, from "
        "the model that it was converted from?",
        default=True,
    )


USUAL = "model host port nodes own_worker own_layers worker parallel single_node mtp fetch_head listen api_key"
"""The flags that the help page shows first."""


CONFIG = "serve.toml"
"""The file of flags in the state directory."""


@takes_options(ServeOptions, USUAL, CONFIG)
def serve(options: ServeOptions) -> None:
    """Serve a model to OpenAI clients at http://HOST:PORT/v1.

    The server finds workers by mDNS and --worker, splits the layers over them, and continues when one is lost. Without
    workers the same engine runs in this process.
    """
    configure(options.log_level, options.log_format, file=options.log_file)
    options.check()
    options = replace(options, model=repo_name(options.model))
    if not options.api_key and API_KEY in os.environ:
        raise UsageError(f"{API_KEY} is set and empty, which would let everybody in: unset it, or give a key")
    if options.tls_cert and not (options.is_open or options.api_key or KeyRing(options.state).stored_keys()):
        raise UsageError(
            f"--host {options.host} is open to the network, so clients need an API key. Create one with mtp-coord key "
            "create NAME, or add --insecure to serve everyone without encryption"
        )
    if not options.fetch_head and _wants_head(options):
        options = replace(options, fetch_head=True)
    if options.model == BUILTIN:
        log.info(
            "this is the small built-in model, for trying only. mtp-coord recommend lists models for your machines"
        )
    if options.insecure:
        log.warning("insecure: HTTP is not encrypted, and any worker on the network is accepted")
    asyncio.run(run_server(options))
