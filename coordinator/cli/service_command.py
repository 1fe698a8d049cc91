"""`mtp-coord service`: the coordinator as a service of its user."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from coordinator.cli.serve_command import CONFIG, USUAL
from coordinator.serve.options import ServeOptions
from mtp.checkpoint.hub.resolve import find_model
from proto.terminal.config_file import kept_flags
from proto.terminal.options import takes_options
from proto.terminal.user_service import Service, service_app


def _service(state: Path) -> Service:
    return Service("mtp-coord", ("serve",), state)


service = service_app("Run mtp-coord serve as a service, at every login.", _service)


@service.command()
@takes_options(ServeOptions, USUAL)
def install(options: ServeOptions) -> None:
    """Start mtp-coord serve with these flags, now and at every login. The flags are kept in serve.toml.

    `mtp-coord service install qwen3.6:27b --nodes 2 --own-worker`
    """
    options.check()
    found, model = _service(options.state.absolute()), Path(options.model).expanduser()
    if model.is_dir():  # the service starts in another directory
        options = replace(options, model=str(model.absolute()))
    find_model(options.model)  # raises for a name that is none
    file = found.install(kept_flags(found.state / CONFIG, options))
    typer.echo(f"{file}: installed and started. Its log: mtp-coord service logs")
