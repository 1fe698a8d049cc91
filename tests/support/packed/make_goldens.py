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


# ---- floating-point weights


def compressed_tensors() -> None:
    """Add FP8 and NVFP4, as llm-compressor saves them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    for name in ("FP8_DYNAMIC", "NVFP4A16"):
        preset = PRESET_SCHEMES[name]
        arguments = preset["weights"]
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=arguments,
            input_activations=preset.get("input_activations"),
        )
        layout = infer_module_format(torch.nn.Linear, scheme).value
        raw = weight()
        state = {"weight": raw}
        if name == "NVFP4A16":
            state["weight_global_scale"] = generate_gparam(raw.float().min(), raw.float().max())
        parts = raw.float().reshape(OUTPUTS, -1, arguments.group_size or INPUTS)
        ranges = parts.amin(2), parts.amax(2)
        scale, _ = calculate_qparams(*ranges, arguments, state.get("weight_global_scale"))
        state["weight_scale"] = scale if name == "NVFP4A16" else scale.to(torch.bfloat16)
        compressor = BaseCompressor.get_value_from_registry(layout)
        packed = compressor.compress(state, scheme)
        values = compressor.decompress(dict(packed), scheme)["weight"]
        config = {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }
        oracle = f"compressed-tensors {version('compressed-tensors')}, decompress"
        add(f"compressed-tensors {name}", oracle, config, packed, values)


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

    block = (16, 32)
    raw = weight().float()
    parts = raw.reshape(OUTPUTS // block[0], block[0], INPUTS // block[1], block[1])
    scale = parts.abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    packed = (raw / wide).to(torch.float8_e4m3fn)
    values = Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    oracle = f"transformers {version('transformers')}, Fp8Dequantize"
    members = {"weight": packed, "weight_scale_inv": scale}
    add("FP8 in blocks", oracle, config, members, values)


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
    """Add GPTQ with 4 and 8 bits in both layouts of zero points, and with reordered inputs."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    kinds: list[tuple[str, int, bool, bool]] = [
        ("gptq_v2", 4, False, False),
        ("gptq", 4, True, False),
        ("gptq", 8, False, False),
        ("gptq", 4, True, True),
    ]
    for layout, bits, symmetric, reordered in kinds:
        raw = weight(torch.float16)
        scale, zero = integer_parameters(raw, bits, symmetric, GROUP)
        groups = torch.arange(INPUTS, dtype=torch.int32) // GROUP
        if reordered:
            groups = groups[torch.randperm(INPUTS)]
        layer = TorchLinear(
            bits=bits, group_size=GROUP, sym=symmetric, desc_act=reordered, in_features=INPUTS,
            out_features=OUTPUTS, bias=False, pack_dtype=torch.int32, register_buffers=True,
        )  # fmt: skip
        layer.pack_original(linear(raw), scale, zero, groups)
        layer.post_init()
        values = layer.dequantize_weight().T
        zeros = layer.qzeros
        if layout == "gptq":  # one less in each place
            each = sum(1 << place for place in range(0, 32, bits))
            zeros = ((zeros.long() - each) & 0xFFFFFFFF).to(torch.int64)
            zeros = torch.where(zeros >= 2**31, zeros - 2**32, zeros).to(torch.int32)
        members = {
            "qweight": layer.qweight, "qzeros": zeros, "scales": layer.scales, "g_idx": groups,
        }  # fmt: skip
        config = {
            "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric,
            "desc_act": reordered, "checkpoint_format": layout,
        }  # fmt: skip
        kind = f"{bits} bit{' symmetric' * symmetric}{' desc_act' * reordered}"
        oracle = f"gptqmodel {version_of_source('gptqmodel')}, dequantize_weight"
        add(f"{layout} {kind}", oracle, config, members, values)


def linear(raw: torch.Tensor) -> torch.nn.Linear:
    """Return a layer with the weight `raw`."""
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=raw.dtype)
    layer.weight.data = raw
    return layer


def awq(source: Path) -> None:
    """Add AWQ with 4 bits."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    spec = importlib.util.spec_from_file_location("packing", source / "awq/utils/packing_utils.py")
    assert spec is not None and spec.loader is not None
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    raw = weight(torch.float16)
    scale, zero = integer_parameters(raw, 4, False, GROUP)
    layer = AwqTorchLinear(
        bits=4, group_size=GROUP, sym=False, desc_act=False, in_features=INPUTS,
        out_features=OUTPUTS, bias=False, register_buffers=True,
    )  # fmt: skip
    layer.pack(linear(raw), scale, zero)
    values = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP).T
    members = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    add("awq 4 bit", "autoawq 0.2.9, dequantize_gemm", config, members, values)


def auto_round() -> None:
    """Add AutoRound's two layouts of GPTQ."""
    from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne

    for layout, made in (("auto_round", Plain), ("auto_round:auto_gptq", LessOne)):
        raw = weight(torch.float16)
        scale, zero = integer_parameters(raw, 4, False, GROUP)
        layer = made(4, GROUP, INPUTS, OUTPUTS, False, weight_dtype=torch.float16)
        layer.device = "cpu"
        layer.pack(linear(raw), scale, zero.int(), None, device="cpu")
        values = layer(torch.eye(INPUTS, dtype=torch.float16)).T
        members = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
        config = {
            "quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False,
            "packing_format": layout, "data_type": "int",
        }  # fmt: skip
        oracle = f"auto-round {version('auto-round')}, forward of the unit matrix"
        add(f"{layout} 4 bit", oracle, config, members, values)


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
