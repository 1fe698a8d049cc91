"""Start of a plan: every stage is loaded, then all stages are connected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable
from dataclasses import dataclass, field

from coordinator.cluster.membership import Membership
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.served import ServedModel
from coordinator.cluster.view import View
from coordinator.pipeline.remote import RemotePipeline
from coordinator.planning.capacity import Capacity
from coordinator.planning.plan import Plan, StagePlan
from coordinator.workers.client import WorkerClient
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, NotReadyError
from proto.progress import OnProgress
from proto.terminal.progress_bar import byte_bar

log = logging.getLogger(__name__)

LEASE_TIMEOUTS = 3
"""Failure timeouts without a message after which a worker ends the lease of its coordinator."""


class StartError(NotReadyError):
    """Failure to start a plan. `suspect` is the address of the worker to leave out, if one is known."""

    def __init__(self, reason: str, suspect: str | None) -> None:
        super().__init__(reason)
        self.suspect = suspect


@dataclass
class LoadState:
    """Load progress by worker address: bytes done, and bytes in total."""

    done: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes done and bytes in total, over all workers that reported progress."""
        return sum(d for d, _ in self.done.values()), sum(t for _, t in self.done.values())


class PlanStart:
    """One start of `plan` over the workers of `view`."""

    def __init__(
        self,
        plan: Plan,
        view: View,
        model: ServedModel,
        options: ManagerOptions,
        membership: Membership,
    ) -> None:
        self.plan = plan
        self.loads = LoadState()
        self.has_mtp = False
        """True once the last stage has loaded an MTP head."""
        self._members = view.members
        self._present_epoch = view.epoch
        self._model = model
        self._options = options
        self._membership = membership

    async def run(self) -> RemotePipeline:
        """Load and connect all stages, and return the pipeline.

        Raises StartError. A worker that no longer answers has been recorded as lost by then.
        """
        room = self._model.capacity(self.plan)
        workers = await self.load_stages(room)
        spans = [stage.span for stage in self.plan.stages]
        pipeline = RemotePipeline(
            workers, self.plan.epoch, room, self._options.failure_timeout, spans
        )
        ids = [self._members[worker.address].worker_id for worker in workers]
        try:
            await pipeline.open(ids)
        except ClusterError as error:
            await pipeline.close()
            await asyncio.gather(*(self._membership.probe(w.address) for w in workers))
            # If all workers are alive, the far end of the hop that failed is the suspect.
            raise StartError(str(error), pipeline.suspect) from error
        except BaseException:
            await pipeline.close()
            raise
        return pipeline

    async def load_stages(self, room: Capacity, *, ahead: bool = False) -> list[WorkerClient]:
        """Load all stages and return their workers. With `ahead` the workers keep the stages in force. See `run`."""
        workers = [self._worker(stage) for stage in self.plan.stages]
        with byte_bar(f"loading layers on {len(workers)} workers", log) as show:
            await _all(
                self._load(worker, self._request(stage, room, ahead=ahead), show)
                for worker, stage in zip(workers, self.plan.stages, strict=True)
            )
        return workers

    async def prepare_stages(self, room: Capacity, busy: Collection[str]) -> None:
        """Load all stages beside those in force. The workers at the addresses `busy` only fetch what they lack."""
        with byte_bar("loading layers beside the plan", log) as show:
            await _all(
                (self._fetch if stage.node in busy else self._load)(
                    self._worker(stage), self._request(stage, room, ahead=True), show
                )
                for stage in self.plan.stages
            )

    def _worker(self, stage: StagePlan) -> WorkerClient:
        worker = self._membership.clients.get(stage.node)
        if worker is None:
            raise StartError(f"the worker at {stage.node} is leaving", None)
        return worker

    def _request(self, stage: StagePlan, room: Capacity, *, ahead: bool) -> pb.LoadRequest:
        return pb.LoadRequest(
            coordinator=self._options.me,
            epoch=self._present_epoch if ahead else self.plan.epoch,
            model=self._model.ref,
            span=pb.Span(start=stage.span.start, end=stage.span.end),
            first=stage.first,
            last=stage.last,
            dtype=self._model.dtype or "",
            kv_bits=self._model.kv_bits,
            mtp=self._model.with_head,
            exact=self._model.exact,
            draft_vocab=self._model.draft_vocab.tokens,
            draft_vocab_auto=self._model.draft_vocab.auto,
            limits=pb.Limits(
                max_sequences=room.sequences,
                kv_tokens=room.kv_tokens,
                prefix_bytes=room.prefix_bytes,
            ),
            lease_ms=int(LEASE_TIMEOUTS * self._options.failure_timeout * 1000),
            ahead=ahead,
        )

    async def _load(self, worker: WorkerClient, request: pb.LoadRequest, show: OnProgress) -> None:
        await self._fetch(worker, request, show)
        try:
            result = await worker.load(request, self._progress_of(worker, show))
            if request.last:
                self.has_mtp = result.has_mtp
        except ClusterError as error:
            raise await self._start_error(worker, error) from error

    async def _fetch(self, worker: WorkerClient, request: pb.LoadRequest, show: OnProgress) -> None:
        """Provide the weights that the worker lacks, which it writes to its disk."""
        if self._members[worker.address].has_files:
            return
        try:
            progress = self._progress_of(worker, show)
            await self._model.provider.provide_weights(worker, request, progress)
        except ClusterError as error:
            raise await self._start_error(worker, error) from error

    def _progress_of(self, worker: WorkerClient, show: OnProgress) -> OnProgress:
        def on_progress(done: int, total: int) -> None:
            """Record and show the bytes that this worker has loaded."""
            self.loads.done[worker.address] = (done, total)
            show(*self.loads.totals)

        return on_progress

    async def _start_error(self, worker: WorkerClient, error: ClusterError) -> StartError:
        """Return the error of a worker, which is the suspect if it answers. Otherwise it is recorded as lost."""
        await self._membership.probe(worker.address)
        return StartError(str(error), worker.address)


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all of `work` concurrently. If one coroutine fails, cancel the others."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
