"""What training minimises: next token for the backbone, the tokens after it for the head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp.builtin.training.model import MtpModel

DEPTH = 4  # drafts in a chain
STRIDE = 8  # one position in so many starts a chain; the first step is trained everywhere
SOFT = 0.5  # share of the head's target that is the backbone's own distribution
HEAD_WEIGHT = 0.3  # of the head's first step
CHAIN_WEIGHT = 0.1  # of each later step


@dataclass(frozen=True)
class Losses:
    """Mean cross-entropies in nats; `agreement` [DEPTH] counts how often head and backbone choose alike."""

    backbone: Tensor
    head: Tensor
    chain: Tensor
    first_soft: Tensor
    later_soft: Tensor
    agreement: Tensor

    def total(self, head_only: bool = False) -> Tensor:
        first, later = (
            torch.lerp(self.head, self.first_soft, SOFT),
            torch.lerp(self.chain, self.later_soft, SOFT),
        )
        head = HEAD_WEIGHT * first + CHAIN_WEIGHT * (DEPTH - 1) * later
        return head if head_only else self.backbone + head


@torch.compile(dynamic=False)
def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in float32 without storing the logits so."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


@torch.compile(dynamic=False)
def compare(logits: Tensor, teacher: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy against the true tokens and against the teacher's distribution, and agreement of the choices.

    A draft counts when it equals what the backbone chooses, whatever the text says: hence the second term.
    """
    logs = F.log_softmax(logits.float(), dim=-1)
    hard = F.nll_loss(logs.flatten(0, -2), targets.flatten())
    soft = -(F.softmax(teacher.float(), dim=-1) * logs).sum(-1).mean()
    alike = (logits.argmax(-1) == teacher.argmax(-1)).float().mean()
    return hard, soft, alike


def losses(model: MtpModel, tokens: Tensor, offset: Tensor) -> Losses:
    """Losses on tokens [B, T + 1]; chains start at `offset` (0-d, below STRIDE) and every STRIDE after it."""
    length = tokens.shape[1] - 1
    hidden = model(tokens[:, :-1])
    logits = model.logits(hidden)
    backbone = entropy(logits, tokens[:, 1:])
    teacher = logits.detach()
    count = (length - DEPTH) // STRIDE // 8 * 8  # a multiple of 8, for attention's fast kernels
    starts = offset + STRIDE * torch.arange(count, device=tokens.device)
    first, later = model.chain(hidden, tokens, starts, DEPTH)
    head, first_soft, alike = compare(model.logits(first[:, :-1]), teacher[:, 1:], tokens[:, 2:])
    agreement, hards, softs = [alike], [], []
    for step, out in enumerate(later, start=1):
        hard, soft, alike = compare(
            model.logits(out), teacher[:, starts + step + 1], tokens[:, starts + step + 2]
        )
        hards.append(hard)
        softs.append(soft)
        agreement.append(alike)
    return Losses(
        backbone,
        head,
        torch.stack(hards).mean(),
        first_soft,
        torch.stack(softs).mean(),
        torch.stack(agreement),
    )
