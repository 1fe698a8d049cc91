"""Projections of a layer as one call each, packed for the tensor cores where their weights allow it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mtp.kernels.packed_linear import PackedLinear, PackedMLP, can_pack


class SideBySide(nn.Module):
    """Linear layers whose outputs follow each other in one row, each multiplied by itself."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = list(modules)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Return the parts' outputs for `x [rows, K]`, side by side, plus `residual`."""
        outputs = [part(x) for part in self.parts]
        y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)
        return y if residual is None else y + residual


Projection = PackedLinear | SideBySide


def joined(modules: Sequence[nn.Module], *, padded: bool = False) -> Projection:
    """Return `modules` as one projection. If it packs their weights, they lose them.

    `padded` allows outputs of zero behind the last module's.
    """
    packed = can_pack(modules, padded=padded)
    return PackedLinear.from_modules(modules) if packed else SideBySide(modules)


def pack_mlp(mlp: nn.Module) -> nn.Module:
    """Return a dense MLP packed, and any other as it is."""
    names = ("gate_proj", "up_proj", "down_proj")
    if not all(name in mlp for name in names):
        return mlp
    gate, up, down = (mlp[name] for name in names)
    # Each tile of gates needs its own tile of ups beside it.
    if not (can_pack([gate]) and can_pack([up]) and can_pack([down])):
        return mlp
    return PackedMLP(PackedLinear.from_modules([gate, up]), PackedLinear.from_modules([down]))


def packed_mlp_weights(mlp: nn.Module, norm: nn.RMSNorm) -> tuple[mx.array, ...]:
    """Return what `add_packed_mlp` takes of an MLP and its norm, or an empty tuple for an MLP that is not packed."""
    if not isinstance(mlp, PackedMLP):
        return ()
    gate_up, down = mlp.gate_up, mlp.down
    return norm.weight, gate_up.w, gate_up.factors, down.w, down.factors


def add_packed_mlp(weights: Sequence[mx.array], eps: float, x: mx.array) -> mx.array:
    """Return `add_mlp` of up to `FEW_ROWS` rows, as part of a compiled layer."""
    norm, w, factors, down_w, down_factors = weights
    y = PackedLinear(w, factors).swiglu(mx.fast.rms_norm(x, norm, eps))
    return PackedLinear(down_w, down_factors)(y, x)


def add_mlp(mlp: nn.Module, norm: nn.RMSNorm, x: mx.array) -> mx.array:
    """Return `x [rows, hidden]` plus the MLP of its norm."""
    if isinstance(mlp, PackedMLP):
        return mlp(norm(x), x)
    y: mx.array = x + mlp(norm(x))
    return y
