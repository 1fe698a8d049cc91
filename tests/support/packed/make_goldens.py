"""The program that writes `goldens.safetensors`: one small weight per format, packed and read by the format's program.

It needs packages that the tests do not: compressed-tensors, gptqmodel, nvidia-modelopt, auto-round and the source of
autoawq (for one file). Run it in an environment of its own:

    PYTHONPATH=GPTQMODEL-SOURCE python tests/support/packed/make_goldens.py AUTOAWQ-SOURCE

A tensor is named `case/member`, where a member is named as in a checkpoint. `case/values` is the oracle: the weight as
the program itself dequantizes it. The metadata has the quantization_config of each case, and the oracle's version.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OUTPUTS, INPUTS, GROUP = 32, 128, 32
SHARED = Path(__file__).with_name("goldens.safetensors")

tensors: dict[str, torch.Tensor] = {}
cases: dict[str, dict[str, Any]] = {}


def add(
    case: str, oracle: str, config: dict[str, Any], members: dict[str, Any], values: Any
) -> None:
    """Record a case."""
    cases[case] = {"oracle": oracle, "config": config}
    for name, tensor in {**members, "values": values}.items():
        if tensor is not None:
            tensors[f"{case}/{name}"] = tensor.detach().contiguous().clone()


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a random weight whose rows differ in size, as the rows of trained weights do."""
    torch.manual_seed(len(cases))
    sizes = torch.logspace(-2, 0, OUTPUTS)[:, None]
    return (torch.randn(OUTPUTS, INPUTS) * sizes * 0.1).to(dtype)


# ---- compressed-tensors


def compressed_tensors() -> None:
    """Add FP8, NVFP4, MXFP4, MXFP8 and integers, as llm-compressor saves them."""
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    names = (
        "FP8_DYNAMIC",
        "FP8",
        "FP8_BLOCK",
        "NVFP4A16",
        "MXFP4A16",
        "MXFP8A16",
        "W4A16",
        "W4A16_ASYM",
    )
    for name in (*names, "W8A16", "W8A8"):
        scheme = PRESET_SCHEMES[name]
        _compressed(
            f"compressed-tensors {name}", scheme["weights"], scheme.get("input_activations")
        )
    arguments = PRESET_SCHEMES["W4A16_ASYM"]["weights"].model_copy(update={"group_size": GROUP})
    _compressed("compressed-tensors W4A16 in groups of 32", arguments, None)


def _compressed(case: str, arguments: Any, activations: Any) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    block = arguments.block_structure
    if block is not None:
        block = [16, 32]
        arguments = arguments.model_copy(update={"block_structure": block})
    scheme = QuantizationScheme(
        targets=["Linear"], weights=arguments, input_activations=activations
    )
    layout = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(layout.value)
    raw = weight()
    low, high = _ranges(raw.float(), str(arguments.strategy), arguments.group_size, block)
    state = {"weight": raw}
    if str(arguments.strategy).endswith("tensor_group"):
        state["weight_global_scale"] = generate_gparam(raw.float().min(), raw.float().max())
    scale, zero = calculate_qparams(low, high, arguments, state.get("weight_global_scale"))
    state["weight_scale"] = scale.to(torch.bfloat16) if "fp4" not in layout.value else scale
    if not arguments.symmetric:
        state["weight_zero_point"] = zero
    packed = compressor.compress(state, scheme)
    values = compressor.decompress(dict(packed), scheme)["weight"]
    members = {name: tensor for name, tensor in packed.items() if tensor is not None}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout.value,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    oracle = f"compressed-tensors {version('compressed-tensors')}, decompress"
    add(case, oracle, config, members, values)


def _ranges(raw: Any, strategy: str, group: int | None, block: Any) -> tuple[Any, Any]:
    """Return the lowest and the highest value of each part of a weight that shares a scale."""
    if "tensor" in strategy and "group" not in strategy:
        return raw.min()[None], raw.max()[None]
    if "channel" in strategy:
        return raw.amin(1, keepdim=True), raw.amax(1, keepdim=True)
    if block is not None:
        parts = raw.reshape(OUTPUTS // block[0], block[0], INPUTS // block[1], block[1])
        return parts.amin((1, 3)), parts.amax((1, 3))
    assert group is not None, "a group strategy has a size"
    parts = raw.reshape(OUTPUTS, INPUTS // group, group)
    return parts.amin(2), parts.amax(2)


# ---- ModelOpt and transformers


def modelopt() -> None:
    """Add NVFP4 and FP8, as ModelOpt exports them."""
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    oracle = f"nvidia-modelopt {version('nvidia-modelopt')}, dequantize"
    packed, scale, double = NVFP4QTensor.quantize(weight(), 16)
    values = packed.dequantize(
        torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16}
    )
    members = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": double}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    add("modelopt NVFP4", oracle, config, members, values)
    packed, scale = FP8QTensor.quantize(weight())
    values = packed.dequantize(torch.float32, scale=scale)
    members = {
        "weight": packed._quantized_data.view(torch.float8_e4m3fn),
        "weight_scale": scale.float(),
    }
    add("modelopt FP8", oracle, {"quant_method": "modelopt", "quant_algo": "FP8"}, members, values)


def transformers() -> None:
    """Add block-wise FP8, as transformers reads it."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    for case, powers in (("FP8 in blocks", False), ("FP8 in blocks with powers of two", True)):
        block = (16, 32)
        raw = weight().float()
        parts = raw.reshape(OUTPUTS // block[0], block[0], INPUTS // block[1], block[1])
        scale = parts.abs().amax((1, 3)) / 448
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if powers else scale
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        packed = (raw / wide).to(torch.float8_e4m3fn)
        values = Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)
        config: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": list(block)}
        if powers:
            config["scale_fmt"] = "ue8m0"
        oracle = f"transformers {version('transformers')}, Fp8Dequantize"
        add(case, oracle, config, {"weight": packed, "weight_scale_inv": scale}, values)


# ---- integers


def integer_parameters(raw: Any, bits: int, symmetric: bool, group: int) -> tuple[Any, Any]:
    """Return scales and zero points `[outputs, groups]` of round-to-nearest quantization."""
    parts = raw.float().reshape(OUTPUTS, INPUTS // group, group)
    top = 2**bits - 1
    if symmetric:
        scale = parts.abs().amax(2) * 2 / top
        return scale.half(), torch.full_like(scale, 2 ** (bits - 1)).half()
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scale = ((high - low) / top).half()
    return scale, torch.round(-low / scale.float()).clamp(0, top).half()


def gptq() -> None:
    """Add GPTQ with 4 and 8 bits, and with reordered inputs."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    kinds = [
        (4, True, False),
        (4, False, False),
        (8, True, False),
        (8, False, False),
        (4, True, True),
    ]
    for bits, symmetric, reordered in [*kinds, (4, False, True)]:
        raw = weight(torch.float16)
        scale, zero = integer_parameters(raw, bits, symmetric, GROUP)
        groups = torch.arange(INPUTS, dtype=torch.int32) // GROUP
        if reordered:
            groups = groups[torch.randperm(INPUTS)]
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
        linear.weight.data = raw
        layer = TorchLinear(
            bits=bits, group_size=GROUP, sym=symmetric, desc_act=reordered, in_features=INPUTS,
            out_features=OUTPUTS, bias=False, pack_dtype=torch.int32, register_buffers=True,
        )  # fmt: skip
        layer.pack_original(linear, scale, zero, groups)
        layer.post_init()
        values = layer.dequantize_weight().T
        for layout in ("gptq_v2", "gptq"):
            zeros = layer.qzeros
            if layout == "gptq":  # one less in each place
                each = sum(1 << place for place in range(0, 32, bits))
                zeros = ((zeros.long() - each) & 0xFFFFFFFF).to(torch.int64)
                zeros = torch.where(zeros >= 2**31, zeros - 2**32, zeros).to(torch.int32)
            members = {
                "qweight": layer.qweight,
                "qzeros": zeros,
                "scales": layer.scales,
                "g_idx": groups,
            }
            config = {
                "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric,
                "desc_act": reordered, "checkpoint_format": layout,
            }  # fmt: skip
            kind = f"{bits} bit{' symmetric' * symmetric}{' desc_act' * reordered}"
            oracle = f"gptqmodel {version_of_source('gptqmodel')}, dequantize_weight"
            if layout == "gptq" and not symmetric and reordered:
                continue
            add(f"{layout} {kind}", oracle, config, members, values)


def awq(source: Path) -> None:
    """Add AWQ with 4 and 8 bits."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm as dequantize_8

    spec = importlib.util.spec_from_file_location("packing", source / "awq/utils/packing_utils.py")
    assert spec is not None and spec.loader is not None
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    for bits in (4, 8):
        raw = weight(torch.float16)
        scale, zero = integer_parameters(raw, bits, False, GROUP)
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
        linear.weight.data = raw
        layer = AwqTorchLinear(
            bits=bits, group_size=GROUP, sym=False, desc_act=False, in_features=INPUTS,
            out_features=OUTPUTS, bias=False, register_buffers=True,
        )  # fmt: skip
        layer.pack(linear, scale, zero)
        read = packing.dequantize_gemm if bits == 4 else dequantize_8
        values = read(layer.qweight, layer.qzeros, layer.scales, bits, GROUP).T
        members = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
        config = {"quant_method": "awq", "bits": bits, "group_size": GROUP, "version": "gemm"}
        names = {4: "autoawq 0.2.9, dequantize_gemm"}
        oracle = names.get(bits, f"gptqmodel {version_of_source('gptqmodel')}, dequantize_gemm")
        add(f"awq {bits} bit", oracle, config, members, values)


def auto_round() -> None:
    """Add AutoRound's two layouts of GPTQ."""
    from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne

    for bits, symmetric in ((4, True), (4, False), (8, True)):
        for layout, made in (("auto_round", Plain), ("auto_round:auto_gptq", LessOne)):
            raw = weight(torch.float16)
            scale, zero = integer_parameters(raw, bits, symmetric, GROUP)
            linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
            linear.weight.data = raw
            layer = made(bits, GROUP, INPUTS, OUTPUTS, False, weight_dtype=torch.float16)
            layer.device = "cpu"
            layer.pack(linear, scale, zero.int(), None, device="cpu")
            values = layer(torch.eye(INPUTS, dtype=torch.float16)).T
            members = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
            config = {
                "quant_method": "auto-round", "bits": bits, "group_size": GROUP, "sym": symmetric,
                "packing_format": layout, "data_type": "int",
            }  # fmt: skip
            oracle = f"auto-round {version('auto-round')}, forward of the unit matrix"
            add(f"{layout} {bits} bit{' symmetric' * symmetric}", oracle, config, members, values)


def version_of_source(name: str) -> str:
    """Return the version of a package that is read from its source."""
    module = __import__(f"{name}.version", fromlist=["__version__"])
    return str(module.__version__)


if __name__ == "__main__":
    compressed_tensors()
    modelopt()
    transformers()
    gptq()
    awq(Path(sys.argv[1]))
    auto_round()
    save_file(tensors, SHARED, {"format": "pt", "cases": json.dumps(cases)})
    print(f"{len(cases)} cases, {SHARED.stat().st_size} bytes")
