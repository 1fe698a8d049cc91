"""The state of one sequence in one GatedDeltaNet layer, with the tapes to roll back its open windows.

MLX arrays are immutable, so a reference to the state before a window is a snapshot. It costs memory, but no copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from mtp.kernels.gated_delta_steps import advance_state


@dataclass(frozen=True)
class Tape:
    """The inputs to advance a state over tokens of a window again, without the projections.

    `conv_before` and `state_before` are the snapshot. `qkv [1, w, conv_dim]` are the inputs of the convolution. `k`,
    `v`, `a` and `b` are those of the recurrence, `[1, w, heads, dim]` and `[1, w, v_heads]`.
    """

    conv_before: mx.array
    state_before: mx.array
    qkv: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array


@dataclass
class GDNCache:
    """The present state and the tapes of the open windows, oldest first.

    `conv [1, kernel - 1, conv_dim]` are the last inputs of the convolution. `state [1, v_heads, v_dim, k_dim]` is fp32.
    """

    layer: GatedDeltaNet
    conv: mx.array
    state: mx.array
    tapes: list[Tape] = field(default_factory=list)

    @classmethod
    def empty(cls, layer: GatedDeltaNet, dtype: mx.Dtype) -> GDNCache:
        """Return the state before the first token, with `conv` of `dtype`."""
        conv = mx.zeros((1, layer.conv_kernel_size - 1, layer.conv_dim), dtype)
        shape = (1, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
        return cls(layer, conv, mx.zeros(shape, mx.float32))

    def apply_commit(self, whole: int, cut: int | None) -> None:
        """Remove the tapes of `whole` accepted windows. With `cut`, keep `cut` tokens of the next window.

        The state then becomes the snapshot of this window, advanced over its first `cut` tokens. This runs only the
        recurrence, with the same arithmetic. All tapes are removed.
        """
        if cut is None:
            del self.tapes[:whole]
            return
        tape = self.tapes[whole]
        self.tapes.clear()
        self.conv, self.state = tape.conv_before, tape.state_before
        if cut == 0:
            return
        self.conv = mx.concatenate([self.conv, tape.qkv[:, :cut]], axis=1)[:, cut:]
        k = tape.k[:, :cut]
        _, self.state = advance_state(
            k,  # in place of q, which only the output depends on
            k,
            tape.v[:, :cut],
            tape.a[:, :cut],
            tape.b[:, :cut],
            self.layer.A_log,
            self.layer.dt_bias,
            self.state,
        )

    def copy(self) -> GDNCache:
        """Return an independent copy in its own memory. Rows that ran together share their memory."""
        return GDNCache(self.layer, mx.contiguous(self.conv), mx.contiguous(self.state))

    def arrays(self) -> list[mx.array]:
        """Return the arrays of the present state, for `mx.eval` and for counting bytes."""
        return [self.conv, self.state]

    @property
    def nbytes(self) -> int:
        """Bytes of the present state."""
        return self.conv.nbytes + self.state.nbytes
