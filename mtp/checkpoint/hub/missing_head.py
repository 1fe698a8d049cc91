"""A head that a checkpoint lacks: its tensors, the model that has it, and a copy of the checkpoint with the head.

The copy has links to the checkpoint's files, whose content never changes, and a config.json and an index of its own.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

from mtp.checkpoint.convert.add_head import HeadAddition, plan_head_addition
from mtp.checkpoint.convert.foreign import plan_packed
from mtp.checkpoint.format.checkpoint import INDEX, Checkpoint
from mtp.checkpoint.format.names import join_names
from mtp.checkpoint.hub.remote_checkpoint import fetch_head, open_remote
from mtp.checkpoint.hub.repo import HubRepo
from mtp.checkpoint.hub.resolve import snapshot_of
from proto.errors import CheckpointError, ClusterError
from proto.terminal.progress import OnProgress

log = logging.getLogger(__name__)

CARD = "README.md"

MAX_PARENTS = 4
"""Cards that are read in a row. A conversion of a conversion has two."""


def missing_head_tensors(checkpoint: Checkpoint) -> str:
    """Return the missing tensors of the head, for use in a sentence."""
    if checkpoint.config.shape.head is None:
        return "the whole head, which this family does not have"
    missing = checkpoint.mtp.missing
    return join_names(missing) if checkpoint.mtp.present else f"all {len(missing)} mtp.* tensors"


def repair_hint(checkpoint: Checkpoint, *, replace: bool) -> str:
    """Return how to get a working head, without a full stop. `replace` is for one that is incomplete or wrong."""
    if checkpoint.config.shape.head is None:
        return "No head can be added to this family"
    if checkpoint.layout == "raw" and replace:
        return "Download the checkpoint again, or use the one of its publisher"
    path, copy = str(checkpoint.path), ""
    if checkpoint.layout == "raw":
        path, copy = "DIRECTORY", f"mtp-coord convert --hf-path {path} --mlx-path DIRECTORY, then "
    elif not checkpoint.path.is_dir() or snapshot_of(checkpoint.path):
        # Files in the hub's cache must not be changed, so the head goes into a copy.
        repo, _ = snapshot_of(checkpoint.path) or (path, "")
        path, copy = "DIRECTORY", f"hf download {repo} --local-dir DIRECTORY, then "
    flag = " --replace" if replace else ""
    return f"Run {copy}mtp-coord add-mtp{flag} --mlx-path {path} --hf-path RAW-CHECKPOINT"


def with_fetched_head(path: Path) -> Path:
    """Return the copy with a head that `fetch_missing_head` made of the checkpoint in `path`; else `path`."""
    with suppress(CheckpointError):  # the one who opens it says what is wrong
        checkpoint = Checkpoint.open(path)
        if not checkpoint.mtp.complete and (copy := _copy_of(checkpoint)).is_dir():
            return copy
    return path


def fetch_missing_head(path: Path, on_progress: OnProgress) -> Path:
    """Return a copy of the checkpoint in `path` that has its head, downloaded from the base model that its card names.

    Only the bytes of the head are downloaded. They get the quantization of the checkpoint. Raises CheckpointError
    without one, and the errors of `plan_head_addition`.
    """
    checkpoint = Checkpoint.open(path)
    copy = _copy_of(checkpoint)
    part = copy.with_suffix(".part")
    try:
        part.mkdir(parents=True, exist_ok=True)
        for file in path.iterdir():
            place = part / file.name
            if file.name in ("config.json", INDEX):
                shutil.copyfile(file, place)
            elif not place.is_symlink():
                place.symlink_to(file.resolve())
    except OSError as error:
        raise CheckpointError(f"{part}: cannot be written: {error.strerror}") from error
    target = Checkpoint.open(part)
    with HubRepo(base_model(path)) as hub:
        add_head_from(hub, target, on_progress, replace=target.mtp.present)
    try:
        os.replace(part, copy)
    except OSError as error:
        if not copy.is_dir():  # another start was faster
            raise CheckpointError(f"{copy}: cannot be written: {error.strerror}") from error
    return copy


def fetched_if_possible(path: Path, on_progress: OnProgress) -> Path:
    """Return a copy of the checkpoint in `path` with its head. If it cannot be fetched, warn and return `path`."""
    checkpoint = Checkpoint.open(path)
    if checkpoint.mtp.complete or checkpoint.config.shape.head is None:
        return path
    try:
        return fetch_missing_head(path, on_progress)
    except ClusterError as error:
        log.warning("the MTP head was not fetched", extra={"error": str(error)})
        return path


def add_head_from(
    hub: HubRepo, target: Checkpoint, on_progress: OnProgress, *, replace: bool = False
) -> tuple[HeadAddition, int]:
    """Add the head of the model in `hub` to `target`. Return the addition, and the bytes that were downloaded.

    Raises the errors of `plan_head_addition` and of the download.
    """
    head = plan_packed(open_remote(hub, only_head=True))
    addition = plan_head_addition(target, head, replace=replace)
    directory = target.path / DOWNLOADS
    source = fetch_head(hub, head, addition.needed, directory, on_progress, beside=addition.nbytes)
    addition.write(source)
    shutil.rmtree(directory)
    return addition, sum(head.tensors[name].nbytes for name in addition.needed)


DOWNLOADS = "mtp-source"
"""Directory inside the checkpoint for downloaded files. It is removed when the head is added."""


def base_model(path: Path) -> str:
    """Return the repo with a complete head from which the checkpoint in `path` was converted, by the cards of both.

    A card may name another conversion, which lacks the head too, so parents are followed. Raises CheckpointError where
    no card names one.
    """
    card = (path / CARD).read_bytes() if (path / CARD).is_file() else None
    if card is None and (snapshot := snapshot_of(path)):
        with HubRepo(*snapshot) as hub:
            card = hub.read(CARD)
    for _ in range(MAX_PARENTS):
        if (parent := _parent(card)) is None:
            break
        with HubRepo(parent) as hub:
            if open_remote(hub, only_head=True).mtp.complete:
                return parent
            card = hub.read(CARD)
    raise CheckpointError(
        f"{path}: its model card names no base model that has an MTP head. Use mtp-coord add-mtp with the checkpoint "
        "from which this one was converted"
    )


def _parent(card: bytes | None) -> str | None:
    """Return the `base_model` of a card, the first of several."""
    if card is None:
        return None
    from huggingface_hub import ModelCard  # a tenth of a second, which few commands need

    try:
        data = ModelCard(card.decode(errors="replace"), ignore_metadata_errors=True).data
    except ValueError:
        return None
    found = data.get("base_model")
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, str) and first.count("/") == 1 else None


def _copy_of(checkpoint: Checkpoint) -> Path:
    return Path(constants.HF_HOME) / "mtp-cluster" / "heads" / checkpoint.fingerprint()
