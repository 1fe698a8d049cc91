"""A dense MLP as two products, for MLX's CPU backend."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from mtp.kernels.column_linear import ColumnLinear, can_store_columns


class JoinedMLP(nn.Module):
    """A gated MLP whose gate and up projections are one."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_up = ColumnLinear.from_modules([mlp.gate_proj, mlp.up_proj])
        self.down = ColumnLinear.from_modules([mlp.down_proj])
        self._half = self.gate_up.weight.shape[1] // 2

    def __call__(self, x: mx.array) -> mx.array:
        """Return the MLP of `x [rows, hidden]`."""
        y = self.gate_up(x)
        return self.down(swiglu(y[..., : self._half], y[..., self._half :]))


def can_join_mlp(mlp: nn.Module, *, widen: bool) -> bool:
    """Return whether `mlp` is a dense MLP that `JoinedMLP` computes."""
    names = ("gate_proj", "up_proj", "down_proj")
    return all(name in mlp for name in names) and can_store_columns(
        [mlp[name] for name in names], widen=widen
    )
