"""A worker fetches exactly its span, and every tensor equals the coordinator's, despite interruptions."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from coordinator.cluster.served_model import WeightProvider
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.reference import ReferenceLayer
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError, ProtocolError
from proto.span import Span
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import assert_same_tensors
from tests.support.checkpoints.hub import Hub
from tests.support.checkpoints.small_disk import ClaimedFreeSpace, small_disk
from worker.fetch.fill import SpanCopy, StoppedError, fill
from worker.model.loader import load_stage

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

    def __init__(self, checkpoint: Checkpoint, *, share: bool, repo: str = "", revision: str = "") -> None:
        ref = pb.ModelRef(name="model", repo=repo, revision=revision, fingerprint=checkpoint.fingerprint())
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
    def copy(self) -> SpanCopy:
        """The copy of the worker, which must exist."""
        copy = SpanCopy.find(self.provider.ref.fingerprint)
        assert copy is not None
        return copy


def with_hub(hub: Hub, source: Path) -> Coordinator:
    """Return a coordinator whose model is on a hub, and which sends no weights itself."""
    hub.add(REPO, source)
    revision = hub.repos[REPO].commit
    return Coordinator(Checkpoint.open(source), share=False, repo=REPO, revision=revision)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate cache for every test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("mtp.checkpoint.hub.repo.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("worker.fetch.fill.BUSY_SECONDS", 0.01)
    return tmp_path / "home"


def span_bytes(checkpoint: Checkpoint, span: Span) -> int:
    last = span.end == checkpoint.config.num_layers
    parts = checkpoint.stage_parts(span, first=span.start == 0, last=last)
    return sum(checkpoint.part_bytes()[part] for part in parts)


def stage(checkpoint: Checkpoint, span: Span) -> dict[str, mx.array]:
    """Return every loaded weight of the stage."""
    last = span.end == checkpoint.config.num_layers
    modules = load_stage(checkpoint, span, first=span.start == 0, last=last, dtype=mx.float32)
    ends = [modules.embed_tokens, modules.norm, modules.lm_head, modules.head]
    layers = [cast(ReferenceLayer, layer).module for layer in modules.layers]
    found = [part and part.parameters() for part in (*layers, *ends)]
    return dict(tree_flatten([part or {} for part in found]))


def assert_loads(coordinator: Coordinator, span: Span) -> None:
    """Check that the fetched parts load as the same stage as the coordinator's copy."""
    copy = coordinator.copy.checkpoint()
    assert_same_tensors(stage(copy, span), stage(coordinator.provider.checkpoint, span))


# ---- what is fetched


@pytest.mark.parametrize("span", QUARTERS, ids=str)
@pytest.mark.parametrize("options", CHECKPOINTS, ids=repr)
def test_a_quarter_of_the_layers_is_what_comes(checkpoints: Checkpoints, options: dict[str, Any], span: Span) -> None:
    """The coordinator sends exactly the bytes of the stage, and the stage is bit-equal."""
    checkpoint = Checkpoint.open(checkpoints(**options))
    coordinator = Coordinator(checkpoint, share=True)
    assert coordinator.fill_span(span) == span_bytes(checkpoint, span)
    assert_loads(coordinator, span)
    assert coordinator.fill_span(span) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("span", QUARTERS, ids=str)
@pytest.mark.parametrize("options", CHECKPOINTS, ids=repr)
def test_from_a_hub_no_more_than_the_span_is_read(
    checkpoints: Checkpoints, hub: Hub, options: dict[str, Any], span: Span
) -> None:
    """The hub sends at most 1.1 times the bytes of the span, and the coordinator sends none."""
    coordinator = with_hub(hub, checkpoints(**options))
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


# ---- what breaks


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_broken_off_anywhere_it_goes_on(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With random interruptions every byte is sent once in total."""
    monkeypatch.setattr("coordinator.cluster.served_model.PIECE_BYTES", 5000)
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


def test_a_break_costs_what_was_under_way(checkpoints: Checkpoints, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted read from a hub continues, and complete parts have their final names."""
    monkeypatch.setattr("worker.fetch.fill.PROGRESS_SECONDS", 0.0)
    coordinator = with_hub(hub, checkpoints(shards=3))
    checkpoint = coordinator.provider.checkpoint
    coordinator.patience = 20
    with pytest.raises(BrokenOffError):
        coordinator.fill_span(Span(0, 4))
    parts = {file.name for file in (coordinator.copy.path / "parts").iterdir()}
    assert any(name.endswith(".part") for name in parts)
    whole = [name.removesuffix(".safetensors") for name in parts if name.endswith(".safetensors")]
    arrived = coordinator.progress[-1][0]
    assert arrived > sum(checkpoint.part_bytes()[part] for part in whole), "no part was begun"
    coordinator.patience = 10**9
    assert coordinator.fill_span(Span(0, 4)) == span_bytes(checkpoint, Span(0, 4)) - arrived
    # At most the rest of one request was under way when it broke off.
    assert hub.weights_sent < 1.1 * span_bytes(checkpoint, Span(0, 4)) + 300_000
    assert_loads(coordinator, Span(0, 4))


def flip_last(message: pb.Weights) -> pb.Weights:
    """Return the piece with another last byte."""
    if not message.piece:
        return message
    return pb.Weights(piece=message.piece[:-1] + bytes([message.piece[-1] ^ 1]))


def test_damage_on_the_way_is_found(checkpoints: Checkpoints) -> None:
    """A damaged tensor is an error with its name; no part gets its final name, and the next call succeeds."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.change = flip_last
    with pytest.raises(CheckpointError, match=r"the SHA-256 of tensor model\.\S+ differs"):
        coordinator.fill_span(Span(2, 4))
    assert list((coordinator.copy.path / "parts").glob("*.safetensors")) == []
    coordinator.change = lambda message: message
    coordinator.fill_span(Span(2, 4))
    assert_loads(coordinator, Span(2, 4))


def test_a_hub_with_other_bytes_is_found(checkpoints: Checkpoints, hub: Hub) -> None:
    """A hub with other content is refused by the coordinator's hash, before the rest of the span is read."""
    coordinator = with_hub(hub, checkpoints(shards=3))
    first = coordinator.offer(Span(2, 4)).tensors[0]
    hub.faults.flip[first.file] = first.start + 3
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"differs from the coordinator.*--no-share-weights"):
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
    (part,) = (coordinator.copy.path / "parts").glob("*.part")
    content = bytearray(part.read_bytes())
    content[-100] ^= 255
    part.write_bytes(content)
    coordinator.patience = 10**9
    with pytest.raises(CheckpointError, match="the SHA-256 of tensor"):
        coordinator.fill_span(Span(2, 4))
    coordinator.fill_span(Span(2, 4))
    assert_loads(coordinator, Span(2, 4))


def test_a_full_disk(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        whole = coordinator.copy.checkpoint()
        assert not whole.missing_sources("layers.0")
        assert not whole.mtp.complete


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
    "a layer number of 5,000 digits": lambda o: setattr(o.tensors[0], "name", f"model.layers.{'1' * 5000}.x.weight"),
    "a path for a tensor": lambda o: setattr(o.tensors[0], "name", "../../x"),
    "a wrong size": lambda o: setattr(o.tensors[0], "nbytes", 3),
    "an unknown type": lambda o: setattr(o.tensors[0], "dtype", "F3"),
    "a tensor twice": lambda o: o.tensors.append(o.tensors[0]),
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
    [pb.Weights(), pb.Weights(piece=b""), pb.Weights(piece=bytes(10**5)), pb.Weights(sha256=b"x")],
    ids=["nothing", "no bytes", "too many bytes", "a hash too early"],
)
def test_messages_that_make_no_sense(checkpoints: Checkpoints, message: pb.Weights) -> None:
    """An unexpected message of the coordinator ends the call."""
    coordinator = Coordinator(Checkpoint.open(checkpoints()), share=True)
    coordinator.change = lambda _: message
    with pytest.raises(ProtocolError, match="another message instead of the next bytes"):
        coordinator.fill_span(Span(2, 4))
