"""Options of `mtp-coord serve`, as set on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from coordinator.journal.database import Retention
from mtp.depth.controller import MtpMode
from mtp.head.draft_vocabulary import DraftVocabularySize
from proto.params import Acceptance
from proto.trust.state_dir import state_dir

DEFAULT_WAIT = 5.0
"""Seconds to look for workers when neither --wait nor --nodes is given. A local mDNS answer takes about one."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server. Times are in seconds.

    `nodes` is the number of workers the first plan needs; None accepts any number. `wait` None stands for DEFAULT_WAIT,
    or for no limit where workers are required. With `alone_ok` fewer workers than `nodes`, or none, serve after `wait`.
    `prefill_chunk` None stands for the length that suits the GPU of this machine.
    """

    model: str
    host: str
    port: int
    workers: tuple[str, ...]
    nodes: int | None
    wait: float | None
    alone_ok: bool
    auto_replan: bool
    single_node: bool
    mdns: bool
    dtype: str | None
    mtp: MtpMode
    acceptance: Acceptance
    kv_bits: int | None
    exact: bool
    draft_vocab: DraftVocabularySize
    failure_timeout: float
    max_sequences: int
    prefill_chunk: int | None
    step_tokens: int
    prefix_cache: bool
    share_weights: bool
    api_keys: tuple[str, ...] = field(repr=False)  # secrets
    allowed_origins: tuple[str, ...]
    served_names: tuple[str, ...]
    clamp_max_tokens: bool
    wired: bool
    awake: bool
    name: str
    insecure: bool = False
    join_address: tuple[str, int] | None = None
    """Address at which machines join the cluster; with None no machine can join."""
    state: Path = field(default_factory=lambda: state_dir(None))
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """The certificate and key of the HTTP server; None uses a certificate of the cluster off loopback."""
    allowed_hosts: tuple[str, ...] = ()
    auto_load: bool = False
    """Change to another model on this machine when a request names it."""
    journal: bool = True
    """Keep stored answers in the state directory, within the limits of `retention`."""
    retention: Retention = field(default_factory=Retention)
