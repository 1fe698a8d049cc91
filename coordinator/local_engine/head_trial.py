"""Will drafting with this checkpoint's head work? A look at its norms, a trial on a text, and the verdict in words.

The trial is a short greedy answer with drafts, by the engine that would serve. Where drafts go wrong the head is read
again as if its norms were stored the other way: if that helps, it is known what is the matter.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import psutil

from coordinator.generation.request import Finished, GenerationRequest
from coordinator.local_engine.generator import local_generator
from coordinator.local_engine.repair_hint import head_remedy, what_head_lacks
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.head_norms import Norms, head_norms, with_other_norms
from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.depth.controller import MtpMode
from proto.errors import ClusterError
from proto.params import SamplingParams
from proto.progress import OnProgress
from proto.terminal.size import format_size

DEPTH = 3
TOKENS = 96
"""Of the trial's answer: some thirty windows, which tell a head that works from one that does not."""

GOOD = 0.5
"""Of first drafts that were kept. Heads that work were seen from .7 up; with the wrong norms it is next to none."""

BETTER = 0.05
"""So much more of the first drafts another reading of the norms must keep, to be taken for the right one."""

MEMORY_SHARE = 0.8
"""Of the memory that is free now, what the trial's weights may take."""

TEXT = """\
def mean(values):
    \"\"\"Return the arithmetic mean of a sequence of numbers.\"\"\"
    return sum(values) / len(values)


def median(values):
    \"\"\"Return the middle value, or the mean of the two middle values, of a sequence of numbers.\"\"\"
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def variance(values):
    \"\"\"Return the mean squared distance from the mean.\"\"\"
"""


@dataclass(frozen=True)
class Trial:
    """Counts by position in a window: how many drafts there were, and how many were kept."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position, the share of drafts that were kept: that they were right, and all before them."""
        return tuple(kept / of for kept, of in zip(self.accepted, self.drafted, strict=True) if of)

    @property
    def first(self) -> float:
        """Of first drafts, the share that was right."""
        return self.acceptance[0] if self.acceptance else 0.0


@dataclass(frozen=True)
class Checkup:
    """`works` None: not known. `norms` and `trial` are None where there was no head to look at, or no trial."""

    works: bool | None
    verdict: str
    norms: Norms | None = None
    trial: Trial | None = None


def check(checkpoint: Checkpoint, *, trial: bool, on_progress: OnProgress) -> Checkup:
    """Look at the head and, if asked to and this machine can hold the model, try it. `on_progress` hears of loading."""
    if missing := missing_from_backbone(checkpoint):
        return Checkup(False, f"nothing of this checkpoint will run: {checkpoint.lacks(missing)}")
    if not checkpoint.mtp.present:
        return Checkup(False, f"head missing. {head_remedy(checkpoint, replace=False)}")
    if not checkpoint.mtp.complete:
        remedy = head_remedy(checkpoint, replace=True)
        lacks = what_head_lacks(checkpoint)
        return Checkup(False, f"head incomplete, it lacks {lacks}. {remedy}")
    if not checkpoint.path.is_dir():
        repo = checkpoint.path
        verdict = f"head complete. Its norms were not read, nor was it tried: {repo} is not on this machine"
        return Checkup(None, f"{verdict}; hf download {repo} brings it")
    norms = head_norms(checkpoint)
    reason = _why_not(checkpoint) if trial else "no trial was asked for"
    if reason is None:
        try:
            return _tried(checkpoint, norms, on_progress)
        except ClusterError as error:
            reason = str(error)
    if norms != "as they should be":
        remedy = head_remedy(checkpoint, replace=True)
        return Checkup(None, f"{_looks(norms)}. {remedy}. Not tried: {reason}", norms)
    return Checkup(None, f"head complete, and its norms look right. Not tried: {reason}", norms)


def _why_not(checkpoint: Checkpoint) -> str | None:
    """Why a trial cannot be had; None when it can."""
    if not (checkpoint.path / "tokenizer.json").exists():
        return "the checkpoint has no tokenizer.json"
    needed = sum(checkpoint.part_bytes().values())
    free = int(MEMORY_SHARE * psutil.virtual_memory().available)
    if needed > free:
        return f"the model takes {format_size(needed)}, and {format_size(free)} of memory are free"
    return None


def _tried(checkpoint: Checkpoint, norms: Norms, on_progress: OnProgress) -> Checkup:
    trial = asyncio.run(_run(checkpoint, on_progress))
    works = trial.first >= GOOD
    told = ", ".join(f"{100 * share:.0f} %" for share in trial.acceptance)
    told = f"by position, {told} of the drafts were kept"
    if not works or norms != "as they should be":
        for fault, other in with_other_norms(checkpoint).items():
            better = asyncio.run(_run(other, on_progress)).first
            if better >= max(GOOD, trial.first + BETTER):
                remedy = head_remedy(checkpoint, replace=True)
                other_way = f"{100 * better:.0f} % of the first, were they read the other way"
                verdict = f"{_looks(fault)}: {told}; {other_way}. {remedy}"
                return Checkup(works, verdict, fault, trial)
    if works:
        return Checkup(True, f"MTP will work: {told}", norms, trial)
    remedy = head_remedy(checkpoint, replace=True)
    verdict = f"head complete, but {told}: is it another model's? {remedy}"
    return Checkup(False, verdict, norms, trial)


async def _run(checkpoint: Checkpoint, on_progress: OnProgress) -> Trial:
    prompt = Tokenizer.load(checkpoint.path).encode(TEXT)
    request = GenerationRequest(prompt, TOKENS, SamplingParams())
    async with local_generator(
        checkpoint, mtp=MtpMode(DEPTH), on_progress=on_progress
    ) as generator:
        async for event in generator.generate(request):
            if isinstance(event, Finished):
                return Trial(event.stats.drafted_by_position, event.stats.accepted_by_position)
    raise AssertionError("every request ends with Finished")


def _looks(norms: Norms) -> str:
    if norms == "shifted twice":
        return "norms look double-shifted"
    return "norms look unshifted: the head is raw, the model is converted"
