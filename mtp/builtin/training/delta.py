"""The gated delta rule over chunks, as transformers computes it, in a form that compiles to few kernels.

`transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule` is the reference. It solves a 64 by 64
triangular system per chunk with a library call. This call neither fuses nor batches well, and takes most of a small
model's training step. This module builds the inverse from blocks with matrix products only. `check()` compares the
two implementations; train.py calls it before it replaces the reference.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

CHUNK = 128  # twice the reference's, since the loop over chunks compiles slowly
BASE = 16  # size of the blocks inverted by doubling; their powers stay in the range of float32


def _unit_lower_inverse(strict: Tensor) -> Tensor:
    """Return the inverse of I + strict, for strictly lower triangular `strict` [..., C, C]."""
    size = strict.shape[-1]
    blocks = size // BASE
    grid = (
        strict.unflatten(-1, (blocks, BASE)).unflatten(-3, (blocks, BASE)).transpose(-3, -2)
    )  # [..., i, j, BASE, BASE]
    power = -torch.stack([grid[..., i, i, :, :] for i in range(blocks)], dim=-3)
    eye = torch.eye(BASE, dtype=strict.dtype, device=strict.device)
    inverse = eye + power
    for _ in range(3):  # (I-N)^-1 = (I+N)(I+N^2)(I+N^4)(I+N^8), since N^16 = 0
        power = power @ power
        inverse = inverse + inverse @ power
    while inverse.shape[-3] > 1:  # [[P, 0], [C, Q]]^-1 = [[P', 0], [-Q' C P', Q']]
        width, count = inverse.shape[-1], inverse.shape[-3]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = torch.stack(
            [
                strict[..., (i + 1) * width : (i + 2) * width, i * width : (i + 1) * width]
                for i in range(0, count, 2)
            ],
            dim=-3,
        )
        left = torch.cat([upper, -(lower @ corner @ upper)], dim=-2)
        right = torch.cat([torch.zeros_like(lower), lower], dim=-2)
        inverse = torch.cat([left, right], dim=-1)
    return inverse.squeeze(-3)


@torch.autocast("cuda", enabled=False)
def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the reference computes; q and k are normalised here.

    Shapes: query, key [B, T, Hk, Dk], value [B, T, Hv, Dv], g (log decay) and beta [B, T, Hv];
    returns [B, T, Hv, Dv], and the state [B, Hv, Dk, Dv] or None.
    """
    dtype, length = value.dtype, value.shape[1]
    if (repeat := value.shape[2] // key.shape[2]) > 1:
        query, key = query.repeat_interleave(repeat, dim=2), key.repeat_interleave(repeat, dim=2)
    query = reference.l2norm(query.float()) * query.shape[-1] ** -0.5
    key = reference.l2norm(key.float())
    padding = -length % CHUNK

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [B, H, N, CHUNK, ...]
        """Split `x` into chunks, padded with zeros."""
        x = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, padding)).unflatten(1, (-1, CHUNK))
        return x.movedim(3, 1)

    query, key, value, beta, total = (
        chunks(query),
        chunks(key),
        chunks(value),
        chunks(beta),
        chunks(g).cumsum(-1),
    )
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    scores = (key * beta.unsqueeze(-1)) @ key.transpose(-1, -2) * decay
    inverse = _unit_lower_inverse(scores.tril(-1))
    new_values = inverse @ (value * beta.unsqueeze(-1))
    old_keys = inverse @ (key * (beta * total.exp()).unsqueeze(-1))
    within = query @ key.transpose(-1, -2) * decay
    reading = query * total.exp().unsqueeze(-1)
    writing = (key * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    leaving = total[..., -1].exp()[..., None, None]

    state = (
        key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
        if initial_state is None
        else initial_state.float()
    )
    out = []
    for i in range(key.shape[2]):
        fresh = new_values[:, :, i] - old_keys[:, :, i] @ state
        out.append(reading[:, :, i] @ state + within[:, :, i] @ fresh)
        state = state * leaving[:, :, i] + writing[:, :, i] @ fresh
    result = torch.cat(out, dim=2)[:, :, :length].transpose(1, 2).to(dtype)
    return result, state if output_final_state else None


def check(device: torch.device) -> float:
    """Return the largest relative difference from the reference, in output and state, on random float32 input."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        """Return random normal numbers."""
        return torch.randn(*shape, generator=generator, device=device)

    query, key, value = normal(2, 200, 2, 64), normal(2, 200, 2, 64), normal(2, 200, 4, 64)
    g, beta = -normal(2, 200, 4).abs(), normal(2, 200, 4).sigmoid()
    wide_query, wide_key = query.repeat_interleave(2, dim=2), key.repeat_interleave(2, dim=2)
    expected = reference.torch_chunk_gated_delta_rule(
        wide_query, wide_key, value, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    got = chunk_gated_delta_rule(query, key, value, g, beta, output_final_state=True)
    pairs = zip(got, expected, strict=True)
    return max(
        float((a - b).norm() / b.norm()) for a, b in pairs if a is not None and b is not None
    )
