"""`mtp-coord models`: the models on this machine, as the running server or the disk lists them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.cli.client import call
from coordinator.trust.keys import OWNER_KEY
from proto.errors import ClusterError
from proto.state_dir import read_json, state_dir
from proto.terminal.progress import format_size

SERVER_SECONDS = 2.0
"""Deadline of this user's server, which has read the models already. Without it their headers are read."""


def models() -> None:
    """List the models on this machine that can be served, and the problems of the others.

    It searches the hub's cache and LM Studio's folders. Give a name to serve --model, load or inspect.
    """
    served, found = _of_the_server() or ("", _of_the_disk())
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for title in ("size", "weights", "context", "MTP head", ""):
        table.add_column(title)
    for model in found:
        if not model["problem"]:
            size, context = format_size(model["nbytes"]), f"{model['context']:,}"
            weights, use = model["quantization"] or "full", "in use" if model["name"] == served else ""
            table.add_row(escape(model["name"]), size, weights, context, model["head"], use)
    Console(emoji=False).print(table)
    for model in found:
        if model["problem"]:
            typer.echo(f"{model['name']} cannot be served: {model['problem']}")


def _of_the_server() -> tuple[str, list[dict[str, Any]]] | None:
    """Return the served model and the list of this user's server on this machine, None if none answers."""
    try:
        url = read_json(state_dir(None) / OWNER_KEY).get("url", "")
        answer = json.loads(call("GET", url, "/v1/cluster/models", None, deadline=SERVER_SECONDS)) if url else None
    except (ClusterError, ValueError):
        return None
    return (answer["served"], answer["models"]) if answer else None


def _of_the_disk() -> list[dict[str, Any]]:
    # It imports MLX and the hub's library, which take half a second.
    from coordinator.web.model_catalog import list_models

    return [asdict(model) for model in list_models()]
