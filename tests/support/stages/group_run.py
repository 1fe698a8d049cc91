"""A whole model as one stage of a group of processes over MLX's ring, and the same model in one process.

Every member computes the same frames. The frames follow from the outcomes, which are equal on all members.
`python -m tests.support.stages.group_run RANK` is one member, which reads its work from stdin.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.layer import KVFormat
from proto.backup import LayerState, by_layer
from proto.frame import Admit, BackUp, Commit, Frame, RestoreBackup, Segment
from proto.frame_stamps import FrameStamps, StageStep
from proto.params import SamplingParams
from proto.span import Span
from worker.engine.frame_engine import BegunFrame, FrameEngine
from worker.engine.group import GroupSpec, join_group
from worker.engine.stage_backups import ReceivedBackup, layer_states
from worker.model.loader import load_stage
from worker.model.stage import StageForward
from worker.model.verifier import Verifier
from worker.node.member import group_address

SECONDS = 100.0
"""Seconds. Bound of one run of all members, besides that of long prompts."""

TOKENS_PER_SECOND = 50
"""Tokens of prompts that members compute at the least, on busy cores."""


@dataclass(frozen=True)
class Work:
    """The answers to compute: each of `prompts` in turn, with `count` tokens and `drafts` in each window.

    With `ahead`, and without drafts, the first member begins each window before it has finished the one before.
    """

    path: str
    prompts: Sequence[Sequence[int]]
    count: int = 16
    drafts: int = 2
    temperature: float = 0.0
    chunk: int = 16
    exact: bool = False
    slices: int = 1
    kv_bits: int | None = None
    ahead: bool = False
    hosts: tuple[str, ...] = ()
    saved: int = 0
    """Tokens of a prompt after which every member makes a backup. 0 makes none."""
    given: Sequence[Backup] = ()
    """The backup from which the prompt goes on."""


Backup = tuple[int, bool, str, int, int]
"""The fields of a `LayerState`, with its data in base 64."""


@dataclass(frozen=True)
class Answers:
    """The tokens of each answer, how many drafts were accepted, and the bytes of the weights of the layers.

    `digest` is that of the bits of all logits.
    """

    tokens: list[list[int]]
    accepted: int
    nbytes: int
    digest: str = ""
    backup: list[Backup] = field(default_factory=list)


def answer(work: Work, communicator: Communicator = ALONE) -> Answers:
    """Return the answers of one process, or of one member of a group."""
    checkpoint = Checkpoint.open(Path(work.path))
    layers = checkpoint.config.num_layers
    modules = load_stage(
        checkpoint,
        Span(0, layers),
        first=True,
        last=True,
        dtype=None,
        communicator=communicator,
        slices=work.slices,
    )
    nbytes = mx.get_active_memory()
    kv_format = KVFormat.of(checkpoint.config.head_dim, work.kv_bits)
    stage = StageForward(modules, kv_format, exact=work.exact)
    verifier = Verifier(modules, kv_format)
    digest = hashlib.sha256()
    verifier.unembed = _digested(verifier.unembed, digest)
    engine = FrameEngine(stage, epoch=1, first=True, verifier=verifier)
    answered, accepted, backup = [], 0, list[Backup]()
    for number, prompt in enumerate(work.prompts):
        one = _ahead if work.ahead else _one
        if work.given:
            states = [LayerState(n, appends, b64decode(data), *member) for n, appends, data, *member in work.given]
            engine.receive_backup(number, ReceivedBackup(tuple(prompt[: work.saved]), by_layer(states)))
        found, good = one(engine, work, number, prompt)
        if work.saved:
            made = engine.backups.made
            assert made is not None
            backup = [(s.layer, s.appends, b64encode(s.data).decode(), s.rank, s.size) for s in layer_states(made, 0)]
        answered.append(found)
        accepted += good
    return Answers(answered, accepted, nbytes, digest.hexdigest(), backup)


def _digested(function: Callable[[mx.array], mx.array], digest: hashlib._Hash) -> Callable[[mx.array], mx.array]:
    """Return `function`, whose results are added to `digest`."""

    def call(x: mx.array) -> mx.array:
        found = function(x)
        digest.update(np.array(found.view(mx.uint8)).tobytes())
        return found

    return call


def _one(engine: FrameEngine, work: Work, number: int, prompt: Sequence[int]) -> tuple[list[int], int]:
    params = SamplingParams(temperature=work.temperature, seed=number)
    ops: tuple[Any, ...] = (Admit(number, len(prompt) + 2 * work.count + 8, len(prompt), params),)
    window, position, tokens, accepted = 0, 0, list[int](), 0
    drafts: tuple[int, ...] = ()
    if work.given:
        ops, position = (*ops, RestoreBackup(number, work.saved)), work.saved
    while len(tokens) < work.count:
        if work.saved and position == work.saved:
            ops = (*ops, BackUp(number, 0))
        if position < len(prompt):
            end = work.saved if position < work.saved else len(prompt)
            part = tuple(prompt[position : min(end, position + work.chunk)])
            ends = position + len(part) == len(prompt)
            segment = Segment(number, window, position, part, sample=ends, drafts=work.drafts if ends else 0)
        else:
            part = (tokens[-1], *drafts)
            segment = Segment(number, window, position, part, open=True, sample=True, drafts=work.drafts)
        out = engine.process(Frame(1, engine.frames_done, ops, (segment,)))
        (outcome,) = out.outcomes
        ops = (Commit(number, window, outcome.accepted_length),) if segment.open else ()
        tokens += segment.tokens[1 : outcome.accepted_length] if segment.open else ()
        accepted += max(0, outcome.accepted_length - 1) if segment.open else 0
        tokens += [] if outcome.token is None else [outcome.token]
        position += outcome.accepted_length
        drafts, window = outcome.drafts, window + 1
    return tokens[: work.count], accepted


def _ahead(engine: FrameEngine, work: Work, number: int, prompt: Sequence[int]) -> tuple[list[int], int]:
    """Let all windows but the first continue. Only the first member overlaps them, the others are late at random."""
    params = SamplingParams(temperature=work.temperature, seed=number)
    admit = Admit(number, len(prompt) + work.count + 8, len(prompt), params)
    chunk = Segment(number, 0, 0, tuple(prompt), sample=True)
    (outcome,) = engine.process(Frame(1, engine.frames_done, (admit,), (chunk,))).outcomes
    assert outcome.token is not None
    tokens, begun = [outcome.token], deque[BegunFrame]()
    overlaps, late = engine.group.rank == 0, random.Random(engine.group.rank)
    for window in range(1, work.count):
        position, known = len(prompt) + window - 1, () if window > 1 else (tokens[0],)
        ops = (Commit(number, window - 2, 1),) if window > 2 else ()
        segment = Segment(number, window, position, known, open=True, sample=True, continues=not known)
        frame = Frame(1, engine.frames_done, ops, (segment,))
        begun.append(engine.begin_frame(frame, FrameStamps(0, StageStep)))
        while len(begun) > overlaps or (begun and window == work.count - 1):
            time.sleep(0 if overlaps else late.choice((0, 0, 0.01)))
            first = begun.popleft()
            tokens += [o.token for o in first.finish_frame().outcomes if o.token is not None]
            first.clean_up()
    return tokens, 0


def answer_in_group(work: Work, size: int) -> Answers:
    """Return the answers of the first of `size` processes, and the backups of all. They are ended before it returns."""
    hosts = tuple(group_address("127.0.0.1") for _ in range(size))
    asked = json.dumps(asdict(replace(work, hosts=hosts)))
    command = [sys.executable, "-m", "tests.support.stages.group_run"]
    with ExitStack() as stack:
        members = []
        for rank in range(size):
            start = subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            members.append(stack.enter_context(start))
            stack.callback(members[-1].kill)
        for member in members:
            assert member.stdin is not None
            with member.stdin:
                member.stdin.write(asked)
            member.stdin = None  # closed, so `communicate` does not write to it
        due = SECONDS + sum(map(len, work.prompts)) / TOKENS_PER_SECOND
        printed = [member.communicate(timeout=due)[0] for member in members]
    found = [Answers(**json.loads(text)) for text in printed]
    assert all(one.tokens == found[0].tokens for one in found), "the members disagree"
    return replace(found[0], backup=[state for one in found for state in one.backup])


def main() -> None:
    """Be one member."""
    work = json.load(sys.stdin)
    hosts = tuple(work.pop("hosts"))
    spec = GroupSpec(int(sys.argv[1]), hosts)
    communicator = join_group(spec, exact=work["exact"])
    print(json.dumps(asdict(answer(Work(**work), communicator))))


if __name__ == "__main__":
    main()
