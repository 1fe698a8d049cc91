"""What a conversion does to the weights: the flags of mlx-lm's own converter, and the head's beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proto.errors import UsageError

Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
Recipe = Literal["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]
FloatType = Literal["float16", "bfloat16", "float32"]
HeadBits = Literal["none", "2", "3", "4", "5", "6", "8"]

_USUAL: dict[Mode, tuple[int, int]] = {
    "affine": (64, 4),
    "mxfp4": (32, 4),
    "nvfp4": (16, 4),
    "mxfp8": (32, 8),
}
"""Group size and bits of each mode where nobody asks for others; those of all but affine are fixed."""

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Quantization:
    """How a module's weight is packed: `bits` each, one scale a group of `group_size`.

    Raises UsageError for what MLX has no kernels for.
    """

    bits: int
    group_size: int
    mode: Mode = "affine"

    def __post_init__(self) -> None:
        if self.mode == "affine":
            if self.bits not in _AFFINE_BITS:
                raise UsageError(f"{self.bits} bits: choose one of {_listed(_AFFINE_BITS)}")
            if self.group_size not in _AFFINE_GROUPS:
                raise UsageError(
                    f"groups of {self.group_size}: choose one of {_listed(_AFFINE_GROUPS)}"
                )
        elif (self.group_size, self.bits) != _USUAL[self.mode]:
            group_size, bits = _USUAL[self.mode]
            raise UsageError(
                f"{self.mode} is {bits} bits in groups of {group_size}; leave out --q-bits and --q-group-size"
            )

    @classmethod
    def of(cls, bits: int | None, group_size: int | None, mode: Mode = "affine") -> Quantization:
        """With the mode's usual values for what is None."""
        usual_group, usual_bits = _USUAL[mode]
        return cls(bits or usual_bits, group_size or usual_group, mode)

    def to_json(self) -> dict[str, int | str]:
        """As config.json has it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


@dataclass(frozen=True)
class Settings:
    """`quantization` None leaves the backbone as it is; `dtype` None keeps each tensor's own type.

    The head follows the backbone where `head_bits` and `head_dtype` are None.
    """

    quantization: Quantization | None = None
    recipe: Recipe | None = None
    dtype: FloatType | None = None
    head_bits: HeadBits | None = None
    head_dtype: FloatType | None = None

    def __post_init__(self) -> None:
        if self.recipe and (self.quantization is None or self.quantization.mode != "affine"):
            raise UsageError(
                f"--quant-predicate {self.recipe} needs --quantize, and --q-mode affine"
            )

    @property
    def head_quantization(self) -> Quantization | None:
        """Of the head's layer where a recipe does not say otherwise; None leaves it unquantized."""
        if self.head_bits is None:
            return self.quantization
        if self.head_bits == "none":
            return None
        group = self.quantization.group_size if self.quantization else None
        affine = self.quantization is None or self.quantization.mode == "affine"
        return Quantization.of(int(self.head_bits), group if affine else None)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
