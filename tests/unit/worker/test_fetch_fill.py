"""A worker fetches exactly its span, and every tensor equals the coordinator's, despite interruptions."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from coordinator.workers.weight_provider import WeightProvider
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.shard import Entry, ShardWriter
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError, ClusterError, ProtocolError
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.foreign import write_foreign
from tests.support.checkpoints.hub import TOKEN, Hub
from tests.support.checkpoints.small_disk import ClaimedFreeSpace, small_disk
from worker.fetch.fill import StoppedError, fill
from worker.fetch.span_copy import SpanCopy, copies_dir
from worker.model.loader import load_stage
from worker.node.local_models import LocalModels

REPO = "someone/some-model"
CHECKPOINTS: list[dict[str, Any]] = [
    {"shards": 3, "tie": False},
    {"layout": "mlx", "quantize": 4},
    {"moe": True, "fused_experts": True, "shards": 2},
    {"moe": True, "fused_experts": False, "fused_mtp_experts": True},
]
QUARTERS = [Span(0, 2), Span(2, 4), Span(6, 8)]
Change = Callable[[pb.Weights], pb.Weights]


class BrokenOffError(Exception):
    """The coordinator has left."""


class Coordinator:
    """A provider that answers `fill` in a thread, like the coordinator. It stops after `patience` messages."""

    def __init__(
        self, checkpoint: Checkpoint, *, share: bool, repo: str = "", revision: str = ""
    ) -> None:
        ref = pb.ModelRef(
            name="model", repo=repo, revision=revision, fingerprint=checkpoint.fingerprint()
        )
        self.provider = WeightProvider(checkpoint, ref, share)
        self.patience = 10**9
        self.change: Change = lambda message: message
        self.progress: list[tuple[int, int]] = []

    def fill_span(self, span: Span, stop: threading.Event | None = None) -> int:
        offer = self.offer(span)
        coming: deque[pb.Weights] = deque()

        async def answer(wanted: pb.WantedTensors) -> list[pb.Weights]:
            return [self.change(m) async for m in self.provider.answer_request(offer, wanted)]

        def tell(reply: pb.WeightsReply) -> None:
            if reply.HasField("wanted"):
                coming.extend(asyncio.run(answer(reply.wanted)))
            else:
                self.progress.append((reply.progress.done, reply.progress.total))

        def pull() -> pb.Weights:
            self.patience -= 1
            if self.patience < 0:
                raise BrokenOffError
            return coming.popleft()

        return fill(offer, pull, tell, stop or threading.Event())

    def offer(self, span: Span) -> pb.WeightsOffer:
        request = pb.LoadRequest(
            coordinator=pb.Coordinator(id="c", name="c"),
            span=pb.Span(start=span.start, end=span.end),
            first=span.start == 0,
            last=span.end == self.provider.checkpoint.config.num_layers,
            mtp=True,
        )
        return self.provider.offer(request)

    @property
    def fingerprint(self) -> str:
        return self.provider.ref.fingerprint


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate cache for every test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("mtp.checkpoint.hub.repo.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("worker.fetch.fill.BUSY_SECONDS", 0.01)
    return tmp_path / "home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
    with Hub() as hub:
        hub.install(monkeypatch, home)
        yield hub


def span_bytes(checkpoint: Checkpoint, span: Span) -> int:
    last = span.end == checkpoint.config.num_layers
    parts = checkpoint.stage_parts(span, first=span.start == 0, last=last)
    return sum(checkpoint.part_bytes()[part] for part in parts)


def stage(checkpoint: Checkpoint, span: Span) -> dict[str, mx.array]:
    """Return every loaded weight of the stage."""
    last = span.end == checkpoint.config.num_layers
    modules = load_stage(checkpoint, span, first=span.start == 0, last=last, dtype=mx.float32)
    ends = [modules.embed_tokens, modules.norm, modules.lm_head, modules.head]
    found = [part and part.parameters() for part in (*modules.layers, *ends)]
    return dict(tree_flatten([part or {} for part in found]))


def assert_loads(coordinator: Coordinator, span: Span) -> None:
    """Check that the fetched parts load as the same stage as the coordinator's copy."""
    copy = SpanCopy.find(coordinator.fingerprint)
    assert copy is not None
    found, expected = stage(copy.checkpoint(), span), stage(coordinator.provider.checkpoint, span)
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)


# ---- what is fetched


@pytest.mark.parametrize("span", QUARTERS, ids=str)
@pytest.mark.parametrize("options", CHECKPOINTS, ids=repr)
def test_a_quarter_of_the_layers_is_what_comes(
    checkpoints: Checkpoints, options: dict[str, Any], span: Span
) -> None:
    """The coordinator sends exactly the bytes of the stage, and the stage is bit-equal."""
    checkpoint = Checkpoint.open(checkpoints(**options))
    coordinator = Coordinator(checkpoint, share=True)
    assert coordinator.fill_span(span) == span_bytes(checkpoint, span)
    assert_loads(coordinator, span)
    assert coordinator.fill_span(span) == 0


@pytest.mark.parametrize("span", QUARTERS, ids=str)
@pytest.mark.parametrize("options", CHECKPOINTS, ids=repr)
def test_from_a_hub_no_more_than_the_span_is_read(
    checkpoints: Checkpoints, hub: Hub, options: dict[str, Any], span: Span
) -> None:
    """The hub sends at most 1.1 times the bytes of the span, and the coordinator sends none."""
    source = checkpoints(**options)
    hub.add(REPO, source)
    coordinator = Coordinator(
        Checkpoint.open(source), share=False, repo=REPO, revision=hub.repos[REPO].commit
    )
    received = coordinator.fill_span(span)
    size = span_bytes(coordinator.provider.checkpoint, span)
    assert received == size
    assert size <= sum(hub.sent.values()) <= 1.1 * size
    assert_loads(coordinator, span)


def test_another_span_fetches_only_what_is_new(checkpoints: Checkpoints) -> None:
    """After a new plan a worker fetches only its new layers."""
    checkpoint = Checkpoint.open(checkpoints())
    coordinator = Coordinator(checkpoint, share=True)
    coordinator.fill_span(Span(2, 4))
    assert coordinator.fill_span(Span(3, 6)) == span_bytes(checkpoint, Span(4, 6))
    assert_loads(coordinator, Span(2, 6))


def test_a_copy_is_never_taken_for_a_checkpoint(checkpoints: Checkpoints) -> None:
    """A copy of a span is not a model; only a Load uses it."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.fill_span(Span(0, 8))
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        Checkpoint.open(copies_dir() / coordinator.fingerprint)
    models, ref = LocalModels(None), coordinator.provider.ref
    assert models.fingerprint_of(ref) == ""
    assert models.find(ref).mtp.complete
    with pytest.raises(CheckpointError, match="--share-weights"):
        models.find_whole(ref)
    with pytest.raises(CheckpointError, match="no checkpoint here is"):
        models.find(pb.ModelRef(name="other", fingerprint="0" * 64))


def test_a_part_that_is_missing_is_told_by_the_loader(checkpoints: Checkpoints) -> None:
    """A Load of layers that were not fetched names the tensor; it does not run on random weights."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.fill_span(Span(2, 4))
    copy = SpanCopy.find(coordinator.fingerprint)
    assert copy is not None
    with pytest.raises(CheckpointError, match=r"tensors \S+\.layers\.4\..* are missing"):
        stage(copy.checkpoint(), Span(2, 5))


# ---- what breaks


@pytest.mark.parametrize("seed", range(4))
def test_broken_off_anywhere_it_goes_on(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With random interruptions every byte is sent once in total."""
    monkeypatch.setattr("coordinator.workers.weight_provider.PIECE_BYTES", 5000)
    draw = random.Random(seed)
    checkpoint = Checkpoint.open(checkpoints(shards=3))
    coordinator = Coordinator(checkpoint, share=True)
    sent = 0

    def count(message: pb.Weights) -> pb.Weights:
        nonlocal sent
        sent += len(message.piece)
        return message

    coordinator.change = count
    breaks = 0
    while True:
        coordinator.patience = draw.randrange(1, 120)
        try:
            coordinator.fill_span(Span(4, 8))
            break
        except BrokenOffError:
            breaks += 1
    assert breaks > 2
    assert_loads(coordinator, Span(4, 8))
    coordinator.patience = 10**9
    assert coordinator.fill_span(Span(4, 8)) == 0


def test_a_break_costs_what_was_under_way(
    checkpoints: Checkpoints, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted read from a hub continues, and complete parts have their final names."""
    monkeypatch.setattr("worker.fetch.fill.PROGRESS_SECONDS", 0.0)
    source = checkpoints(shards=3)
    hub.add(REPO, source)
    checkpoint = Checkpoint.open(source)
    coordinator = Coordinator(checkpoint, share=False, repo=REPO, revision=hub.repos[REPO].commit)
    coordinator.patience = 20
    with pytest.raises(BrokenOffError):
        coordinator.fill_span(Span(0, 4))
    copy = SpanCopy.find(coordinator.fingerprint)
    assert copy is not None
    parts = {file.name for file in (copy.path / "parts").iterdir()}
    assert any(name.endswith(".part") for name in parts)
    whole = [name.removesuffix(".safetensors") for name in parts if name.endswith(".safetensors")]
    arrived = coordinator.progress[-1][0]
    assert arrived > sum(checkpoint.part_bytes()[part] for part in whole), "no part was begun"
    coordinator.patience = 10**9
    assert coordinator.fill_span(Span(0, 4)) == span_bytes(checkpoint, Span(0, 4)) - arrived
    # At most the rest of one request was under way when it broke off.
    assert hub.weights_sent < 1.1 * span_bytes(checkpoint, Span(0, 4)) + 300_000
    assert_loads(coordinator, Span(0, 4))


def test_progress_counts_to_the_end(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress counts bytes of the stage, never decreases, and includes those of an earlier call."""
    monkeypatch.setattr("worker.fetch.fill.PROGRESS_SECONDS", 0.0)
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.patience = 30
    with pytest.raises(BrokenOffError):
        coordinator.fill_span(Span(0, 4))
    reached = coordinator.progress[-1][0]
    coordinator.patience = 10**9
    coordinator.progress.clear()
    coordinator.fill_span(Span(0, 4))
    done = [d for d, _ in coordinator.progress]
    assert done == sorted(done)
    assert {d <= total for d, total in coordinator.progress} == {True}
    assert coordinator.progress[-1][0] == coordinator.progress[-1][1]
    assert reached > 0


def flip_last(message: pb.Weights) -> pb.Weights:
    """Return the piece with another last byte."""
    if not message.piece:
        return message
    return pb.Weights(piece=message.piece[:-1] + bytes([message.piece[-1] ^ 1]))


def test_damage_on_the_way_is_found(checkpoints: Checkpoints) -> None:
    """A damaged tensor is an error with its name; no part gets its final name, and the next call succeeds."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.change = flip_last
    with pytest.raises(CheckpointError, match=r"tensor model\..* was damaged in transfer"):
        coordinator.fill_span(Span(2, 4))
    copy = SpanCopy.find(coordinator.fingerprint)
    assert copy is not None
    assert list((copy.path / "parts").glob("*.safetensors")) == []
    coordinator.change = lambda message: message
    coordinator.fill_span(Span(2, 4))
    assert_loads(coordinator, Span(2, 4))


def test_a_hub_with_other_bytes_is_found(checkpoints: Checkpoints, hub: Hub) -> None:
    """A hub with other content is refused by the coordinator's hash, before the rest of the span is read."""
    source = checkpoints(shards=3)
    hub.add(REPO, source)
    coordinator = Coordinator(
        Checkpoint.open(source), share=False, repo=REPO, revision=hub.repos[REPO].commit
    )
    first = coordinator.offer(Span(2, 4)).tensors[0]
    hub.faults.flip[first.file] = first.start + 3
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"differs from the coordinator.*--share-weights"):
            coordinator.fill_span(Span(2, 4))
    hub.faults.flip.clear()
    coordinator.fill_span(Span(2, 4))
    assert_loads(coordinator, Span(2, 4))


def test_damage_on_the_disk_is_found(checkpoints: Checkpoints) -> None:
    """The bytes of an earlier call are hashed again, since a power failure can leave holes."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.patience = 9
    with pytest.raises(BrokenOffError):
        coordinator.fill_span(Span(2, 4))
    copy = SpanCopy.find(coordinator.fingerprint)
    assert copy is not None
    (part,) = (copy.path / "parts").glob("*.part")
    content = bytearray(part.read_bytes())
    content[-100] ^= 255
    part.write_bytes(content)
    coordinator.patience = 10**9
    with pytest.raises(CheckpointError, match="its SHA-256 differs"):
        coordinator.fill_span(Span(2, 4))
    coordinator.fill_span(Span(2, 4))
    assert_loads(coordinator, Span(2, 4))


def test_a_damaged_part_is_fetched_again(checkpoints: Checkpoints) -> None:
    """A part that is too short, as after a disk repair, is fetched again."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.fill_span(Span(2, 4))
    file = copies_dir() / coordinator.fingerprint / "parts" / "layers.3.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert (
        coordinator.fill_span(Span(2, 4))
        == coordinator.provider.checkpoint.part_bytes()["layers.3"]
    )
    assert_loads(coordinator, Span(2, 4))


def test_a_full_disk(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before anything is fetched; and when others fill it meanwhile, in the middle. With room it goes on."""
    coordinator = Coordinator(Checkpoint.open(checkpoints(tie=False)), share=True)
    with small_disk(tmp_path / "disk", "1m") as disk:
        monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(disk))
        with pytest.raises(CheckpointError, match="the disk has"):
            coordinator.fill_span(Span(0, 8))
        with monkeypatch.context() as patched:
            patched.setattr("shutil.disk_usage", lambda path: ClaimedFreeSpace())
            with pytest.raises(CheckpointError, match="the disk is full"):
                coordinator.fill_span(Span(0, 8))
        copy = SpanCopy.find(coordinator.fingerprint)
        assert copy is not None
        whole = copy.checkpoint()
        assert not whole.missing_sources("layers.0")
        assert not whole.mtp.complete


def test_a_disk_too_full_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose first bytes cannot be written is not locked, so the next call does not wait."""
    path, entries = tmp_path / "layers.0.safetensors", [Entry("a", "F32", (4,))]
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(CheckpointError, match="the disk is full"), ShardWriter(path, entries):
            pass
    with ShardWriter(path, entries) as writer:
        writer.write(bytes(16))
        writer.finish()
    assert writer.is_finished()


@pytest.mark.parametrize(
    ("gate", "offline", "message"),
    [
        ("GatedRepo", False, "accept terms.*--share-weights"),
        ("RepoNotFound", False, "not readable by you.*--share-weights"),
        (None, True, "HF_HUB_OFFLINE is set.*--share-weights"),
    ],
)
def test_a_hub_that_gives_nothing(
    checkpoints: Checkpoints,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    gate: str | None,
    offline: bool,
    message: str,
) -> None:
    """A worker that cannot read the hub reports one error with the cause and what to do."""
    hub.add(REPO, checkpoints(), gate)
    coordinator = Coordinator(
        Checkpoint.open(checkpoints()), share=False, repo=REPO, revision=hub.repos[REPO].commit
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(CheckpointError, match=message):
        coordinator.fill_span(Span(2, 4))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert coordinator.fill_span(Span(2, 4)) > 0


def test_two_workers_of_one_machine_fetch_a_part_once(checkpoints: Checkpoints) -> None:
    """Two stages that need the embedding fetch it once, and both use it."""
    checkpoint = Checkpoint.open(checkpoints())
    received: list[int] = []

    def work() -> None:
        received.append(Coordinator(checkpoint, share=True).fill_span(Span(0, 8)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sum(received) == span_bytes(checkpoint, Span(0, 8))
    assert_loads(Coordinator(checkpoint, share=True), Span(0, 8))


def test_a_part_that_another_finishes_this_moment(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that another worker completes meanwhile is not fetched again, and leaves no part file."""
    checkpoint = Checkpoint.open(checkpoints())
    assert Coordinator(checkpoint, share=True).fill_span(Span(0, 8)) > 0
    looks: Counter[Path] = Counter()
    is_finished = ShardWriter.is_finished

    def late(writer: ShardWriter) -> bool:
        """Return the state before the other worker finished, for two calls."""
        looks[writer.path] += 1
        return looks[writer.path] > 2 and is_finished(writer)

    monkeypatch.setattr(ShardWriter, "is_finished", late)
    monkeypatch.setattr(Path, "exists", lambda path, **_: True)  # as it still was
    assert Coordinator(checkpoint, share=True).fill_span(Span(0, 8)) == 0
    assert looks
    assert not [file for path in looks for file in path.parent.glob("*.part")]


def test_it_stops_when_nobody_waits(checkpoints: Checkpoints) -> None:
    """A cancelled call stops fetching."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        Coordinator(Checkpoint.open(checkpoints()), share=True).fill_span(Span(0, 8), stop)


# ---- what makes no sense


OFFERS = {
    "a path for a fingerprint": lambda o: setattr(o.model, "fingerprint", "../" * 21 + "x"),
    "no fingerprint": lambda o: setattr(o.model, "fingerprint", ""),
    "another layout": lambda o: setattr(o, "layout", "gguf"),
    "no JSON": lambda o: setattr(o, "config", "{"),
    "no object": lambda o: setattr(o, "config", "[]"),
    "another architecture": lambda o: setattr(o, "config", '{"model_type": "llama"}'),
    "an unknown tensor": lambda o: setattr(o.tensors[0], "name", "model.layers.99.x.weight"),
    "a path for a tensor": lambda o: setattr(o.tensors[0], "name", "../../x"),
    "a wrong size": lambda o: setattr(o.tensors[0], "nbytes", 3),
    "an unknown type": lambda o: setattr(o.tensors[0], "dtype", "F3"),
    "a tensor twice": lambda o: o.tensors.append(o.tensors[0]),
    "parts mixed": lambda o: o.tensors.append(o.tensors.pop(0)),
    "no hub either": lambda o: setattr(o, "share", False),
}


@pytest.mark.parametrize("change", OFFERS.values(), ids=list(OFFERS))
def test_offers_that_make_no_sense(
    checkpoints: Checkpoints, home: Path, change: Callable[[pb.WeightsOffer], object]
) -> None:
    """An invalid offer is refused before a file is created."""
    offer = Coordinator(Checkpoint.open(checkpoints()), share=True).offer(Span(2, 4))
    change(offer)
    with pytest.raises((ProtocolError, CheckpointError)):
        fill(offer, lambda: pb.Weights(), lambda reply: None, threading.Event())
    assert not home.exists()


@pytest.mark.parametrize(
    "message",
    [pb.Weights(), pb.Weights(piece=b""), pb.Weights(piece=bytes(10**6)), pb.Weights(sha256=b"x")],
    ids=["nothing", "no bytes", "too many bytes", "a hash too early"],
)
def test_messages_that_make_no_sense(checkpoints: Checkpoints, message: pb.Weights) -> None:
    """An unexpected message of the coordinator ends the call."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.change = lambda _: message
    with pytest.raises(ProtocolError, match="another message instead of the next bytes"):
        coordinator.fill_span(Span(2, 4))


def test_a_damaged_copy_says_what_to_delete(checkpoints: Checkpoints) -> None:
    """A copy with an invalid description is an error that names its directory."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.fill_span(Span(2, 4))
    about = copies_dir() / coordinator.fingerprint / "copy.json"
    about.write_text(json.dumps({"config": 3})[:-3])
    with pytest.raises(CheckpointError, match=f"{about.parent}.*Delete it"):
        SpanCopy.find(coordinator.fingerprint)


def test_a_worker_that_wants_what_was_not_offered(checkpoints: Checkpoints) -> None:
    """Without sharing, the coordinator refuses the request and reads nothing."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    offer = coordinator.offer(Span(2, 4))
    wanted = pb.WantedTensors(tensors=[pb.WantedTensor(number=10_000)])

    async def ask() -> None:
        async for _ in coordinator.provider.answer_request(offer, wanted):
            pass

    with pytest.raises(ClusterError, match="the offer does not have"):
        asyncio.run(ask())


def test_a_quarter_of_an_fp8_repo_is_repacked_from_its_own_bytes(tmp_path: Path, hub: Hub) -> None:
    """A worker reads the packed bytes of its span from the hub, and repacks them while loading.

    The quantization is in ModelOpt's own file, so the offer has to contain it.
    """
    source = write_foreign(tmp_path / "fp8", "FP8 per tensor", dtype=mx.float32, layers=8)
    config = json.loads((source / "config.json").read_text())
    beside = {"quantization": config.pop("quantization_config")}
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text(json.dumps(beside))
    hub.add(REPO, source)
    checkpoint, span = Checkpoint.open(source), Span(2, 4)
    coordinator = Coordinator(checkpoint, share=False, repo=REPO, revision=hub.repos[REPO].commit)
    parts = checkpoint.stage_parts(span, first=False, last=False)
    names = set().union(*map(checkpoint.stored_tensors, parts))
    size = sum(checkpoint.tensors[name].nbytes for name in names)
    assert coordinator.fill_span(span) == size
    assert size <= sum(hub.sent.values()) <= 1.1 * size
    assert size < 0.3 * sum(info.nbytes for info in checkpoint.tensors.values())
    assert_loads(coordinator, span)
