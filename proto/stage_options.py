"""The options with which a stage is loaded: those of the model, also on the wire, and those of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proto import cluster_pb2 as pb
from proto.errors import UsageError
from proto.kernels import Kernels
from proto.wire import DTYPE_BYTES


@dataclass(frozen=True)
class StageOptions:
    """The options of a model. `dtype` None keeps stored types; `kv_bits` None leaves keys and values unquantized.

    `with_head` loads the MTP head, if the checkpoint has one. With `exact` a row has the same bits with any rows beside
    it, on any number of equal machines, also in groups of a size that divides `slices`. The head drafts the tokens of
    the bitmap `draft_vocab`.
    """

    dtype: str | None = None
    kv_bits: int | None = None
    with_head: bool = True
    exact: bool = False
    slices: int = 1
    draft_vocab: bytes = b""

    @classmethod
    def from_request(cls, request: pb.LoadRequest) -> StageOptions:
        """Return the options of `request`. Raises UsageError for invalid ones."""
        if request.kv_bits not in (0, 4, 8) or request.dtype not in ("", *DTYPE_BYTES):
            raise UsageError(
                f"--kv-bits {request.kv_bits} with --dtype {request.dtype:.20}: choose 4 or 8, and one of "
                f"{', '.join(DTYPE_BYTES)}"
            )
        own = request.dtype or None, request.kv_bits or None, request.mtp, request.exact, request.slices or 1
        return cls(*own, request.draft_vocab)

    def write_to(self, request: pb.LoadRequest) -> None:
        """Write the options into `request`, whose stage has the head if it is the last one."""
        request.dtype, request.kv_bits = self.dtype or "", self.kv_bits or 0
        request.mtp, request.exact, request.slices = self.with_head, self.exact, self.slices
        request.draft_vocab = self.draft_vocab if request.last else b""


@dataclass(frozen=True)
class MachineOptions:
    """The options of a machine. Weights are pageable if not `wired`. The directory `state` keeps trials of kernels."""

    wired: bool = True
    kernels: Kernels = Kernels.auto
    state: Path | None = None
