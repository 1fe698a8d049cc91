"""Trial of a checkpoint's MTP head: a look at its norms, a short answer with drafts, and a verdict.

The trial is a short greedy answer with drafts, computed by the engine that would serve. If few drafts are accepted, the
trial runs again with the head's norms read the other way. If that helps, the norms are the fault.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import psutil

from coordinator.generation.request import Finished, GenerationRequest
from coordinator.local_engine.generator import local_generator
from coordinator.local_engine.repair_hint import missing_head_tensors, repair_hint
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
"""Drafts per window in the trial."""

TOKENS = 96
"""Tokens of the trial's answer. About 30 windows separate a working head from a broken one."""

GOOD_ACCEPTANCE = 0.5
"""Accepted share of first drafts from which a head works.
Working heads reached 0.7 and more; with wrong norms almost no draft is accepted."""

CLEAR_GAIN = 0.05
"""Gain in the accepted share of first drafts from which another reading of the norms is the right one."""

MEMORY_SHARE = 0.8
"""Share of the free memory that the weights may take in a trial."""

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
    """Counts by position in a window: computed drafts, and accepted drafts."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Accepted share of the drafts by position. Accepting a draft implies accepting all before it."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return tuple(accepted / drafted for accepted, drafted in pairs if drafted)

    @property
    def first(self) -> float:
        """Accepted share of the first drafts."""
        return self.acceptance[0] if self.acceptance else 0.0


@dataclass(frozen=True)
class HeadAssessment:
    """Result of an assessment. `works` is None if unknown. `norms` is None without a head, `trial` without a trial."""

    works: bool | None
    verdict: str
    norms: Norms | None = None
    trial: Trial | None = None


def assess_head(checkpoint: Checkpoint, *, trial: bool, on_progress: OnProgress) -> HeadAssessment:
    """Assess the head of `checkpoint`, with a trial if `trial` is set and this machine can hold the model.

    `on_progress(done, total)` receives the bytes loaded.
    """
    if missing := missing_from_backbone(checkpoint):
        return HeadAssessment(
            False, f"this checkpoint cannot run: {checkpoint.missing_tensors_error(missing)}"
        )
    if not checkpoint.mtp.present:
        return HeadAssessment(False, f"head missing. {repair_hint(checkpoint, replace=False)}")
    if not checkpoint.mtp.complete:
        lacks = missing_head_tensors(checkpoint)
        hint = repair_hint(checkpoint, replace=True)
        return HeadAssessment(False, f"head incomplete, it lacks {lacks}. {hint}")
    if not checkpoint.path.is_dir():
        repo = checkpoint.path
        verdict = f"head complete. Its norms were not read and it was not tried, because {repo} is not on this machine"
        return HeadAssessment(None, f"{verdict}. Download it with: hf download {repo}")
    norms = head_norms(checkpoint)
    reason = _why_no_trial(checkpoint) if trial else "--no-trial was given"
    if reason is None:
        try:
            return _assess_with_trial(checkpoint, norms, on_progress)
        except ClusterError as error:
            reason = str(error)
    if norms != "as they should be":
        hint = repair_hint(checkpoint, replace=True)
        return HeadAssessment(None, f"{_norms_fault(norms)}. {hint}. Not tried: {reason}", norms)
    verdict = f"head complete, and its norms look right. Not tried: {reason}"
    return HeadAssessment(None, verdict, norms)


def _why_no_trial(checkpoint: Checkpoint) -> str | None:
    """Return why a trial is impossible, or None."""
    if not (checkpoint.path / "tokenizer.json").exists():
        return "the checkpoint has no tokenizer.json"
    needed = sum(checkpoint.part_bytes().values())
    free = int(MEMORY_SHARE * psutil.virtual_memory().available)
    if needed > free:
        return f"the model needs {format_size(needed)}, and {format_size(free)} of memory is free"
    return None


def _assess_with_trial(
    checkpoint: Checkpoint, norms: Norms, on_progress: OnProgress
) -> HeadAssessment:
    trial = asyncio.run(_run_trial(checkpoint, on_progress))
    works = trial.first >= GOOD_ACCEPTANCE
    shares = ", ".join(f"{100 * share:.0f} %" for share in trial.acceptance)
    result = f"by position, {shares} of the drafts were accepted"
    hint = repair_hint(checkpoint, replace=True)
    if not works or norms != "as they should be":
        for fault, other in with_other_norms(checkpoint).items():
            better = asyncio.run(_run_trial(other, on_progress)).first
            if better >= max(GOOD_ACCEPTANCE, trial.first + CLEAR_GAIN):
                verdict = (
                    f"{_norms_fault(fault)}: {result}. With the norms read the other way, "
                    f"{100 * better:.0f} % of the first drafts were accepted. {hint}"
                )
                return HeadAssessment(works, verdict, fault, trial)
    if works:
        return HeadAssessment(True, f"MTP will work: {result}", norms, trial)
    verdict = f"head complete, but {result}. It may belong to another model. {hint}"
    return HeadAssessment(False, verdict, norms, trial)


async def _run_trial(checkpoint: Checkpoint, on_progress: OnProgress) -> Trial:
    prompt = Tokenizer.load(checkpoint.path).encode(TEXT)
    request = GenerationRequest(prompt, TOKENS, SamplingParams())
    async with local_generator(
        checkpoint, mtp=MtpMode(DEPTH), on_progress=on_progress
    ) as generator:
        async for event in generator.generate(request):
            if isinstance(event, Finished):
                return Trial(event.stats.drafted_by_position, event.stats.accepted_by_position)
    raise AssertionError("every request ends with Finished")


def _norms_fault(norms: Norms) -> str:
    if norms == "shifted twice":
        return "norms look double-shifted"
    return "norms look unshifted: the head is raw, the model is converted"
