"""Macs by their chip and memory, and the speeds that people published of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.planning.capacity import model_costs
from coordinator.planning.chips import BANDWIDTHS, mac_spec, mac_specs
from coordinator.planning.groups import Planning, plan_machines, predict_plans
from coordinator.planning.plan import make_plan
from coordinator.planning.recommend import joined_spec
from mtp.checkpoint.families.shape import STOCK_LAUNCHES
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.known_repos import MlxLmModel
from mtp.checkpoint.hub.published import converted_headers, find_published
from proto.errors import UsageError

PUBLISHED = [
    ("Qwen3.5-27B", 4, "M4 Pro 64GB", 15.5),  # mlx-lm's request 990
    ("Qwen3.5-27B", 4, "M5 Pro 64GB", 16.0),  # llmfit's request 811
    ("Qwen3.5-27B", 4, "M5 Max 128GB", 33.0),  # mlx-vlm's request 2014
    ("Qwen3.5-27B", 4, "M5 Max 48GB", 28.9),  # llmfit's measurements of users
    ("Qwen3.5-27B", 4, "M3 Ultra 256GB", 33.0),  # oMLX's issues 2516 and 3695
    ("Qwen3.5-27B", 6, "M5 Max 128GB", 22.5),  # mlx-serve's issue 120
    ("Qwen3.5-9B", 4, "M4 Pro 24GB", 44.6),  # Rapid-MLX's issue 567, and llmfit
    ("Qwen3.5-9B", 4, "M3 Ultra 256GB", 101.0),  # Rapid-MLX's issue 567
    ("Qwen3.5-4B", 4, "M4 Pro 24GB", 72.4),  # llmfit
    ("Qwen3.5-4B", 4, "M3 Ultra 256GB", 170.0),  # Rapid-MLX's issue 3115
    ("Qwen3.5-2B", 4, "M5 Max 48GB", 174.0),  # llmfit
    ("Qwen3.5-0.8B", 4, "M5 Max 48GB", 319.0),  # llmfit
    ("Qwen3.5-35B-A3B", 4, "M5 Pro 64GB", 80.5),  # llmfit's request 811
    ("Qwen3.5-35B-A3B", 4, "M5 Max 128GB", 124.0),  # Mac-MLX's issue 24, and llmfit
    ("Qwen3.5-35B-A3B", 4, "M2 Max 64GB", 74.5),  # Rapid-MLX's request 1065
    ("Qwen3.5-35B-A3B", 4, "M3 Ultra 256GB", 92.3),  # Rapid-MLX's request 183
    ("GLM-5.3-Flash", 4, "M3 Ultra 256GB", 46.9),  # TensorFold's recipe, a short answer
    ("Mistral-Small-24B", 4, "M3 Ultra 256GB", 47.2),  # vllm-mlx's scorecard, of 3.2
    ("gpt-oss-120b", None, "M2 Max 96GB", 43.9),  # the card of MoringLabs' GPT-OSS-120B-MLX-3.6bit, of OpenAI's files
    ("MiniMax-M2.7", 4, "M3 Ultra 256GB", 49.9),  # vllm-mlx's scorecard, of M2.5
    ("Qwen3-Coder-480B-A35B", 4, "M3 Ultra 512GB", 24.0),  # an author of mlx-lm, by simonwillison.net
]

EIGHT: Any = {
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
DENSE = [
    ("llama", {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256}, 110.45),
    (
        "qwen3",
        {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
        | {"head_dim": 128},
        103.74,
    ),
    (
        "qwen2",
        {"hidden_size": 5120, "num_hidden_layers": 48, "intermediate_size": 13824, "vocab_size": 152064}
        | {"num_attention_heads": 40},
        60.47,
    ),
]
"""Llama-3.1-8B, Qwen3-8B and Qwen2.5-14B in 4 bits on an M3 Ultra after 2,048 tokens: Rapid-MLX's 586, 630 and 636."""


def predicted(name: str, bits: int | None, mac: str) -> float:
    """Return the tokens a second of one stream without drafts."""
    model = find_published(name)
    assert model is not None
    return speed(converted_headers(model, bits), mac)


def speed(checkpoint: Checkpoint, *macs: str) -> float:
    """Return the tokens a second of one stream over `macs`, without drafts and hops."""
    return 1 / make_plan(model_costs(checkpoint, with_head=False), mac_specs(macs)).pass_seconds


@pytest.mark.parametrize(("name", "bits", "mac", "measured"), PUBLISHED)
def test_predictions_are_within_a_third_of_what_people_measured(
    name: str, bits: int | None, mac: str, measured: float
) -> None:
    assert 2 / 3 < predicted(name, bits, mac) / measured < 4 / 3


@pytest.mark.parametrize(("kind", "fields", "measured"), DENSE)
def test_dense_models_of_mlx_lm_come_within_an_eighth(kind: str, fields: Any, measured: float) -> None:
    model = MlxLmModel(kind, kind, kind, 0, 0, EIGHT | fields | {"model_type": kind})
    assert speed(converted_headers(model, 4), "M3 Ultra 256GB") == pytest.approx(measured, rel=1 / 8)


def test_models_of_mlx_lm_come_within_a_tenth() -> None:
    """Layers with experts too, which launch more."""
    own = [row for row in PUBLISHED if isinstance(find_published(row[0]), MlxLmModel)]
    assert len(own) == 4
    for name, bits, mac, measured in own:
        assert predicted(name, bits, mac) == pytest.approx(measured, rel=0.1), name


def test_kimi_as_published_is_slower_than_in_4_bits() -> None:
    """Kimi-K2-Thinking has experts in 4 bits and all else in BF16: 658 GB, and 15 tokens/s on two M3 Ultras.

    The files and the speed are those of an author of mlx-lm, by simonwillison.net.
    """
    model = find_published("kimi-k2-thinking")
    assert isinstance(model, MlxLmModel)
    native = converted_headers(replace(model, experts_mode="affine"), None)
    assert sum(native.part_bytes().values()) == pytest.approx(658e9, rel=0.002)
    assert speed(native, *["M3 Ultra 512GB"] * 2) == pytest.approx(15, rel=1 / 8)
    assert speed(converted_headers(model, 4), *["M3 Ultra 512GB"] * 2) > 22


def test_glm_follows_from_its_launches_and_rows() -> None:
    """TensorFold's 1,197 kernels a token have 42 to 47 tokens/s, and 48 to 64 with one draft, on an M3 Ultra.

    Programs before them, with 3,578 kernels, have 27.8 (Rapid-MLX) and 29.5 (mlx-vlm's request 2030).
    """
    model = find_published("glm5.3:flash")
    assert model is not None
    planning = Planning.of(converted_headers(model, 4), 4096)
    (found,) = predict_plans(planning, plan_machines([mac_spec("M3 Ultra 256GB")]))
    plain, one, two, three = (1 / seconds for seconds in (found.token, *found.drafted))
    assert 42 < plain < 47.5 and 48 < one < 64.5
    assert max(two, three) < 1.02 * one, "a second draft does not pay"
    unfused = replace(planning.costs_of(1), launches=3578 / 45 / STOCK_LAUNCHES, draft_seconds=0.0)
    assert 1 / make_plan(unfused, mac_specs(["M3 Ultra 256GB"])).pass_seconds == pytest.approx(28.6, rel=0.1)


def test_27b_on_an_m4_pro_comes_within_a_tenth() -> None:
    assert predicted("qwen3.5:27b", 4, "M4 Pro 64GB") == pytest.approx(15.5, rel=0.1)


@pytest.mark.parametrize("text", ["M4 Pro 64GB", "m4 pro 64", "Apple M4 Pro, 64 GB", "M4-Pro-64GB"])
def test_a_mac_is_written_as_people_write_it(text: str) -> None:
    spec = mac_spec(text)
    assert spec.name == "M4 Pro 64GB"
    assert spec.memory_limit == int(64 * 2**30 * 0.81 * 0.85)


@pytest.mark.parametrize("text", ["", "M4", "64GB", "M4 Giga 64GB", "M9 64GB", "RTX 4090 24GB", "M4 4GB"])
def test_other_machines_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="--mac"):
        mac_spec(text)


def test_variants_differ_by_their_memory() -> None:
    """The smaller M4 Max and M5 Max are sold with 36 GB only. Equal Macs get names of their own."""
    slow, fast = mac_spec("M4 Max 36GB"), mac_spec("M4 Max 48GB")
    assert fast.speed / slow.speed == pytest.approx(546 / 410)
    assert all(0 in table for table in BANDWIDTHS.values())
    for text in ("M4 Max 36GB", "M4 Max 64GB", "M3 Max 96GB", "M3 Max 128GB", "M6 16GB", "M4 Pro 64GB"):
        mac, chip = mac_spec(text), f"Apple {text.rpartition(' ')[0]}"
        busy = joined_spec(text, int(0.97 * mac.memory_limit), 1e9, chip)
        assert busy.speed == pytest.approx(mac.speed), "a worker that was busy has measured its Mac"
    assert joined_spec("box", 2**33, 1e9, "AMD EPYC").speed == 0.01
    names = [spec.name for spec in mac_specs(["M4 16GB"] * 3)]
    assert names == ["M4 16GB", "M4 16GB 2", "M4 16GB 3"]
