"""The provider of weights to workers that lack the files: offers of tensors, their hashes, and their bytes if shared.

Without `--share-weights` workers read the bytes from the hub, at the commit of the coordinator's copy.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial

from coordinator.pipeline.worker_client import WorkerClient
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import read_config
from mtp.checkpoint.format.shard import TensorInfo, read_file
from proto import cluster_pb2 as pb
from proto.errors import ProtocolError
from proto.span import Span
from proto.terminal.progress import OnProgress

PIECE_BYTES = 1024 * 1024
"""Bytes of one message: large enough to be efficient, small enough to let status messages pass in between."""


@dataclass
class WeightProvider:
    """The provider of the weights of `checkpoint`, which workers know as `ref`."""

    checkpoint: Checkpoint
    ref: pb.ModelRef
    share: bool
    _hashes: dict[str, bytes] = field(default_factory=dict)

    @property
    def can_provide(self) -> bool:
        """True if a worker without the files can receive them."""
        return self.share or bool(self.ref.repo and self.ref.revision)

    async def provide_weights(
        self, worker: WorkerClient, request: pb.LoadRequest, on_progress: OnProgress
    ) -> None:
        """Give `worker` the tensors that it lacks for the Load `request`. Raises the error of the call."""
        offer = self.offer(request)
        await worker.provide(offer, partial(self.answer_request, offer), on_progress)

    def offer(self, request: pb.LoadRequest) -> pb.WeightsOffer:
        """Return the offer of all tensors of a stage, part by part, in the order of their bytes in the files."""
        offer = pb.WeightsOffer(
            coordinator=request.coordinator,
            lease_ms=request.lease_ms,
            model=self.ref,
            config=json.dumps(read_config(self.checkpoint.path)),
            layout=self.checkpoint.layout,
            share=self.share,
        )
        span = Span(request.span.start, request.span.end)
        for part in self.checkpoint.stage_parts(
            span, first=request.first, last=request.last, with_head=request.mtp
        ):
            for name, info in self._tensors(part):
                offer.tensors.add(
                    name=name,
                    dtype=info.dtype,
                    shape=info.shape,
                    file=info.file.name,
                    start=info.start,
                    nbytes=info.nbytes,
                )
        return offer

    def _tensors(self, part: str) -> list[tuple[str, TensorInfo]]:
        names = self.checkpoint.tensors_of(part)
        found = [(name, self.checkpoint.tensors[name]) for name in names]
        return sorted(found, key=lambda item: (item[1].file, item[1].start))

    async def answer_request(
        self, offer: pb.WeightsOffer, wanted: pb.WantedTensors
    ) -> AsyncIterator[pb.Weights]:
        """Yield the bytes, if shared, and hash of each wanted tensor. Raises ProtocolError or CheckpointError."""
        for tensor in wanted.tensors:
            if tensor.number >= len(offer.tensors):
                raise ProtocolError(
                    f"a worker requests tensor {tensor.number}, which the offer does not have"
                )
            name = offer.tensors[tensor.number].name
            if self.share:
                pieces = _read(self.checkpoint.tensors[name], tensor.have)
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    yield pb.Weights(piece=piece)
            yield pb.Weights(sha256=await asyncio.to_thread(self._hash, name))

    def _hash(self, name: str) -> bytes:
        """Return the SHA-256 of a whole tensor, computed once for all workers."""
        if name not in self._hashes:
            digest = hashlib.sha256()
            for piece in _read(self.checkpoint.tensors[name]):
                digest.update(piece)
            self._hashes[name] = digest.digest()
        return self._hashes[name]


def _read(info: TensorInfo, skip: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a tensor from its file, without the first `skip`."""
    return read_file(info.file, info.start + skip, info.start + info.nbytes, PIECE_BYTES)
