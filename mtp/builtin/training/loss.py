"""The losses of training: the next token for the backbone, and the tokens after it for the head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp.builtin.training.model import MtpModel

DEPTH = 4  # drafts in a chain
STRIDE = 8  # positions between the starts of chains; the first step is trained at every position
SOFT = 0.5  # share of the backbone's distribution in the head's target
HEAD_WEIGHT = 0.3  # weight of the head's first step
CHAIN_WEIGHT = 0.1  # weight of each later step


@dataclass(frozen=True)
class Losses:
    """Mean cross-entropies in nats. `agreement` [DEPTH] is the share of equal choices of head and backbone."""

    backbone: Tensor
    head: Tensor
    chain: Tensor
    first_soft: Tensor
    later_soft: Tensor
    agreement: Tensor

    def total(self, head_only: bool = False) -> Tensor:
        """Return the weighted sum that training minimises."""
        first, later = (
            torch.lerp(self.head, self.first_soft, SOFT),
            torch.lerp(self.chain, self.later_soft, SOFT),
        )
        head = HEAD_WEIGHT * first + CHAIN_WEIGHT * (DEPTH - 1) * later
        return head if head_only else self.backbone + head


@torch.compile(dynamic=False)
def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, computed in float32 without storing float32 logits."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


@torch.compile(dynamic=False)
def compare(logits: Tensor, teacher: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross-entropies with the true tokens and the teacher's distribution, and the share of equal choices.

    A draft is accepted when it equals the backbone's choice, even where the text differs: hence the second term.
    """
    logs = F.log_softmax(logits.float(), dim=-1)
    hard = F.nll_loss(logs.flatten(0, -2), targets.flatten())
    soft = -(F.softmax(teacher.float(), dim=-1) * logs).sum(-1).mean()
    equal = (logits.argmax(-1) == teacher.argmax(-1)).float().mean()
    return hard, soft, equal


def losses(model: MtpModel, tokens: Tensor, offset: Tensor) -> Losses:
    """Return the losses on tokens [B, T + 1]; chains start at `offset` (0-d, below STRIDE), every STRIDE positions."""
    length = tokens.shape[1] - 1
    hidden = model(tokens[:, :-1])
    logits = model.logits(hidden)
    backbone = entropy(logits, tokens[:, 1:])
    teacher = logits.detach()
    count = (length - DEPTH) // STRIDE // 8 * 8  # a multiple of 8, for attention's fast kernels
    starts = offset + STRIDE * torch.arange(count, device=tokens.device)
    first, later = model.chain(hidden, tokens, starts, DEPTH)
    head, first_soft, equal = compare(model.logits(first[:, :-1]), teacher[:, 1:], tokens[:, 2:])
    agreement, hards, softs = [equal], [], []
    for step, out in enumerate(later, start=1):
        hard, soft, equal = compare(
            model.logits(out), teacher[:, starts + step + 1], tokens[:, starts + step + 2]
        )
        hards.append(hard)
        softs.append(soft)
        agreement.append(equal)
    return Losses(
        backbone,
        head,
        torch.stack(hards).mean(),
        first_soft,
        torch.stack(softs).mean(),
        torch.stack(agreement),
    )
