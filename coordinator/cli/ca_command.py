"""`mtp-coord ca`: rotate, export and import the certificate authority of the cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.state_option import StateOption, open_authority
from coordinator.trust.authority import import_authority
from coordinator.trust.registry import Registry
from proto.errors import UsageError
from proto.trust import state_dir as state_directory

VARIABLE = "MTP_CA_PASSPHRASE"
"""Environment variable of the passphrase, for scripts. Without it the command asks."""

MIN_PASSPHRASE = 8


def ca(
    action: Annotated[str, typer.Argument(help="rotate, export or import.")],
    file: Annotated[
        Path | None, typer.Argument(help="The file to export to or import from.")
    ] = None,
    state_dir: StateOption = None,
) -> None:
    """Rotate, export or import the certificate authority of the cluster.

    After `rotate` the machines get new certificates, and the old authority stays valid for 30 days. `export` writes
    an encrypted file. `import` reads it on another machine, where `mtp-coord serve --listen` continues the cluster.
    """
    match action, file:
        case "rotate", None:
            _, authority = open_authority(state_dir)
            authority.rotate()
            typer.echo(f"new authority, SHA-256 {authority.fingerprint.hex()}")
        case "export", Path() as target:
            state, authority = open_authority(state_dir)
            data = authority.to_export(_passphrase(new=True), Registry(state).content())
            _write_new(target, data)
        case "import", Path() as source:
            state = state_directory.state_dir(state_dir)
            registry = import_authority(state, _read(source), _passphrase(new=False))
            Registry(state).replace(registry)
        case _:
            raise UsageError("mtp-coord ca: write ca rotate, ca export FILE, or ca import FILE")


def _write_new(file: Path, data: bytes) -> None:
    """Write a file that only its owner can read. Raises UsageError if it exists or cannot be written."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
    except OSError as error:
        raise UsageError(
            f"{file}: cannot be written: {error.strerror}. Name another file"
        ) from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{file}: cannot be read: {error.strerror}. Name an exported file"
        ) from error


def _passphrase(*, new: bool) -> str:
    """Return the passphrase from the environment or from the terminal. Raises UsageError for a short new one."""
    text = os.environ.get(VARIABLE) or typer.prompt(
        "Passphrase", hide_input=True, confirmation_prompt=new, err=True
    )
    if new and len(text) < MIN_PASSPHRASE:
        raise UsageError(f"the passphrase is too short. Use at least {MIN_PASSPHRASE} characters")
    return str(text)
