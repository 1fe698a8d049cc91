"""What to say of a checkpoint whose MTP head is not all there, and what to do about it."""

from __future__ import annotations

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import few
from mtp.checkpoint.hub.resolve import snapshot_of


def what_head_lacks(checkpoint: Checkpoint) -> str:
    """The tensors missing from the head, for a sentence."""
    missing = checkpoint.mtp.missing
    return few(missing) if checkpoint.mtp.present else f"all {len(missing)} mtp.* tensors"


def head_remedy(checkpoint: Checkpoint, *, replace: bool) -> str:
    """How to get a head that works: a command to be copied, or where to get a whole checkpoint. No full stop.

    `replace` is for a head that is there, in part or wrong.
    """
    if checkpoint.layout == "raw":
        return "Download the checkpoint again, or take the one Qwen publishes"
    path, copy = str(checkpoint.path), ""
    if not checkpoint.path.is_dir() or snapshot_of(checkpoint.path):
        # What the hub's cache holds is the hub's: the head goes into a copy.
        repo, _ = snapshot_of(checkpoint.path) or (path, "")
        path, copy = "DIRECTORY", f"hf download {repo} --local-dir DIRECTORY, then "
    flag = " --replace" if replace else ""
    return f"Run {copy}mtp-coord add-mtp{flag} --mlx-path {path} --hf-path RAW-CHECKPOINT"
