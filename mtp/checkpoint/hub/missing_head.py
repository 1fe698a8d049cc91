"""A head that a checkpoint lacks: its tensors, and where to get it."""

from __future__ import annotations

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import join_names
from mtp.checkpoint.hub.resolve import snapshot_of


def missing_head_tensors(checkpoint: Checkpoint) -> str:
    """Return the missing tensors of the head, for use in a sentence."""
    missing = checkpoint.mtp.missing
    return join_names(missing) if checkpoint.mtp.present else f"all {len(missing)} mtp.* tensors"


def repair_hint(checkpoint: Checkpoint, *, replace: bool) -> str:
    """Return how to get a working head, without a full stop. `replace` is for one that is incomplete or wrong."""
    if checkpoint.layout == "raw" and replace:
        return "Download the checkpoint again, or use the one that Qwen publishes"
    path, copy = str(checkpoint.path), ""
    if checkpoint.layout == "raw":
        path, copy = "DIRECTORY", f"mtp-coord convert --hf-path {path} --mlx-path DIRECTORY, then "
    elif not checkpoint.path.is_dir() or snapshot_of(checkpoint.path):
        # Files in the hub's cache must not be changed, so the head goes into a copy.
        repo, _ = snapshot_of(checkpoint.path) or (path, "")
        path, copy = "DIRECTORY", f"hf download {repo} --local-dir DIRECTORY, then "
    flag = " --replace" if replace else ""
    return f"Run {copy}mtp-coord add-mtp{flag} --mlx-path {path} --hf-path RAW-CHECKPOINT"
