"""The values of `--kernels`, which both programs take."""

from enum import StrEnum


class Kernels(StrEnum):
    """The faster of both where they can be timed, always MLX's operations, or always this project's kernels."""

    auto = "auto"
    mlx = "mlx"
    own = "own"
