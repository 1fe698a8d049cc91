"""The cost of moving checkpoints: bytes from a hub, bytes from the coordinator, memory of a conversion.

    python -m tests.bench.checkpoints

The checkpoint is a random raw mixture of experts in 4 files. Hub, coordinator and worker are on this machine, so bytes
are meaningful and times are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from coordinator.workers.client import WorkerClient
from coordinator.workers.weight_provider import WeightProvider
from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.remote_checkpoint import open_model
from mtp.checkpoint.hub.remote_head import RemoteHead
from proto import cluster_pb2 as pb
from proto.span import Span
from proto.terminal.size import format_size
from tests.bench.machine import about
from tests.bench.report import bars, publish
from tests.support.checkpoints import conversion_process
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.hub import Hub
from worker.node.identity import Identity
from worker.node.local_models import LocalModels
from worker.node.node import WorkerNode
from worker.node.service import make_server

REPO = "someone/some-model"
ME = pb.Coordinator(id="bench", name="bench")


@dataclass(frozen=True)
class Row:
    """`cost` bytes read, or held in memory, for an operation on `size` bytes."""

    what: str
    size: int
    cost: int
    seconds: float

    def __str__(self) -> str:
        cells = (self.what, format_size(self.size), format_size(self.cost))
        return f"| {' | '.join(cells)} | {self.cost / self.size:.3f} | {self.seconds:.2f} s |"


def largest_stack(checkpoint: Checkpoint) -> int:
    """Return the bytes of the largest stored parameter: a matrix, or all experts' matrices of one kind."""
    sources = (source for plan in checkpoint.plans.values() for source in plan.values())
    return max(sum(checkpoint.tensors[name].nbytes for name in s.stored) for s in sources)


def conversions(checkpoint: Checkpoint, folder: Path) -> list[Row]:
    """Return the peak memory of conversions, each in its own process."""
    rows = []
    for what, bits in (("convert, peak memory", 0), ("convert -q, peak memory", 4)):
        start = time.perf_counter()
        process = conversion_process.start(checkpoint.path, folder / f"out {bits}", bits=bits)
        said, error = process.communicate()
        assert process.returncode == 0, error
        seconds = time.perf_counter() - start
        rows.append(Row(what, largest_stack(checkpoint), json.loads(said)["peak"], seconds))
    return rows


def from_hub(checkpoint: Checkpoint, folder: Path, hub: Hub) -> list[Row]:
    """Return the bytes from the hub to inspect a repo and to add its head to a conversion."""
    whole = sum(info.nbytes for info in checkpoint.tensors.values())
    start = time.perf_counter()
    open_model(REPO)
    rows = [Row("inspect a repo", whole, hub.sent.total(), time.perf_counter() - start)]
    hub.sent.clear()
    lost = Checkpoint.open(folder / "out 4")
    start = time.perf_counter()
    with RemoteHead(REPO) as remote:
        addition = plan_head_addition(lost, remote.checkpoint, replace=True)
        head = remote.fetch(addition.needed, folder / "head", lambda done, total: None)
        addition.write(head)
    seconds = time.perf_counter() - start
    return [*rows, Row("add-mtp from a repo", addition.source_bytes, hub.sent.total(), seconds)]


async def spans(checkpoint: Checkpoint, hub: Hub, patch: pytest.MonkeyPatch) -> list[Row]:
    """Return the bytes that a worker of the middle quarter of the layers gets from a hub and from the coordinator."""
    quarter = checkpoint.config.num_layers // 4
    span = Span(quarter, 2 * quarter)
    size = sum(checkpoint.part_bytes()[f"layers.{layer}"] for layer in span)
    request = pb.LoadRequest(
        coordinator=ME, epoch=1, span=pb.Span(start=span.start, end=span.end), lease_ms=60_000
    )
    ref = pb.ModelRef(repo=REPO, revision=hub.repos[REPO].commit)
    ref.fingerprint = checkpoint.fingerprint()
    rows = []
    for what, share in (("a quarter from a repo", False), ("a quarter by --share-weights", True)):
        patch.setattr("huggingface_hub.constants.HF_HOME", str(checkpoint.path.parent / what))
        hub.sent.clear()
        provider = Counting(checkpoint, ref, share)
        start = time.perf_counter()
        await give(provider, request)
        sent = provider.sent + hub.sent.total()
        rows.append(Row(what, size, sent, time.perf_counter() - start))
    return rows


class Counting(WeightProvider):
    """A weight provider that counts the bytes of tensors it sends."""

    sent = 0

    async def answer_request(
        self, offer: pb.WeightsOffer, wanted: pb.WantedTensors
    ) -> AsyncIterator[pb.Weights]:
        """Count and send the reply."""
        async for message in super().answer_request(offer, wanted):
            self.sent += len(message.piece)
            yield message


async def give(provider: WeightProvider, request: pb.LoadRequest) -> None:
    """Make one Provide call over gRPC to a worker that has no weights."""
    node = WorkerNode(Identity("bench", None, 2**40, LocalModels(None)))
    server = make_server(node)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = WorkerClient(f"127.0.0.1:{port}", ME)
    try:
        await provider.provide_weights(client, request, lambda done, total: None)
    finally:
        await client.close()
        await server.stop(1.0)
        await node.close()


def main() -> None:
    """Print the table and publish the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, Hub() as hub:
        folder = Path(name)
        hub.install(patch, folder / "home")
        source = write_checkpoint(
            folder / "raw", moe=True, layers=asked.layers, hidden=asked.hidden, shards=4
        )
        hub.add(REPO, source)
        checkpoint = Checkpoint.open(source)
        size = sum(info.nbytes for info in checkpoint.tensors.values())
        print(f"{about()}; a checkpoint of {format_size(size)}\n")
        print("| | size | cost | cost / size | time |\n| --- | --- | --- | --- | --- |")
        rows = [*conversions(checkpoint, folder), *from_hub(checkpoint, folder, hub)]
        rows += asyncio.run(spans(checkpoint, hub, patch))
        print(*rows, sep="\n")
        show(rows, size)


def show(rows: Sequence[Row], size: int) -> None:
    """Publish the figures of a checkpoint of `size` bytes, and a chart of each cost."""
    figures = {"checkpoint": size, "rows": [asdict(row) for row in rows]}
    costs = {row.what: row.cost / row.size for row in rows}
    seconds = {row.what: row.seconds for row in rows}
    charts = {"cost": bars(costs, "cost / size"), "time": bars(seconds, "s")}
    publish("checkpoints", figures, charts)


if __name__ == "__main__":
    main()
