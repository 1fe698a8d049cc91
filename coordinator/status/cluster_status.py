"""The status of a running cluster, shown by `/status`, `/metrics` and `mtp-coord status`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

LoadPhase = Literal["opening", "finishing answers", "loading", "ready", "failed"]


FINISH_SECONDS = 60.0
"""Seconds that open answers have before the model is changed."""


@dataclass(frozen=True)
class LoadReport:
    """The last change of the model. `done` of `total` bytes of the phase are processed. `error` is for people.

    Answers that are open when the new model is there have `answer_seconds` to end.
    """

    model: str
    phase: LoadPhase
    done: int = 0
    total: int = 0
    error: str = ""
    answer_seconds: float = FINISH_SECONDS

    @property
    def running(self) -> bool:
        """True until the change has ended."""
        return self.phase not in ("ready", "failed")


Health = Literal["ready", "loading", "idle", "draining", "refused", "lost"]


@dataclass(frozen=True)
class NodeStatus:
    """The status of one machine.

    `span` is inclusive, such as `0-31`, and None for a node without layers. `detail` is one line that explains why the
    node is not used. `address` is None for a stage in the coordinator's own process. Memory is in bytes. `loaded` is
    the loaded fraction of the node's weights, 0 to 1. `stage_ms` is the typical time of one decode step. `busy` is the
    fraction of the last ten seconds in which the node's stage computed, 0 to 1. Both are unset without a stage.
    `weight_bytes` and `prefix_bytes` are parts of `memory_used`; the rest are K/V, states and activations.
    `memory_cached` is held besides `memory_used`, in freed buffers. `chip` and `bytes_per_second` describe the machine
    as the worker measured it. `weights_from` names the source of the weights during a load: `disk`, `hub` or
    `coordinator`. `link_ms` and `link_bytes_per_second` are the measured time and speed of one hop to the next stage,
    or from the last stage to the coordinator. The bytes of the data plane are counters since the worker's start.
    `ready_at`, the time at which the worker joined, is seconds since 1970. `version` has the versions of the worker's
    programs. `layers` says how the layers compute, such as `48 packed`.
    """

    name: str
    address: str | None = None
    span: str | None = None
    layers: str = ""
    health: Health = "idle"
    detail: str = ""
    memory_used: int = 0
    memory_cached: int = 0
    memory_limit: int | None = None
    loaded: float | None = None
    stage_ms: float | None = None
    busy: float | None = None
    weight_bytes: int = 0
    prefix_bytes: int = 0
    chip: str = ""
    bytes_per_second: float | None = None
    pinned: str | None = None
    failure_count: int = 0
    ready_at: int | None = None
    loaded_bytes: int = 0
    load_bytes: int = 0
    weights_from: str = ""
    link_ms: float | None = None
    link_bytes_per_second: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    version: str = ""
    arithmetic: str = ""
    """Name of the machine's arithmetic. Machines with equal names round in the same way."""


@dataclass(frozen=True)
class ModelStatus:
    """The served model. `layers` has one letter per layer: `g` for GDN, `a` for attention.

    `quantization` is a short text such as `4-bit`, or empty. `context` is in tokens. `vision_bytes` are those of the
    part that reads images, 0 for a model of text, and `max_images` the most of a request.
    """

    layers: str
    has_head: bool
    context: int
    quantization: str = ""
    weight_bytes: int = 0
    vision_bytes: int = 0
    max_images: int = 0


@dataclass(frozen=True)
class PrefillStatus:
    """The progress of one prompt: `done` of `total` tokens are computed, and `seconds_left` are expected."""

    request_id: str
    done: int
    total: int
    seconds_left: float | None = None


@dataclass(frozen=True)
class ClusterStatus:
    """The cluster at one moment.

    Counts by draft position and counts of tokens run since the start and never decrease. `detail` is one line that
    explains why the cluster is not ready, or how it handles a lost worker. A limit of None means no limit. `phase` is
    the activity of the cluster's manager for `phase_seconds`, empty without one. `prompt_tokens_per_second` is the
    speed of the newest prompts, None before the first.
    """

    ready: bool
    model: str
    detail: str = ""
    epoch: int = 0
    mtp: str = "off"
    nodes: tuple[NodeStatus, ...] = ()
    running: int = 0
    running_limit: int | None = None
    waiting: int = 0
    waiting_limit: int | None = None
    kv_tokens: int = 0
    kv_limit: int | None = None
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float | None = None
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    ngram_drafted: int = 0
    ngram_accepted: int = 0
    prefilling: tuple[PrefillStatus, ...] = ()
    recoveries: int = 0
    uptime_seconds: float = 0.0
    phase: str = ""
    phase_seconds: float = 0.0
    architecture: ModelStatus | None = None
    rounding: str = ""
    """One line about machines of the plan that round differently. Empty if all round in the same way."""


class StatusSource(Protocol):
    """A provider of the live status. The server passes `LiveStatus`; tests pass a fake."""

    def status(self) -> ClusterStatus:
        """Return a snapshot. Runs on the event loop, so it must neither lock nor block."""
