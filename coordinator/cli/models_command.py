"""`mtp-coord models`: the models on this machine."""

from __future__ import annotations

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.api.model_catalog import Catalog, ModelFacts
from coordinator.cli.trust_commands import StateOption
from coordinator.serve.server import CONVERTED
from mtp.checkpoint.hub.resolve import ollama_models
from proto.state_dir import state_dir as directory_of
from proto.terminal.progress import format_size


def models(state_dir: StateOption = None) -> None:
    """List the models on this machine that can be served, and the problems of the others.

    It searches the models that the page has converted, the hub's cache and LM Studio's folders. Give a name to
    serve --model, load or inspect.
    """
    found = Catalog(directory_of(state_dir) / CONVERTED).list_models()
    Console(emoji=False).print(_table([model for model in found if not model.problem]))
    for model in found:
        if model.problem:
            typer.echo(f"{model.name} cannot be served: {model.problem}")
    folder, count = ollama_models()
    if count:
        typer.echo(
            f"{folder}: Ollama's models ({count}) cannot be served: they are GGUF files. Download the same models as "
            "safetensors."
        )


def _table(found: list[ModelFacts]) -> Table:
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("model", overflow="fold")
    for title in ("size", "weights", "context", "MTP head"):
        table.add_column(title)
    for model in found:
        weights = model.quantization or "full"
        size, context = format_size(model.nbytes), f"{model.context:,}"
        table.add_row(escape(model.name), size, weights, context, model.head)
    return table
