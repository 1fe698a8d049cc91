"""The loading of a stage from files, within the worker's memory limit and with a deadline for every part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.head.attention import KVFormat
from proto import cluster_pb2 as pb
from proto.errors import MemoryLimitError
from proto.progress import OnProgress
from worker.engine.apple_gpu import warn_of_emulated_bfloat16
from worker.engine.memory import release_weights, trim_allocator, wire_weights
from worker.engine.warm_up import warm_up_steps
from worker.model.loader import DTYPES, StageSpec, load_steps, run_steps
from worker.model.stage import Stage
from worker.node.identity import Identity
from worker.node.stage_key import StageKey

log = logging.getLogger(__name__)

PART_SECONDS = 10.0
PROBE_SECONDS = 600.0
"""Seconds. Bound of the check of `--exact`. On CUDA it compiles each kernel of a quantization for up to a minute."""

SLOWEST_DISK = 50e6
"""Bytes per second of a slow network disk. It extends PART_SECONDS, the deadline of one part, by the part's size."""


def part_seconds(largest: int) -> float:
    """Return the seconds that one part may take when the largest part has `largest` bytes."""
    return PART_SECONDS + largest / SLOWEST_DISK


@dataclass(frozen=True)
class LoadedStage:
    """A stage in memory. `weight_bytes` is the size of its weights in the files."""

    key: StageKey
    stage: Stage
    weight_bytes: int


def read_stage(
    identity: Identity,
    model: pb.ModelRef,
    key: StageKey,
    *,
    expect: Callable[[float], None],
    on_progress: OnProgress,
) -> LoadedStage:
    """Return the stage `key` with its weights. Runs on the engine thread.

    `expect(seconds)` sets the deadline of the thread's watchdog for the next part. Raises MemoryLimitError before
    reading anything if the weights exceed the memory limit, and CheckpointError for a missing or incomplete checkpoint.
    """
    expect(PART_SECONDS)
    release_weights()
    checkpoint = identity.models.find(model)
    return run_steps(stage_steps(identity, checkpoint, key, expect=expect, on_progress=on_progress))


def stage_steps(
    identity: Identity,
    checkpoint: Checkpoint,
    key: StageKey,
    *,
    expect: Callable[[float], None],
    on_progress: OnProgress,
    beside: bool = False,
) -> Generator[str, None, LoadedStage]:
    """Read a stage like `read_stage`, in short steps. Yield the part that the next step reads, or an empty string.

    With `beside` another stage stays in memory, and the weights are not wired.
    """
    sizes = checkpoint.part_bytes()
    parts = checkpoint.stage_parts(key.span, first=key.first, last=key.last, with_head=key.mtp)
    weight_bytes = sum(sizes[part] for part in parts)
    used = mx.get_active_memory() if beside else 0
    if used + weight_bytes > identity.memory_limit:
        present = f" beside {used:,} bytes in use" if beside else ""
        raise MemoryLimitError(
            f"worker {identity.name}: layers {key.span} take {weight_bytes:,} bytes{present}, which exceeds its memory "
            f"limit of {identity.memory_limit:,}"
        )
    seconds = part_seconds(max(sizes[part] for part in parts))

    def report(done: int, total: int) -> None:
        """Extend the deadline and report the progress."""
        expect(seconds)
        on_progress(done, total)

    dtype = DTYPES[key.dtype] if key.dtype else None
    spec = StageSpec(key.span, key.first, key.last, dtype, with_head=key.mtp)
    modules = yield from load_steps(checkpoint, spec, report)
    if key.last and key.mtp and modules.head is None and checkpoint.mtp.announced:
        log.warning(
            "no MTP: config.json announces a head, but tensors of it are missing",
            extra={"checkpoint": checkpoint.path.name, "missing": len(checkpoint.mtp.missing)},
        )
    if not beside:
        wire_weights(wanted=identity.wired)
    kv_format = KVFormat.of(checkpoint.config.head_dim, key.kv_bits or None)
    if key.exact:
        expect(PROBE_SECONDS)
    stage = Stage(modules, kv_format, exact=key.exact, draft_vocab=key.draft_vocab)
    warn_of_emulated_bfloat16(stage.dtype)
    for _ in warm_up_steps(stage, first=key.first, last=key.last, expect=expect):
        yield ""
    trim_allocator()
    return LoadedStage(key, stage, weight_bytes)


def adopt_stage(loaded: LoadedStage, *, wired: bool) -> LoadedStage:
    """Wire the weights of a stage that was loaded beside another one, which is gone. Runs on the engine thread."""
    release_weights()
    wire_weights(wanted=wired)
    return loaded
