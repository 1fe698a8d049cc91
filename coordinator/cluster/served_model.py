"""The model that a cluster serves, with the options of every Load request, and its weights for workers without files.

Workers get offers of tensors, their hashes and their bytes. With `--no-share-weights` they read the bytes from the hub,
at the commit of the coordinator's copy.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from coordinator.cluster.view import Member
from coordinator.pipeline.worker_client import WorkerClient
from coordinator.planning.capacity import Capacity, plan_capacity
from coordinator.planning.chips import layer_seconds
from coordinator.planning.groups import Machine, Parallel, Planning, choose_plan
from coordinator.planning.plan import NodeSpec, Plan
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import read_config
from mtp.checkpoint.format.shard import TensorInfo, read_file
from proto import cluster_pb2 as pb
from proto.errors import ProtocolError
from proto.span import Span
from proto.stage_options import StageOptions
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
    def problem(self) -> str:
        """The reason why a worker without the files cannot receive them, or an empty string."""
        if self.checkpoint.is_raw:
            return (
                "has no copy of the model, whose tensors are those of the publisher, and a stage cannot be read from a "
                "part of them. Start it with --model, or convert the model once with mtp-coord convert"
            )
        if self.share or (self.ref.repo and self.ref.revision):
            return ""
        return "has no copy of the model. Start it with --model, or serve without --no-share-weights"

    async def provide_weights(self, worker: WorkerClient, request: pb.LoadRequest, on_progress: OnProgress) -> None:
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
        for part in self.checkpoint.stage_parts(span, first=request.first, last=request.last, with_head=request.mtp):
            for name, info in self._tensors(part):
                offer.tensors.add(
                    name=name,
                    dtype=info.dtype,
                    shape=info.shape,
                    file=self.checkpoint.file_name(info),
                    start=info.start,
                    nbytes=info.nbytes,
                )
        return offer

    def _tensors(self, part: str) -> list[tuple[str, TensorInfo]]:
        names = self.checkpoint.tensors_of(part)
        found = [(name, self.checkpoint.tensors[name]) for name in names]
        return sorted(found, key=lambda item: (item[1].file, item[1].start))

    async def answer_request(self, offer: pb.WeightsOffer, wanted: pb.WantedTensors) -> AsyncIterator[pb.Weights]:
        """Yield the bytes, if shared, and hash of each wanted tensor. Raises ProtocolError or CheckpointError."""
        for tensor in wanted.tensors:
            if tensor.number >= len(offer.tensors):
                raise ProtocolError(f"a worker requests tensor {tensor.number}, which the offer does not have")
            name = offer.tensors[tensor.number].name
            self.checkpoint.check_file(self.checkpoint.tensors[name].file)
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


SMALLEST_CONTEXT = 4096
"""Tokens of K/V that every plan must have room for. A shorter context is of little use to clients."""


@dataclass(frozen=True)
class ServedModel:
    """One checkpoint and its load options.

    `ref` identifies the checkpoint to workers.
    """

    checkpoint: Checkpoint
    ref: pb.ModelRef
    options: StageOptions
    draft_depth: int
    max_sequences: int
    prefix_cache: bool = True
    share_weights: bool = False
    parallel: Parallel = field(default_factory=Parallel)
    fixed_depth: int | None = None
    """The drafts of every window where --mtp fixes them."""

    @cached_property
    def provider(self) -> WeightProvider:
        """Source of weights for workers that lack the checkpoint's files."""
        return WeightProvider(self.checkpoint, self.ref, self.share_weights)

    @cached_property
    def planning(self) -> Planning:
        """The costs of a member of each size of a group, and what every plan must have room for."""
        o = self.options
        return Planning.of(
            self.checkpoint,
            SMALLEST_CONTEXT,
            draft_depth=self.draft_depth,
            parallel=self.parallel,
            slices=o.slices if o.exact else None,
            depth=self.fixed_depth,
            dtype=o.dtype,
            kv_bits=o.kv_bits,
            with_head=o.with_head,
            draft_vocab=o.draft_vocab,
        )

    def planner(self) -> Callable[[Sequence[Member], int], Plan]:
        """Return a function from members and an epoch to a plan, whose stages name members by address."""
        planning = self.planning

        def plan(members: Sequence[Member], epoch: int) -> Plan:
            speeds = _speeds(members)
            specs = [
                NodeSpec(m.address, m.memory_limit, speeds[m.address], m.pinned, layer_seconds(m.chip), m.blocks)
                for m in members
            ]
            machines = [
                Machine(spec, kind=m.arithmetic, direct=m.direct, collectives=m.collectives)
                for spec, m in zip(specs, members, strict=True)
            ]
            return choose_plan(planning, machines, epoch)

        return plan

    def capacity(self, plan: Plan) -> Capacity:
        """Return the room of the plan's stages. Raises MemoryLimitError if one sequence does not fit."""
        costs, context = self.planning.costs_of(plan.group_size), self.checkpoint.config.max_positions
        return plan_capacity(costs, plan.stages, context, self.max_sequences, self.prefix_cache)


def _speeds(members: Sequence[Member]) -> dict[str, float]:
    """Return the speeds by address, the best measurement of each chip, because the others were disturbed."""
    best: dict[str, float] = {}
    for member in members:
        best[member.chip] = max(member.speed, best.get(member.chip, 0.0))
    return {m.address: best[m.chip] if m.chip else m.speed for m in members}
