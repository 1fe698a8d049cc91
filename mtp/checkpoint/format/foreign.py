"""The quantization of a checkpoint by another program than mlx-lm, as its config describes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mtp.packing.packing import Form, Packing

Fields = dict[str, Any]

ACCEPTED = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round")
"""The values of `quant_method` that this project reads."""

_ALIASES = {
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "intel/auto-round": "auto-round",
    "autoround": "auto-round",
}

_REASONS = {
    "bitsandbytes": "its NF4 codes are a table that no format of MLX has, and their scales are quantized again",
    "bitnet": "its ternary weights need kernels of their own",
    "torchao": "its tensors are pickled Python objects",
    "gguf": "its blocks have scales of several levels",
}
"""Why a known method is refused."""

_FP8_BLOCK = (128, 128)
"""Rows and columns per scale where a config of block-wise FP8 does not name them: ModelOpt's only block."""

_MODELOPT_ALGORITHMS = re.compile(
    r"(W4A16_)?NVFP4|FP8|FP8_PER_CHANNEL_PER_TOKEN|FP8_PB(_WO|_REAL)?|MXFP[48]|W4A16_MXFP4|MIXED_PRECISION"
)
"""The algorithms of ModelOpt whose weights are nothing but values and scales."""


class UnsupportedQuantizationError(ValueError):
    """The reason why a quantization cannot be read."""


@dataclass(frozen=True)
class ForeignQuantization:
    """A quantization by another program: its `method`, and the raw fields of its config."""

    method: str
    fields: Fields

    @classmethod
    def parse(cls, found: Any) -> ForeignQuantization | None:
        """Return the quantization that the object `found` of a config describes; None for mlx-lm's own.

        Raises UnsupportedQuantizationError with the reason.
        """
        if not isinstance(found, dict) or found.get("quant_method") is None:
            if isinstance(found, str):
                raise _refused(found)
            return None
        name = str(found["quant_method"]).lower()
        method = _ALIASES.get(name, name)
        if method not in ACCEPTED:
            raise _refused(method)
        made = cls(method, found)
        made._check()
        return made

    def _check(self) -> None:
        """Raise UnsupportedQuantizationError for fields that change results in a way that is not supported."""
        fields = self.fields
        if self.method == "fp8" and (block := fields.get("weight_block_size")) is not None:
            _block(block, "weight_block_size")
        if self.method == "compressed-tensors":
            if _object(fields.get("transform_config")).get("config_groups"):
                raise UnsupportedQuantizationError(
                    "transform_config rotates the activations, which is not supported"
                )
            sparse = _object(fields.get("sparsity_config"))
            if sparse.get("format", "dense") != "dense":
                raise UnsupportedQuantizationError(
                    f"the sparse format {sparse['format']!r:.40} is not supported"
                )
        if self.method == "modelopt":
            algorithm = str(fields.get("quant_algo"))
            if not _MODELOPT_ALGORITHMS.fullmatch(algorithm.upper()):
                raise UnsupportedQuantizationError(
                    f"ModelOpt's quant_algo {algorithm!r:.40} is not supported"
                )
        if self._is_integer():
            self._check_integer()

    def _is_integer(self) -> bool:
        return self.method in ("awq", "gptq") or (
            self.method == "auto-round"
            and "data_type" in self.fields
            and "int" in str(self.fields["data_type"])
        )

    def _check_integer(self) -> None:
        fields = self.fields
        if not isinstance(bits := fields.get("bits", 4), int) or bits not in (2, 4, 8):
            raise UnsupportedQuantizationError(
                f"{fields['bits']!r:.20} bits are not supported, only 2, 4 and 8"
            )
        layout = str(fields.get("checkpoint_format") or fields.get("version") or "").lower()
        if layout not in ("", "gptq", "gptq_v2", "gemm"):
            raise UnsupportedQuantizationError(
                f"the layout {layout!r:.40} is not supported, only gptq, gptq_v2 and gemm"
            )

    @property
    def reorders(self) -> bool:
        """True when the groups of a layer may have inputs that are not adjacent."""
        return bool(self.fields.get("desc_act")) and not self.fields.get("static_groups")

    def packing(self, module: str, types: dict[str, str]) -> Packing | None:
        """Return the packing of the module `module`, None when it is not packed.

        `types` has the dtype of each stored tensor of the module by the last part of its name.
        """
        form = self._form(types)
        match form:
            case None:
                return None
            case "fp8":
                return Packing("fp8", 8, self._fp8_block(module), self._powers(types))
            case "gptq" | "awq":
                return Packing(form, self._bits(module), zero_offset=self._zero_offset(form))
            case "packed integers":
                return Packing(form, self._bits(module))
            case "mxfp8" | "int8":
                return Packing(form, 8)
            case _:
                return Packing(form)

    def _form(self, types: dict[str, str]) -> Form | None:
        weight = types.get("weight")
        scale = types.get("weight_scale", types.get("weight_scale_inv"))
        bytes_of_powers = scale in ("U8", "F8_E8M0")
        if "qweight" in types:
            return "awq" if self._is_awq() else "gptq"
        if "weight_packed" in types:
            if types["weight_packed"] == "I32":
                return "packed integers"
            return "mxfp4" if bytes_of_powers else "nvfp4 divided"
        if scale is None:
            return None
        match weight:
            case "F8_E4M3":
                return "mxfp8" if bytes_of_powers and self._fp8_block("") is None else "fp8"
            case "U8":
                return "mxfp4" if bytes_of_powers else "nvfp4"
            case "I8":
                return "int8"
        return None

    def _is_awq(self) -> bool:
        return self.method == "awq" or "awq" in str(self.fields.get("packing_format"))

    def _zero_offset(self, form: Form) -> int:
        """Return what is added to stored zero points: GPTQ's first layout stores one less, and AutoRound copies it."""
        if form == "awq":
            return 0
        if self.method == "auto-round":
            packing = str(self.fields.get("packing_format", "auto_round:auto_gptq"))
            return int("gptq" in packing and "gptqmodel" not in packing)
        return int(self.fields.get("checkpoint_format", "gptq") != "gptq_v2")

    def _powers(self, types: dict[str, str]) -> bool:
        return self.fields.get("scale_fmt") == "ue8m0" or "F8_E8M0" in types.values()

    def _fp8_block(self, module: str) -> tuple[int, int] | None:
        found = self.fields.get("weight_block_size")
        if found is None:
            found = _object(self._group(module).get("weights")).get("block_structure")
        if found is None and str(self.fields.get("quant_algo", "")).upper().startswith("FP8_PB"):
            found = list(_FP8_BLOCK)
        return None if found is None else _block(found, "the FP8 block")

    def _bits(self, module: str) -> int:
        """Return the bits of a module's integers; exceptions by module have precedence."""
        fields = self.fields
        for pattern, special in _object(fields.get("dynamic")).items():
            if pattern[:2] in ("+:", "-:"):
                pattern = pattern[2:]
            if "bits" in _object(special) and re.match(pattern, module):
                return _whole(special["bits"])
        special = _object(_object(fields.get("extra_config")).get(module))
        weights = _object(self._group(module).get("weights"))
        return _whole(special.get("bits") or weights.get("num_bits") or fields.get("bits") or 4)

    def _group(self, module: str) -> Fields:
        """Return the group of compressed-tensors that `module` belongs to; empty when there is none."""
        groups = _object(self.fields.get("config_groups"))
        found = [group for group in groups.values() if isinstance(group, dict)]
        if len(found) == 1:
            return found[0]
        targets = [[t for t in g.get("targets") or () if isinstance(t, str)] for g in found]
        pairs = list(zip(found, targets, strict=True))
        named = [group for group, names in pairs if any(_targets(t, module) for t in names)]
        general = [group for group, names in pairs if "Linear" in names]
        return next(iter(named + general), {})


def _object(value: Any) -> Fields:
    """Return an object of the config; empty if the value is something else."""
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedQuantizationError(f"{value!r:.20} bits are not supported, only 2, 4 and 8")
    return value


def _targets(target: str, module: str) -> bool:
    """Return whether a target of a group is the module, by its name or by a pattern."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith(f".{target}")


def _block(found: Any, name: str) -> tuple[int, int]:
    match found:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise UnsupportedQuantizationError(
        f"{name} is {found!r:.60}, and two positive integers are needed"
    )


def _refused(method: str) -> UnsupportedQuantizationError:
    reason = _REASONS.get(method, f"only {', '.join(ACCEPTED)} and MLX's own formats are supported")
    return UnsupportedQuantizationError(f"quantized by {method!r:.60}: {reason}")


def with_quantization(config: Fields, beside: Fields | None) -> Fields:
    """Return `config` with its quantization at the usual place.

    ModelOpt writes a file of its own, `beside`, in which the fields are under `quantization`. Older exporters wrote
    `compression_config`. The text part of a model may have the fields too.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    if config.get("quantization") is not None or config.get("quantization_config") is not None:
        found = config.get("quantization_config")
        if isinstance(found, dict) and isinstance(inner := found.get("quantization"), dict):
            found = {"quant_method": "modelopt", **inner}
            return {**config, "quantization_config": found}
        return config
    for place in (config, text):
        for name in ("quantization_config", "compression_config"):
            if place.get(name) is not None:
                found = place[name]
                if name == "compression_config" and isinstance(found, dict):
                    found = {"quant_method": "compressed-tensors", **found}
                return {**config, "quantization_config": found}
    if beside is not None and isinstance(inner := beside.get("quantization"), dict):
        return {**config, "quantization_config": {"quant_method": "modelopt", **inner}}
    return config
