"""The options of `mtp-coord serve`, and those that other commands share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from coordinator.drafts.controller import MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.planning.capacity import DEFAULT_SEQUENCES
from coordinator.planning.groups import MAX_GROUP, Parallel
from coordinator.trust.keys import API_KEY
from mtp.checkpoint.hub.resolve import BUILTIN
from mtp.head.draft_vocabulary import DraftVocabulary
from proto import state_dir
from proto.announcement import is_loopback, parse_address
from proto.errors import UsageError
from proto.images import MAX_IMAGES, VisionMode
from proto.kernels import Kernels
from proto.params import Acceptance
from proto.span import Span
from proto.terminal.logs import LogFormat, LogLevel
from proto.terminal.options import KernelsOption, LogFileOption, LogFormatOption, LogLevelOption, Parsed, StateOption
from proto.terminal.progress import parse_size

DEFAULT_WAIT = 5.0
"""Seconds to look for workers when neither --wait nor --nodes is given. A local mDNS answer takes about one."""

JOIN_PORT = 50504
"""Default port of --listen."""

ONE_PIPELINE = Parallel()
AUTO = MtpMode()
ALL_TOKENS = DraftVocabulary()


ModelOption = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A short name such as qwen3.6:27b, a hub repo, a directory, or 'builtin'.",
        show_default=False,
    ),
    typer.Option("--model", metavar="MODEL", help="The same, as an option."),
]
ExactOption = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Compute every token with the same arithmetic, so that drafts, other requests and the number of equal "
        "machines never change an answer. Costs speed on GPUs, most of it for long prompts.",
    ),
]
AcceptanceOption = Annotated[
    Acceptance,
    typer.Option(
        help="How drafts are judged. With ratio slightly more of them are accepted when sampling, but an answer then "
        "depends on the drafts too: the same seed can give another one, equally distributed."
    ),
]
DraftVocabOption = Annotated[
    DraftVocabulary,
    typer.Option(
        metavar="N|auto|FILE",
        help="Draft only the N most frequent tokens of the tokenizer, or those of a file of token ids. A draft then "
        "reads fewer rows of lm_head, of which the last stage keeps a copy. auto takes two fifths. It never changes "
        "an answer.  [default: off]",
        show_default=False,
    ),
    Parsed(DraftVocabulary.parse),
]
SlicesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_GROUP,
        help="With --exact: compute every layer in N slices, so that an answer is the same in groups of any size that "
        "divides N. The default is the size of the group that --parallel names.",
    ),
]
MtpOption = Annotated[
    MtpMode,
    typer.Option(
        help="How many tokens to draft: auto, off, a number, or filled (several windows in flight). Leave it at auto."
    ),
    Parsed(MtpMode.parse),
]
NgramOption = Annotated[NgramMode, typer.Option(help="Draft repeated text from the prompt itself, where that pays.")]
ParallelOption = Annotated[
    Parallel,
    typer.Option(
        metavar="auto|pipeline|tensor|GxN",
        help="How machines share the model: its layers one after another, every layer in one group, or G groups of N "
        "machines. auto takes the fastest for one stream.",
    ),
    Parsed(Parallel.parse),
]
DtypeOption = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    typer.Option(help="Compute in this type instead of the stored one."),
]
KvBitsOption = Annotated[int | None, typer.Option(help="Quantize keys and values."), Parsed(int, Literal["4", "8"])]
WorkersOption = Annotated[
    tuple[str, ...],
    typer.Option(metavar="HOST:PORT", help="A worker besides those mDNS finds; repeatable."),
]
NoMdnsOption = Annotated[bool, typer.Option("--no-mdns", help="Use only those of --worker.")]


def check_drafts(mtp: MtpMode, acceptance: Acceptance, draft_vocab: DraftVocabulary, exact: bool) -> None:
    """Raise UsageError for options of drafts that do not go together."""
    if draft_vocab and mtp.depth == 0:
        raise UsageError("--draft-vocab is for drafts, and --mtp off has none. Leave one out")
    if exact and acceptance == "ratio":
        raise UsageError(
            "--acceptance ratio with --exact: its tokens depend on the drafts, which --exact rules out. Leave one out"
        )


@dataclass(frozen=True)
class ServeOptions:
    """The flags of `mtp-coord serve`. Times are in seconds, sizes in bytes."""

    model: ModelOption = BUILTIN
    host: Annotated[str, typer.Option(help="Address for HTTP.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for HTTP; 0 chooses a free one.")] = 8080
    worker: WorkersOption = ()
    nodes: Annotated[int | None, typer.Option(min=1, help="Wait for this many workers before the first plan.")] = None
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds to look for workers; afterwards those that joined serve, or this process alone. With "
            f"--nodes, too few workers are then an error.  [default: {DEFAULT_WAIT:g}; no limit with --nodes]",
            show_default=False,
        ),
    ] = None
    alone_ok: Annotated[
        bool,
        typer.Option("--alone-ok", help="Serve with fewer than --nodes, or alone, after --wait."),
    ] = False
    parallel: ParallelOption = ONE_PIPELINE
    single_node: Annotated[bool, typer.Option("--single-node", help="Use no worker: serve in this process.")] = False
    no_mdns: NoMdnsOption = False
    own_worker: Annotated[
        bool,
        typer.Option(
            "--own-worker",
            help="Start a worker on this machine too, which counts like any other. With --nodes above 1, other "
            "machines join by the line that is printed.",
        ),
    ] = False
    own_layers: Annotated[
        Span | None,
        typer.Option(metavar="A-B", help="Layers of the own worker, both included."),
        Parsed(Span.parse),
    ] = None
    dtype: DtypeOption = None
    mtp: MtpOption = AUTO
    ngram: NgramOption = NgramMode.auto
    acceptance: AcceptanceOption = "match"
    draft_vocab: DraftVocabOption = ALL_TOKENS
    fetch_head: Annotated[
        bool,
        typer.Option(
            "--fetch-head",
            help="If the checkpoint lost its MTP head, as most conversions for MLX, download the head alone from the "
            "model that its card names. On a terminal you are asked.",
        ),
    ] = False
    kv_bits: KvBitsOption = None
    exact: ExactOption = False
    slices: SlicesOption = None
    max_sequences: Annotated[int, typer.Option(min=1, max=256, help="Most requests served at once; others queue.")] = (
        DEFAULT_SEQUENCES
    )
    no_prefix_cache: Annotated[
        bool,
        typer.Option("--no-prefix-cache", help="Keep no state of prompts for later ones that begin the same."),
    ] = False
    prefix_disk: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            help="Keep the state of prompts on disk, such as 100GB, over restarts. Workers have the same flag. When "
            "the limit is reached, the least recently used prompts are deleted.",
        ),
        Parsed(parse_size),
    ] = None
    backup_memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for the states of running answers, so that the loss of a worker costs them little. An "
            "answer whose state is larger is computed again.  [default: 1/16 of this machine's memory]",
            show_default=False,
        ),
        Parsed(parse_size),
    ] = None
    vision: Annotated[
        VisionMode,
        typer.Option(help="Read the part for images when the first one comes, at the start, or never."),
    ] = VisionMode.auto
    embeddings: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Serve the embeddings of this model too, such as Qwen/Qwen3-Embedding-0.6B, from a process beside the "
            "server.",
        ),
    ] = None
    max_images: Annotated[int, typer.Option(min=0, max=MAX_IMAGES, help="Most images of one request.")] = 32
    share_weights: Annotated[
        bool,
        typer.Option(
            "--share-weights/--no-share-weights",
            help="Send workers that lack the model's files their layers from here, or let them read those of a hub "
            "repo from the hub.",
        ),
    ] = True
    failure_timeout: Annotated[
        float, typer.Option(min=0.2, help="Seconds of silence after which a worker counts as lost.")
    ] = 3.0
    api_key: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="KEY",
            envvar=API_KEY,
            help="Answer only who sends this key, or another one given; repeatable. The variable takes several, "
            "with spaces between, and is not seen in a list of processes.",
        ),
    ] = field(default=(), repr=False)
    allowed_origins: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="ORIGIN",
            help="A web page's origin, as https://chat.example, that may call from a browser, or '*' for any; "
            "repeatable.",
        ),
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...],
        typer.Option(metavar="NAME", help="Another name of the model, for clients with a hard-coded one; repeatable."),
    ] = ()
    strict_names: Annotated[
        bool,
        typer.Option(
            "--strict-names",
            help="Refuse requests for other models. Without it the served model answers under any name.",
        ),
    ] = False
    clamp_max_tokens: Annotated[
        bool,
        typer.Option(
            "--clamp-max-tokens",
            help="Lower a request's max_tokens to the room left instead of rejecting the request.",
        ),
    ] = False
    allow_sleep: Annotated[bool, typer.Option("--allow-sleep", help="Let a Mac fall asleep while it serves.")] = False
    kernels: KernelsOption = Kernels.auto
    no_wired_memory: Annotated[
        bool,
        typer.Option(
            "--no-wired-memory",
            help="Let macOS page the weights of this process out. The default on machines of 16 GB and less.",
        ),
    ] = False
    listen: Annotated[
        tuple[str, int] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where other machines join this cluster by a token (mtp-coord token create). The first start makes "
            "the cluster's certificate authority.",
        ),
        Parsed(partial(parse_address, "--listen", default_port=JOIN_PORT)),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate of the HTTP server (PEM). Off loopback the default is one of the cluster."),
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key of --tls-cert (PEM).")] = None
    allowed_host: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="NAME",
            help="A name of this server that clients may use besides its addresses and host name; repeatable.",
        ),
    ] = ()
    state_dir: StateOption = None
    no_journal: Annotated[
        bool,
        typer.Option(
            "--no-journal",
            help="Keep stored answers in memory only. Without it they are kept in the state directory and continue "
            "after a restart.",
        ),
    ] = False
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Serve --host without TLS and keys, and use any worker on the network without encryption.",
        ),
    ] = False
    log_level: LogLevelOption = LogLevel.info
    log_file: LogFileOption = None
    log_format: LogFormatOption = LogFormat.text

    @property
    def state(self) -> Path:
        """The state directory."""
        return state_dir.state_dir(self.state_dir)

    @property
    def required_nodes(self) -> int | None:
        """The number of workers that the first plan needs; None accepts any number."""
        return self.nodes or self.parallel.machines

    @property
    def layer_slices(self) -> int:
        """The number of slices in which every layer is computed. Raises UsageError if --slices does not suit."""
        size = self.parallel.size or min(self.nodes or 0, MAX_GROUP)
        slices = self.slices or size
        if not self.exact:
            if self.slices is not None:
                raise UsageError(f"--slices {self.slices} is a part of --exact. Add --exact")
            return 1
        if not slices or (self.parallel.auto and self.slices is None):
            raise UsageError(
                f"--parallel {self.parallel} with --exact needs --slices N: groups of every size that divides N then "
                "give the same answers"
            )
        if self.parallel.size and slices % size:
            raise UsageError(f"--slices {slices} cannot be shared by groups of {size}. Use a multiple of {size}")
        return slices

    @property
    def is_open(self) -> bool:
        """True if clients need no key."""
        return self.insecure or is_loopback(self.host)

    def check(self) -> None:
        """Raise UsageError for flags that do not go together."""
        shared = self.parallel.auto or self.parallel.size != 1
        machines = self.parallel.machines
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together. Give both, or neither")
        if shared and self.single_node:
            raise UsageError(f"--parallel {self.parallel} shares layers between workers. Leave out --single-node")
        if shared and self.nodes is not None and machines not in (None, self.nodes):
            raise UsageError(f"--parallel {self.parallel} needs {machines} machines, and --nodes is {self.nodes}")
        if self.single_node and (self.worker or self.nodes or self.own_worker):
            raise UsageError("--single-node uses no worker. Leave out --worker, --own-worker and --nodes")
        if self.own_layers and not self.own_worker:
            raise UsageError("--own-layers are those of --own-worker. Add --own-worker")
        if self.alone_ok and self.required_nodes is None:
            raise UsageError("--alone-ok needs --nodes. Without it, serving alone is allowed")
        if self.prefix_disk is not None and self.no_prefix_cache:
            raise UsageError("--prefix-disk keeps prefixes on disk. Leave out --no-prefix-cache")
        if any(not key.strip() for key in self.api_key):
            raise UsageError("--api-key: an empty key would let everybody in")
        check_drafts(self.mtp, self.acceptance, self.draft_vocab, self.exact)
        _ = self.layer_slices
