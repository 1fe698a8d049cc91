"""The settings of a conversion: the flags of mlx-lm's own converter, and those of the head."""

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
"""Default group size and bits of each mode. Only affine allows other values."""

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Quantization:
    """The quantization of a module: `bits` per weight, one scale per group of `group_size` weights.

    The constructor raises UsageError for values that MLX has no kernels for.
    """

    bits: int
    group_size: int
    mode: Mode = "affine"

    def __post_init__(self) -> None:
        if self.mode == "affine":
            if self.bits not in _AFFINE_BITS:
                raise UsageError(
                    f"{self.bits} bits are not supported. Choose one of {_listed(_AFFINE_BITS)}."
                )
            if self.group_size not in _AFFINE_GROUPS:
                raise UsageError(
                    f"groups of {self.group_size} are not supported. Choose one of {_listed(_AFFINE_GROUPS)}."
                )
        elif (self.group_size, self.bits) != _USUAL[self.mode]:
            group_size, bits = _USUAL[self.mode]
            raise UsageError(
                f"{self.mode} has {bits} bits in groups of {group_size}. Leave out --q-bits and --q-group-size."
            )

    @classmethod
    def of(cls, bits: int | None, group_size: int | None, mode: Mode = "affine") -> Quantization:
        """Return a quantization with the default values of `mode` in place of None."""
        usual_group, usual_bits = _USUAL[mode]
        return cls(bits or usual_bits, group_size or usual_group, mode)

    def to_json(self) -> dict[str, int | str]:
        """Return the object that config.json holds."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


@dataclass(frozen=True)
class Settings:
    """The settings of a conversion.

    With `quantization` None the backbone is not quantized. With `dtype` None each tensor keeps its own type. With
    `head_bits` and `head_dtype` None the head has the settings of the backbone.
    """

    quantization: Quantization | None = None
    recipe: Recipe | None = None
    dtype: FloatType | None = None
    head_bits: HeadBits | None = None
    head_dtype: FloatType | None = None

    def __post_init__(self) -> None:
        if self.recipe and (self.quantization is None or self.quantization.mode != "affine"):
            raise UsageError(
                f"--quant-predicate {self.recipe} needs --quantize and --q-mode affine"
            )

    @property
    def head_quantization(self) -> Quantization | None:
        """The quantization of the head's layer, unless a recipe overrides it; None leaves the layer unquantized."""
        if self.head_bits is None:
            return self.quantization
        if self.head_bits == "none":
            return None
        group = self.quantization.group_size if self.quantization else None
        affine = self.quantization is None or self.quantization.mode == "affine"
        return Quantization.of(int(self.head_bits), group if affine else None)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
