"""One sequence's state in one GatedDeltaNet layer, and the tapes that let its open windows be rolled back.

MLX arrays do not change once made, so the state before a window is kept by keeping its reference: a snapshot
costs memory, not a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.qwen3_5 import GatedDeltaNet


@dataclass(frozen=True)
class Tape:
    """What is needed to advance a state over some of a window's tokens again, without its projections.

    `conv_before`, `state_before`: the snapshot. `qkv [1, w, conv_dim]`: the convolution's inputs. `k, v, a, b`: the
    recurrence's inputs, `[1, w, heads, dim]` and `[1, w, v_heads]`.
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
    """The present state and, oldest first, the tapes of the open windows.

    `conv [1, kernel - 1, conv_dim]`: the convolution's last inputs. `state [1, v_heads, v_dim, k_dim]`, fp32.
    """

    layer: GatedDeltaNet
    conv: mx.array
    state: mx.array
    tapes: list[Tape] = field(default_factory=list)

    @classmethod
    def empty(cls, layer: GatedDeltaNet, dtype: mx.Dtype) -> GDNCache:
        conv = mx.zeros((1, layer.conv_kernel_size - 1, layer.conv_dim), dtype)
        shape = (1, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
        return cls(layer, conv, mx.zeros(shape, mx.float32))

    def settle(self, whole: int, cut: int | None) -> None:
        """Forget the tapes of `whole` windows; with `cut`, go back to the next one's snapshot and forward over
        its first `cut` tokens (the recurrence alone, the same arithmetic), forgetting all later windows."""
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
        _, self.state = gated_delta_update(
            k,  # stands in for q, which only the output needs
            k,
            tape.v[:, :cut],
            tape.a[:, :cut],
            tape.b[:, :cut],
            self.layer.A_log,
            self.layer.dt_bias,
            self.state,
        )

    def copy(self) -> GDNCache:
        """The same state under another owner. Of its own memory: rows that ran together share theirs."""
        return GDNCache(self.layer, mx.contiguous(self.conv), mx.contiguous(self.state))

    def arrays(self) -> list[mx.array]:
        """The arrays of the present state, for `mx.eval` and for counting bytes."""
        return [self.conv, self.state]

    @property
    def nbytes(self) -> int:
        """Bytes of the present state."""
        return self.conv.nbytes + self.state.nbytes
