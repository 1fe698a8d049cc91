"""The config.json of published models that mlx-lm's classes serve: the fields that each class reads.

They are those of the publishers' repos, as copies in other programs' tests have them (November 2026). MiniMax-M2.7
differs from M2 in `max_position_embeddings` alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]

_DENSE: Fields = {"model_type": "llama", "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
_QWEN: Fields = {
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_LATENT: Fields = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_YARN: Fields = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_slow": 1.0, "mscale_all_dim": 1.0}


@dataclass(frozen=True)
class MlxLmModel:
    """A published model of a class of mlx-lm.

    `short` is the name that people type, and `repo` the conversion in 4 bits that they use. `parameters` and `active`
    are the publisher's figures, in billions. `experts_mode` is the format of experts that are published in 4 bits.
    """

    name: str
    short: str
    repo: str
    parameters: float
    active: float
    config: Fields = field(repr=False, hash=False)
    experts_mode: str = ""

    @property
    def head_layers(self) -> int:
        """The layers of the MTP head in the publisher's repo. Conversions by mlx-lm lack them."""
        return int(self.config.get("num_nextn_predict_layers", 0))


MLX_LM_MODELS = (
    MlxLmModel(
        "Mistral-Small-24B",
        "mistral-small:24b",
        "mlx-community/Mistral-Small-24B-Instruct-2501-4bit",
        23.6,
        23.6,
        _DENSE
        | {
            "model_type": "mistral",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "intermediate_size": 32768,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "rope_theta": 1e8,
            "max_position_embeddings": 32768,
        },
    ),
    MlxLmModel(
        "NVIDIA-Nemotron-3-Nano-30B-A3B",
        "nemotron-3-nano:30b-a3b",
        "mlx-community/NVIDIA-Nemotron-3-Nano-30B-A3B-4bit",
        31.6,
        3.6,
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "hidden_size": 2688,
            "num_hidden_layers": 52,
            "intermediate_size": 1856,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "use_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "n_groups": 8,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": 131072,
            "max_position_embeddings": 262144,
        },
    ),
    MlxLmModel(
        "Llama-3.3-70B",
        "llama3.3:70b",
        "mlx-community/Llama-3.3-70B-Instruct-4bit",
        70.6,
        70.6,
        _DENSE
        | {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "rope_theta": 5e5,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    MlxLmModel(
        "gpt-oss-120b",
        "gpt-oss:120b",
        "mlx-community/gpt-oss-120b-MXFP4-Q4",
        116.8,
        5.1,
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 36,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "vocab_size": 201088,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "rope_scaling": {**_YARN, "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0},
            "max_position_embeddings": 131072,
        },
        experts_mode="mxfp4",
    ),
    MlxLmModel(
        "Mistral-Large",
        "mistral-large:123b",
        "mlx-community/Mistral-Large-Instruct-2407-4bit",
        122.6,
        122.6,
        _DENSE
        | {
            "model_type": "mistral",
            "hidden_size": 12288,
            "num_hidden_layers": 88,
            "intermediate_size": 28672,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 32768,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
    ),
    MlxLmModel(
        "MiniMax-M2.7",
        "minimax-m2.7:229b-a10b",
        "mlx-community/MiniMax-M2.7-4bit",
        228.7,
        10,
        {
            "model_type": "minimax_m2",
            "hidden_size": 3072,
            "num_hidden_layers": 62,
            "intermediate_size": 1536,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rotary_dim": 64,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "shared_intermediate_size": 0,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "vocab_size": 200064,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000,
            "max_position_embeddings": 204800,
            "tie_word_embeddings": False,
        },
    ),
    MlxLmModel(
        "Qwen3-235B-A22B",
        "qwen3:235b-a22b",
        "mlx-community/Qwen3-235B-A22B-Instruct-2507-4bit",
        235,
        22,
        _QWEN
        | {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "rope_theta": 5e6,
        },
    ),
    MlxLmModel(
        "GLM-4.7",
        "glm4.7:355b-a32b",
        "mlx-community/GLM-4.7-4bit",
        355,
        32,
        {
            "model_type": "glm4_moe",
            "hidden_size": 5120,
            "num_hidden_layers": 92,
            "intermediate_size": 12288,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 3,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-5,
            "vocab_size": 151552,
            "max_position_embeddings": 202752,
            "tie_word_embeddings": False,
            "num_nextn_predict_layers": 1,
        },
    ),
    MlxLmModel(
        "Qwen3-Coder-480B-A35B",
        "qwen3-coder:480b-a35b",
        "mlx-community/Qwen3-Coder-480B-A35B-Instruct-4bit",
        480,
        35,
        _QWEN
        | {
            "hidden_size": 6144,
            "num_hidden_layers": 62,
            "intermediate_size": 8192,
            "moe_intermediate_size": 2560,
            "num_experts": 160,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "rope_theta": 1e7,
        },
    ),
    MlxLmModel(
        "DeepSeek-V3.2",
        "deepseek-v3.2:671b-a37b",
        "mlx-community/DeepSeek-V3.2-4bit",
        671,
        37,
        _LATENT
        | {
            "model_type": "deepseek_v32",
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
            "vocab_size": 129280,
            "rope_theta": 10000.0,
            "rope_scaling": {**_YARN, "factor": 40, "beta_fast": 32, "mscale": 1.0},
            "max_position_embeddings": 163840,
            "num_nextn_predict_layers": 1,
        },
    ),
    MlxLmModel(
        "Kimi-K2",
        "kimi-k2:1t-a32b",
        "mlx-community/Kimi-K2-Instruct-4bit",
        1026,
        32,
        _LATENT
        | {
            "model_type": "kimi_k2",
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "vocab_size": 163840,
            "rope_theta": 50000.0,
            "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0},
            "max_position_embeddings": 131072,
        },
    ),
)

_REST = r"(-(instruct|thinking|base|mlx|bf16|fp8|mxfp4|q[2-8]|[2-8]-?bit|2[45]\d\d))*"
"""The words behind the name of a model in the names of its repos and conversions."""


def find_mlx_lm_model(text: str) -> MlxLmModel | None:
    """Return the model that a short name or the name of a repo without its owner means; None for any other text."""
    plain = re.sub(r"[:_@ ]", "-", text.strip().lower())
    return next((one for one in MLX_LM_MODELS if re.fullmatch(_pattern(one), plain)), None)


def _pattern(model: MlxLmModel) -> str:
    forms = (model.name.lower(), model.short.replace(":", "-"))
    loose = (re.sub(r"-(a\d+b)$", r"(-\1)?", form.replace(".", r"\.")).replace("-", "-?") for form in forms)
    return f"({'|'.join(loose)}){_REST}"
