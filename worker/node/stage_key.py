"""The key of a loaded stage. Weights need no second load when the key does not change."""

from __future__ import annotations

from dataclasses import dataclass

from mtp.head.draft_vocabulary import DraftVocabularySize
from proto import cluster_pb2 as pb
from proto.dtype import DTYPE_BYTES
from proto.errors import UsageError
from proto.span import Span

KV_BITS = (0, 4, 8)


@dataclass(frozen=True)
class StageKey:
    """The stage of a Load request, without the epoch and the budgets."""

    fingerprint: str
    span: Span
    first: bool
    last: bool
    dtype: str
    kv_bits: int
    mtp: bool
    exact: bool
    draft_vocab: DraftVocabularySize

    @classmethod
    def of(cls, request: pb.LoadRequest) -> StageKey:
        """Return the key of a request. Raises SpanError or UsageError for invalid values."""
        if request.kv_bits not in KV_BITS:
            raise UsageError(f"--kv-bits {request.kv_bits}: choose 4 or 8")
        if request.dtype and request.dtype not in DTYPE_BYTES:
            raise UsageError(f"--dtype {request.dtype:.20}: choose {', '.join(DTYPE_BYTES)}")
        return cls(
            fingerprint=request.model.fingerprint,
            span=Span(request.span.start, request.span.end),
            first=request.first,
            last=request.last,
            dtype=request.dtype,
            kv_bits=request.kv_bits,
            mtp=request.mtp,
            exact=request.exact,
            draft_vocab=DraftVocabularySize(request.draft_vocab, request.draft_vocab_auto),
        )
