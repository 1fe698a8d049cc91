"""The choice of kernels. Commands read it without protobuf, which takes a tenth of their start."""

from __future__ import annotations

from enum import StrEnum


class Kernels(StrEnum):
    """`--kernels`: the faster of both where they can be timed, MLX's operations, or this project's kernels."""

    auto = "auto"
    mlx = "mlx"
    own = "own"
