"""Tiny configs of all model types of mlx-lm 0.32.2, small enough to build on a CPU within 50 ms.

Each config has four layers at least, so that three spans are possible, and each kind of layer that its type has. The
widths are multiples of 32, so that the weights can be quantized.
"""

from __future__ import annotations

import copy
from typing import Any

Entries = dict[str, Any]

HELPERS = frozenset(
    "activations base bitlinear_layers cache gated_delta mla pipeline rope_utils ssm switch_layers".split()
)
"""Modules of `mlx_lm.models` that are no model type."""

MISSING = {"olmo": "needs the package ai2-olmo; without it, the import of its module ends the process"}
"""Model types without a config here, and why."""

_BASE: Entries = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Fields that most types share. A type ignores the fields that it does not know."""

_KINDS = ["sliding_attention", "full_attention"] * 2
_WINDOW: Entries = {"sliding_window": 8, "layer_types": _KINDS}
_MOE: Entries = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_SHARED: Entries = {**_MOE, "shared_expert_intermediate_size": 32}
_ROUTED: Entries = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_LATENT: Entries = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
_DEEPSEEK: Entries = {**_ROUTED, **_LATENT}
_INDEXER: Entries = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}
_NO_BIAS: Entries = {"attention_bias": False, "mlp_bias": False}
_GRANITE: Entries = {
    **_NO_BIAS,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
}
_DELTA: Entries = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
_QWEN_MOE: Entries = {**_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []}
_BAILING: Entries = {
    **_MOE,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
    "topk_group": 1,
}
_LONGCAT: Entries = {
    **_LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 4,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
_LFM2: Entries = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
    "layer_types": ["conv", "full_attention"] * 2,
}
_MINICPM: Entries = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0}
_KDA: Entries = {
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 32,
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "model_max_length": 512,
}
_LLAMA4: Entries = {
    "attention_bias": False,
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 128,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "use_qk_norm": True,
}
_GEMMA3: Entries = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}
_GEMMA4: Entries = {
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "layer_types": [*_KINDS, *_KINDS[:2]],
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 128,
    "sliding_window_pattern": 2,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_theta": 10000.0},
    },
}
_YARN: Entries = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_PLAIN: Entries = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_BY_KIND: Entries = {"full_attention": {**_YARN}, "sliding_attention": {**_PLAIN}}
_MUSE: Entries = {
    **_WINDOW,
    "post_norm_eps": 1e-6,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.2,
    "rope_parameters": {**_PLAIN},
    "layer_rope_theta": [10000.0, 0.0] * 2,
}

_OWN: dict[str, Entries] = {
    "Klear": {**_MOE, "n_shared_experts": 1, "attention_bias": False, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "afm7": {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {**_MOE, **_WINDOW, "num_dense_layers": 1},
    "apertus": {**_NO_BIAS, "post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window": 8, "sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {**_LATENT, **_BAILING},
    "bailing_moe": {**_BAILING},
    "bailing_moe_linear": {**_BAILING},
    "bailing_moe_v3": {**_LATENT, **_BAILING, "moe_shared_expert_intermediate_size": 32},
    "bitnet": {},
    "cohere": {},
    "cohere2": {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {**_ROUTED},
    "deepseek_v2": {**_DEEPSEEK, "rope_scaling": {**_YARN, "type": "yarn"}},
    "deepseek_v3": {**_DEEPSEEK},
    "deepseek_v32": {**_DEEPSEEK, **_INDEXER},
    "deepseek_v41": {
        **_ROUTED,
        **_INDEXER,
        "scoring_func": "sqrtsoftplus",
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 32,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 8, 0],
        "kv_source_layer_ids": [0, 1, 2, 3],
        "index_source_layer_ids": [0, 1, 2, 3],
    },
    "dots1": {**_ROUTED},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone": {"head_dim": 16, "num_layers": 4, "layer_norm_epsilon": 1e-5},
    "exaone4": {"rope_scaling": {**_PLAIN}, "sliding_window": 8, "sliding_window_pattern": "LG"},
    "exaone_moe": {**_MOE, **_WINDOW, "num_shared_experts": 1, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_n_heads": 4},
    "gear": {**_WINDOW, "layer_types": [*_KINDS, "conv_mixer"], "num_hidden_layers": 5},
    "gemma": {},
    "gemma2": {},
    "gemma3": {"text_config": {"model_type": "gemma3_text", **_GEMMA3}},
    "gemma3_text": {**_GEMMA3},
    "gemma3n": {
        "text_config": {
            **_WINDOW,
            "model_type": "gemma3n",
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 32,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5] * 4,
            "altup_num_inputs": 4,
            "altup_coef_clip": 1.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4": {"text_config": {"model_type": "gemma4_text", **_GEMMA4}},
    "gemma4_text": {**_GEMMA4},
    "glm": {},
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        **_ROUTED,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "rope_scaling": None,
    },
    "glm4_moe_lite": {**_DEEPSEEK},
    "glm_moe_dsa": {**_DEEPSEEK, **_INDEXER, "attention_bias": False, "rope_parameters": {**_PLAIN}},
    "gpt2": {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "layer_norm_epsilon": 1e-5},
    "gpt_bigcode": {
        "n_embd": 64,
        "n_head": 4,
        "n_inner": 128,
        "n_layer": 4,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
    },
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": {**_YARN}},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "rotary_dim": 16},
    "granite": {**_GRANITE},
    "granitemoe": {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **_GRANITE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "helium": {**_NO_BIAS},
    "hunyuan": {
        "attention_bias": False,
        "moe_topk": 2,
        "num_experts": 4,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": 8},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 2,
        "expert_layer_period": 3,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3", **_DEEPSEEK}},
    "kimi_k3": {
        "text_config": {
            **_LATENT,
            **_KDA,
            "model_type": "kimi_linear",
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "attn_res_block_size": 2,
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 32,
        }
    },
    "kimi_linear": {**_LATENT, **_KDA},
    "kimi_vl": {"text_config": {"model_type": "deepseek_v3", **_DEEPSEEK}},
    "laguna": {
        **_SHARED,
        **_WINDOW,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_attention_heads_per_layer": [4, 4, 4, 4],
        "rope_parameters": copy.deepcopy(_ROPE_BY_KIND),
    },
    "lfm2": {**_LFM2},
    "lfm2-vl": {"text_config": {"model_type": "lfm2", **_LFM2}},
    "lfm2_moe": {**_LFM2, **_MOE, "num_dense_layers": 1, "use_expert_bias": True},
    "lille-130m": {
        "block_size": 512,
        "n_embd": 64,
        "n_head": 4,
        "n_kv_heads": 2,
        "n_layer": 4,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama": {},
    "llama4": {"text_config": {"model_type": "llama4_text", **_LLAMA4}},
    "llama4_text": {**_LLAMA4, "no_rope_layers": [1, 1, 0, 1]},
    "longcat_flash": {**_LONGCAT},
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2},
    "mamba": {"state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
    "mamba2": {
        "num_heads": 4,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
        "tie_word_embeddings": True,
    },
    "mellum": {**_MOE, **_WINDOW, "rope_parameters": copy.deepcopy(_ROPE_BY_KIND)},
    "mimo": {},
    "mimo_v2_flash": {
        **_ROUTED,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 32,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {**_MINICPM},
    "minicpm3": {
        **_LATENT,
        **_MINICPM,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "original_max_position_embeddings": 512},
    },
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "rotary_dim": 16},
    "minimax_m3_vl": {
        "text_config": {
            "model_type": "minimax_m3",
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 32,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 0, 1],
            },
        }
    },
    "ministral3": {
        **_WINDOW,
        "rope_parameters": {
            **_YARN,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "mistral3": {"text_config": {"model_type": "llama"}},
    "mistral4": {
        **_DEEPSEEK,
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "muse_glimmer": {**_MUSE},
    "muse_spark": {
        "text_config": {
            **_MUSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 32,
            "moe_intermediate_size": 32,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": group, "no_op": no_op, "replace_with_linear": linear},
                "ffn": {"ffn_mult": 1.3125, "no_op": False, "replace_with_linear": False},
            }
            for group, no_op, linear in ((2, False, False), (None, True, False), (None, False, True), (4, False, False))
        ]
    },
    "nemotron_h": {
        **_ROUTED,
        **_NO_BIAS,
        "num_hidden_layers": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 32,
        "hybrid_override_pattern": ["M", "*", "-", "M", "E", "*"],
    },
    "olmo2": {},
    "olmo3": {**_WINDOW},
    "olmo_hybrid": {
        **_DELTA,
        "attention_bias": False,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "olmoe": {**_MOE},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 64,
        "ffn_dim_divisor": 32,
        "num_query_heads": [2, 2, 4, 4],
        "num_kv_heads": [1, 1, 2, 2],
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi": {},
    "phi3": {},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "num_local_experts": 4,
        "rope_scaling": {
            "long_factor": [1.0] * 8,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0] * 8,
            "short_mscale": 1.2,
            "type": "longrope",
        },
    },
    "phixtral": {"model_dim": 64, "num_heads": 4, "num_layers": 4, "rotary_dim": 16},
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 32,
        "attention_window_size": 8,
        "full_attention_idx": [3],
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
    },
    "plamo3": {"window_size": 8, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": f"model.layers.{layer}.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}
            for layer in range(4)
        ],
        "text_config": {"model_type": "qwen3_5_text", **_DELTA},
    },
    "qwen": {"kv_channels": 16, "intermediate_size": 256},
    "qwen2": {},
    "qwen2_moe": {**_SHARED},
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3": {},
    "qwen3_5": {"text_config": {"model_type": "qwen3_5_text", **_DELTA}},
    "qwen3_5_moe": {"text_config": {"model_type": "qwen3_5_moe_text", **_DELTA, **_SHARED}},
    "qwen3_moe": {**_QWEN_MOE},
    "qwen3_next": {**_DELTA, **_SHARED, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe", **_QWEN_MOE}},
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "seed_oss": {},
    "smollm3": {**_WINDOW, "no_rope_layer_interval": 2},
    "solar_open": {**_ROUTED, "partial_rotary_factor": 1.0},
    "spark2_5": {**_WINDOW, "rope_parameters": copy.deepcopy(_ROPE_BY_KIND)},
    "stablelm": {"use_qkv_bias": False, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    "starcoder2": {},
    "step3p5": {
        **_WINDOW,
        "num_attention_groups": 2,
        "partial_rotary_factors": [1.0, 0.5] * 2,
        "rope_theta": [10000.0] * 4,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {**_LATENT},
}
"""Entries of each model type beside those of `_BASE`."""

MODEL_TYPES = tuple(_OWN)


def tiny_config(model_type: str, vocabulary: int = 128) -> Entries:
    """Return the config of the tiny model of `model_type`, as its `config.json` has it."""
    own = copy.deepcopy(_OWN[model_type])
    sizes = {"vocab_size": vocabulary, "num_vocab": vocabulary}
    for entries in (own, own.get("text_config", {})):
        if "vocab_size_per_layer_input" in entries:
            entries["vocab_size_per_layer_input"] = vocabulary
    if "text_config" in own:
        own["text_config"] = {**_BASE, **sizes, **own["text_config"]}
        return {"model_type": model_type, "vocab_size": vocabulary, **own}
    return {"model_type": model_type, **_BASE, **sizes, **own}
