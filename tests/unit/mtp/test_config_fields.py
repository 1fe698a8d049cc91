"""The fields of config.json: odd values are named, and configs that transformers writes are those of the publisher."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp.checkpoint.families.qwen3_5 import HybridFamily
from mtp.checkpoint.format.config import ModelConfig
from mtp.vision.tower import VisionConfig
from proto.errors import CheckpointError

PUBLISHED = Path(__file__).parents[2] / "published"

CONFIGS = {
    name: json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    for name in (
        "qwen3.5-27b-bf16",
        "qwen3.5-35b-a3b-bf16",
        "mlx-qwen3.5-9b-8bit",
        "qwen3-next-80b-a3b-bf16",
        "qwen3.8-flash-next-bf16",
        "glm-5.3-flash-bf16",
    )
}

PATTERN = ["linear_attention"] * 3 + ["full_attention"]

ODD: list[Any] = [
    math.nan, math.inf, -math.inf, -1, 0, 1, 0.5, 1e8, 10**8, 1e30, 10**30, 10**400, "x", "", [], [1], [-1], ["x"],
    [None], [[]], {}, {"x": 1}, None, True, False,
]  # fmt: skip

SECONDS = 1.0
"""Seconds of processor time for one config."""


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field, those of objects inside too."""
    for name, value in config.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


def replaced(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of `config` with `value` at `path`."""
    found = copy.deepcopy(config)
    place = found
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return found


def open_config(fields: dict[str, Any]) -> ModelConfig:
    """Parse a config and ask it for everything that needs no weights."""
    config = ModelConfig.parse(Path("model") / "config.json", copy.deepcopy(fields))
    assert len(config.shape.kinds) == config.num_layers
    assert config.shape.hop_width >= config.hidden_size
    kv_format = config.kv_format(None)
    assert config.shape.head is not None and config.shape.head.token_bytes(2, kv_format) > 0
    assert all(layer.token_bytes(2, kv_format) or layer.sequence_bytes(2) > 0 for layer in config.shape.layers)
    assert math.isfinite(args_of(config).rope_theta)
    return config


def args_of(config: ModelConfig) -> Any:
    """Return the arguments of mlx-lm's modules."""
    assert isinstance(config.family, HybridFamily)
    return config.family.text_args(config.text())


@pytest.mark.parametrize("name", CONFIGS)
def test_an_odd_value_of_any_field_loads_or_is_named(name: str) -> None:
    """No value ends in another error or takes long. The error names the field, or one that depends on it."""
    wrong = []
    for path in places(CONFIGS[name]):
        for value in ODD:
            started = time.process_time()
            try:
                open_config(replaced(CONFIGS[name], path, value))
            except CheckpointError as error:
                assert str(error).startswith("model/config.json: ")
            except Exception as error:
                wrong.append(f"{'.'.join(path)} = {value!r:.20}: {error!r:.100}")
            if time.process_time() - started > SECONDS:
                wrong.append(f"{'.'.join(path)} = {value!r:.20}: {time.process_time() - started:.1f} s")
    assert not wrong, "\n".join(wrong)


def test_an_odd_value_of_the_vision_part_loads_or_is_named() -> None:
    config = CONFIGS["qwen3.5-27b-bf16"]
    whole, size = (
        config["vision_config"] | {"rope_parameters": {"rope_theta": 1e4}},
        config["text_config"]["hidden_size"],
    )
    assert VisionConfig.parse(Path("config.json"), whole, size)
    for path in places(whole):
        for value in ODD:
            with contextlib.suppress(CheckpointError):
                found = VisionConfig.parse(Path("config.json"), replaced(whole, path, value), size)
                assert 0 < found.theta < math.inf


@pytest.mark.parametrize("name", CONFIGS)
def test_the_error_names_the_field(name: str) -> None:
    """A size that is no number, and one far above every model, is refused by its own name."""
    text = CONFIGS[name].get("text_config", CONFIGS[name])
    path = ("text_config",) if "text_config" in CONFIGS[name] else ()
    sizes = [field for field, value in text.items() if type(value) is int and value > 1 and field in RULED]
    assert len(sizes) > 8
    values: tuple[Any, ...] = (math.nan, "x", [], -1, 1e8, 10**30)
    for field in sizes:
        for value in values:
            with pytest.raises(CheckpointError, match=field):
                open_config(replaced(CONFIGS[name], (*path, field), value))


RULED = {
    "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings",
    "intermediate_size", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_conv_kernel_dim", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "full_attention_interval", "hc_mult", "index_topk", "index_kpool",
    "q_lora_rank", "kv_lora_rank", "v_head_dim", "n_routed_experts", "hc_count", "indexer_budget",
    "first_k_dense_replace",
}  # fmt: skip


DENSE, NEXT = "qwen3.5-27b-bf16", "qwen3-next-80b-a3b-bf16"
FLASH_NEXT, GLM = "qwen3.8-flash-next-bf16", "glm-5.3-flash-bf16"
POSITIVE = "It must be a positive integer"

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (DENSE, {"hidden_size": None}, "hidden_size is missing"),
    (DENSE, {"hidden_size": "64"}, "hidden_size is '64'"),
    (DENSE, {"vocab_size": True}, "vocab_size is True"),
    (DENSE, {"layer_types": ["linear_attention"] * 64}, "layer_types"),
    (DENSE, {"layer_types": PATTERN * 16, "full_attention_interval": 2}, "layer_types"),
    (DENSE, {"rope_parameters": {}}, "rope_theta"),
    (DENSE, {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    (DENSE, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    (DENSE, {"linear_num_key_heads": 5}, "linear_num_key_heads 5"),
    (DENSE, {"quantization_config": {"quant_method": "bitsandbytes"}}, "by 'bitsandbytes', which is not"),
    (DENSE, {"quantization_config": "hqq"}, "by 'hqq', which is not"),
    (NEXT, {"mlp_only_layers": None}, "mlp_only_layers is None. It must be a list of layers"),
    (NEXT, {"mlp_only_layers": ["0"]}, "mlp_only_layers is "),
    (NEXT, {"decoder_sparse_step": 0}, f"decoder_sparse_step is 0. {POSITIVE}"),
    (NEXT, {"norm_topk_prob": "no"}, "norm_topk_prob is 'no'. It must be true or false"),
    (NEXT, {"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is missing"),
    (NEXT, {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    (NEXT, {"rope_theta": None}, "rope_theta"),
    (FLASH_NEXT, {"indexer_compress_ratio": 5}, "indexer_compress_ratio 5"),
    (FLASH_NEXT, {"ple_layer_ids": ["2"]}, "ple_layer_ids"),
    (FLASH_NEXT, {"hc_count": 1}, "hc_count is 1. It must be an integer from 2"),
    (FLASH_NEXT, {"ngram_size": 1}, "ngram_size is 1"),
    (FLASH_NEXT, {"ple_embed_dim": "a"}, "ple_embed_dim is 'a'"),
    (FLASH_NEXT, {"head_dim": "x"}, f"head_dim is 'x'. {POSITIVE}"),
    (FLASH_NEXT, {"full_attention_interval": "4"}, f"full_attention_interval is '4'. {POSITIVE}"),
    (FLASH_NEXT, {"num_attention_heads": None}, "num_attention_heads is missing"),
    (GLM, {"indexer_types": ["full"] * 44 + ["shared"]}, "indexer_types has layers without an indexer"),
    (GLM, {"linear_attn_config": {"gate_lower_bound": 0}}, "gate_lower_bound"),
    (GLM, {"linear_attn_config": {"num_heads": 0}}, "num_heads is 0"),
    (GLM, {"index_topk": 63}, "index_topk 63 is not a multiple of index_kpool 4"),
    (GLM, {"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64, and only 0"),
    (GLM, {"scoring_func": "softmax"}, "scoring_func is 'softmax', and only 'sigmoid'"),
    (GLM, {"hc_mult": None}, "hc_mult is missing"),
    (GLM, {"n_group": 4}, "n_group is 4, and only 1"),
    (GLM, {"swiglu_limit": 0}, "swiglu_limit is 0"),
    (GLM, {"layer_types": ["linear_attention"] * 45}, "layer_types"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_a_wrong_field_is_named_with_its_file(name: str, change: dict[str, Any], message: str) -> None:
    """A field that is not supported is refused when the config of any family is read."""
    config = copy.deepcopy(CONFIGS[name])
    text = config.get("text_config", config)
    for field, value in change.items():
        text[field] = text[field] | value if field == "linear_attn_config" else value
    with pytest.raises(CheckpointError, match=r"^model/config\.json: .*" + message):
        open_config(config)


# ---- configs that transformers writes


def saved(config: dict[str, Any], folder: Path, *, own: bool) -> dict[str, Any]:
    """Return the config.json that transformers writes for `config`, with its `own` fields alone."""
    from dataclasses import fields

    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[config["model_type"]]
    plain = {name: value for name, value in config.items() if not name.startswith("quantization")}
    found = kind.from_dict(copy.deepcopy(plain))
    if own:
        text = found.get_text_config()
        known = {field.name for field in fields(type(text))}
        kept = {name: value for name, value in text.to_dict().items() if name in known}
        found = kind(text_config=kept) if "text_config" in config else kind(**kept)
    found.save_pretrained(folder)
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize("own", [False, True], ids=["all fields", "own fields"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_transformers_saved_is_that_of_the_publisher(name: str, own: bool, tmp_path: Path) -> None:
    """Every size and argument is the same. Only the head is not announced among transformers' own fields."""
    before, after = open_config(CONFIGS[name]), open_config(saved(CONFIGS[name], tmp_path, own=own))
    names = ("hidden_size", "num_layers", "shape", "vocab_size", "max_positions", "num_experts", "num_kv_heads",
             "head_dim", "tie_word_embeddings", "model_type", "image_sections")  # fmt: skip
    assert [(n, getattr(after, n)) for n in names] == [(n, getattr(before, n)) for n in names]
    assert _args(after) == _args(before)
    assert own or after.mtp_layers == before.mtp_layers


def _args(config: ModelConfig) -> list[Any]:
    """Return the arguments of mlx-lm's modules, and those of the family's own."""
    from mtp.flash_next.args import FlashNextArgs
    from mtp.glm_flash.args import GlmArgs

    own = {"qwen4_exp": FlashNextArgs, "glm5_next": GlmArgs}.get(config.model_type)
    args = vars(args_of(config))
    rope = {name: args[name] for name in ("rope_theta", "partial_rotary_factor")}
    plain = {name: value for name, value in args.items() if not name.startswith("rope")}
    return [plain, rope, own.of(config.text()) if own else None]  # type: ignore[attr-defined]


def test_both_forms_of_glms_delta_attention_are_read() -> None:
    """The publisher's object wins over the fields beside it, as in transformers. A null bound is -5 or none."""
    text = dict(CONFIGS["glm-5.3-flash-bf16"]["text_config"])
    delta = text.pop("linear_attn_config")
    flat = {"linear_num_heads": 32, "linear_head_dim": 64, "linear_conv_kernel_dim": 3, "linear_lower_bound": None}

    def read(**fields: Any) -> tuple[int, int, int, float | None]:
        from mtp.glm_flash.args import GlmArgs

        found = GlmArgs.of(open_config({"model_type": "glm5_next", "text_config": text | fields}).text()).delta
        return found.heads, found.head_dim, found.kernel, found.bound

    assert read(**flat) == (32, 64, 3, None)
    assert read(**flat, linear_attn_config=delta) == (64, 128, 4, -5.0)
    assert read(**flat, linear_attn_config={"num_heads": 16}) == (16, 64, 3, -5.0)
    assert read(linear_attn_config=delta | {"gate_lower_bound": None, "safe_gate": False})[3] is None
    with pytest.raises(CheckpointError, match="linear_num_heads is missing"):
        read()
    with pytest.raises(CheckpointError, match="linear_attn_config is 'x'"):
        read(**flat, linear_attn_config="x")


@pytest.mark.parametrize("interval", [2, 3, 8])
def test_the_interval_follows_from_the_kinds_of_layers(interval: int) -> None:
    """transformers writes no full_attention_interval."""
    config = copy.deepcopy(CONFIGS["qwen3.5-27b-bf16"])
    text = config["text_config"]
    text.pop("full_attention_interval", None)
    count = text["num_hidden_layers"]
    text["layer_types"] = ["linear_attention" if n % interval else "full_attention" for n in range(1, count + 1)]
    found = open_config(config)
    assert found.shape.kinds.index("attention") == interval - 1
    assert args_of(found).full_attention_interval == interval
