"""The packing of one weight, as the tensors and the config of a checkpoint describe it.

A packed weight has several tensors, its members. `MEMBERS` maps the names that exporters use to the roles:

    weight         the packed values
    scale          one scale per group of values, per row, per block or per tensor
    global_scale   one further scale per tensor
    zeros          one zero point per group
    order          the group of each input, when the groups are not runs of adjacent inputs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal[
    "fp8", "mxfp8", "nvfp4", "nvfp4 divided", "mxfp4", "int8", "packed integers", "gptq", "awq"
]
"""The layouts of packed weights.

`nvfp4` multiplies by its global scale, as ModelOpt writes it. `nvfp4 divided` divides by it, as compressed-tensors
writes it. `packed integers` is the layout of compressed-tensors, with the inputs of one output in one row.
"""

Member = Literal["weight", "scale", "global_scale", "zeros", "order"]

MEMBERS: dict[str, Member] = {
    "weight": "weight",
    "weight_packed": "weight",
    "qweight": "weight",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "scales": "scale",
    "weight_global_scale": "global_scale",
    "weight_scale_2": "global_scale",
    "weight_zero_point": "zeros",
    "qzeros": "zeros",
    "weight_g_idx": "order",
    "g_idx": "order",
}
"""The member that each stored name of a packed weight is."""

REQUIRED: dict[Form, tuple[Member, ...]] = {
    "fp8": ("scale",),
    "mxfp8": ("scale",),
    "nvfp4": ("scale", "global_scale"),
    "nvfp4 divided": ("scale", "global_scale"),
    "mxfp4": ("scale",),
    "int8": ("scale",),
    "packed integers": ("scale",),
    "gptq": ("scale", "zeros"),
    "awq": ("scale", "zeros"),
}
"""The members that a packed weight needs beside `weight`."""


@dataclass(frozen=True)
class Packing:
    """The form of a packed weight, and the facts that its tensors do not show.

    `bits` is the size of an integer. `block` has the rows and columns per FP8 scale, None for scales per tensor or row.
    With `powers` the FP8 scales are powers of two. `zero_offset` is added to stored zero points.
    """

    form: Form
    bits: int = 4
    block: tuple[int, int] | None = None
    powers: bool = False
    zero_offset: int = 0
