"""The model in torch: transformers' Qwen3.5 backbone, and the MTP head, which transformers does not implement."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextModel,
    apply_rotary_pos_emb,
)

from mtp.builtin.training.tokenizer import VOCAB_SIZE

MAX_POSITIONS = 8192
FULL_ATTENTION = 3  # index of the first full-attention layer; the head's layer is of that kind

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 576,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_POSITIONS,
    # The family rotates a quarter of 256 dimensions, 32 frequencies shared out as [11, 11, 10]: here 8.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "use_cache": True,
}

Rotation = tuple[Tensor, Tensor]


class MtpHead(nn.Module):
    """The head, which predicts token t+2 from the normed hidden state at t and the embedding of token t+1."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, FULL_ATTENTION)])
        self.norm = Qwen3_5RMSNorm(size, eps)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        rotation: Rotation,
        past: Rotation | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Rotation]:
        """Run one step of the head.

        Args:
            hidden: [B, S, H], normed: the backbone's, or this head's own output when drafts are chained.
            embedding: [B, S, H] of the token after each hidden state's.
            rotation: cos and sin of the pairs' positions.
            past: keys and values [B, kv_heads, P, D] before this step's own.
            mask: [S, P + S] of keys each pair may attend to; None is causal, without a past.

        Returns: output [B, S, H], after the head's norm, and all keys and values [B, kv_heads, P + S, D].
        """
        layer = self.layers[0]
        attention = layer.self_attn
        x = self.fc(
            torch.cat(
                [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], dim=-1
            )
        )
        normed = layer.input_layernorm(x)
        shape = (*x.shape[:2], -1, attention.head_dim)
        query, gate = (
            attention.q_proj(normed).view(*shape[:3], 2 * attention.head_dim).chunk(2, dim=-1)
        )
        query = attention.q_norm(query).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(normed).view(shape)).transpose(1, 2)
        value = attention.v_proj(normed).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        groups = (
            attention.num_key_value_groups
        )  # repeated here, since grouped attention with a mask has no fast kernel
        wide_key, wide_value = (
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
        )
        mixed = F.scaled_dot_product_attention(
            query.to(value.dtype),
            wide_key.to(value.dtype),
            wide_value,
            attn_mask=mask,
            is_causal=mask is None,
        )
        mixed = mixed.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid()
        x = x + attention.o_proj(mixed)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), (key, value)


class MtpModel(nn.Module):
    """Backbone and head with their shared embedding, which is the output matrix too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        config = Qwen3_5TextConfig(**TEXT_CONFIG)
        config._attn_implementation = "sdpa"
        self.config = config
        self.dropout = dropout
        self.backbone = Qwen3_5TextModel(config)
        self.mtp = MtpHead(config)
        for (
            module
        ) in self.mtp.modules():  # the initialisation of the backbone does not include the head
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def rotation(self, positions: Tensor) -> Rotation:
        """Return cos and sin for positions [S]."""
        like = self.backbone.embed_tokens.weight
        cos, sin = self.backbone.rotary_emb(like, positions[None, None].expand(3, 1, -1))
        return cos, sin

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of `tokens`."""
        return F.embedding(tokens, self.backbone.embed_tokens.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of normed hidden states."""
        return F.linear(hidden, self.backbone.embed_tokens.weight)

    def layer(self, layer: nn.Module, x: Tensor, rotation: Rotation) -> Tensor:
        """Run transformers' decoder layer, with dropout on its additions to the residual stream."""
        normed = layer.input_layernorm(x)
        if hasattr(layer, "linear_attn"):
            mixed = layer.linear_attn(normed)
        else:
            mixed, _ = layer.self_attn(normed, position_embeddings=rotation, attention_mask=None)
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + F.dropout(
            layer.mlp(layer.post_attention_layernorm(x)), self.dropout, self.training
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the normed hidden states [B, T, H] of tokens [B, T]."""
        x = self.embed(tokens)
        rotation = self.rotation(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.backbone.layers:
            x = self.layer(layer, x, rotation)
        return self.backbone.norm(x)

    def chain(
        self, hidden: Tensor, tokens: Tensor, starts: Tensor, depth: int, greedy: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the head once at every position, and `depth` steps from each of `starts`, as chained drafting does.

        A window that starts at t drafts tokens t+2, t+3, and so on. Its first step attends to the pairs 0..t. Each
        later step attends to these pairs and to the window's own earlier steps.

        Args:
            hidden: [B, T, H] from `forward`.
            tokens: [B, T + depth] or longer, the tokens of the hidden states and those after them.
            starts: [P] positions.
            depth: number of steps, the first included.
            greedy: use the previous step's own choice as the input of a step instead of the true token.

        Returns: the output of the first step [B, T, H], and of each later step [B, P, H].
        """
        length, count = hidden.shape[1], len(starts)
        everywhere = torch.arange(length, device=tokens.device)
        first, past = self.mtp(
            hidden, self.embed(tokens[:, 1 : length + 1]), self.rotation(everywhere)
        )
        mask = everywhere[None] <= starts[:, None]
        own = torch.eye(count, dtype=torch.bool, device=tokens.device)
        out, later = first[:, starts], []
        for step in range(1, depth):
            chosen = self.logits(out).argmax(-1) if greedy else tokens[:, starts + step + 1]
            mask = torch.cat([mask, own], dim=1)
            out, past = self.mtp(out, self.embed(chosen), self.rotation(starts + step), past, mask)
            later.append(out)
        return first, later

    def compile_parts(self) -> None:
        """Compile a layer and a head step rather than the model, so that layers of a kind share one compilation."""
        torch._dynamo.config.recompile_limit = (
            64  # lengths, training or not, with or without gradients
        )
        self.layer = torch.compile(self.layer, dynamic=False)  # type: ignore[method-assign]
        self.mtp.compile(dynamic=False)

    def freeze_backbone(self) -> None:
        """Freeze everything but the head; the shared embedding belongs to the backbone."""
        self.backbone.requires_grad_(False)
        self.eval()  # dropout acts on the backbone alone

    def save(self, folder: Path) -> None:
        """Write the raw Hugging Face checkpoint, bf16 with A_log in float32, and its two configs."""
        zero_centred = {
            id(module.weight) for module in self.modules() if isinstance(module, Qwen3_5RMSNorm)
        }
        tensors = {}
        for name, parameter in self.named_parameters():
            value = parameter.detach().to("cpu", torch.float32)
            if id(parameter) in zero_centred:
                # mlx-lm adds the 1 in bf16. With values for which this is exact, all loaders agree.
                value = (1 + value).to(torch.bfloat16).float() - 1
            name = name.replace("backbone.", "model.language_model.", 1)
            dtype = torch.float32 if name.endswith("A_log") else torch.bfloat16
            tensors[name] = value.to(dtype).contiguous()
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        # The special tokens are the last nine: <|endoftext|>, <|im_start|>, <|im_end|>, then markup.
        ends = {"eos_token_id": [VOCAB_SIZE - 7, VOCAB_SIZE - 9], "pad_token_id": VOCAB_SIZE - 9}
        text = TEXT_CONFIG | ends | {"eos_token_id": VOCAB_SIZE - 7, "dtype": "bfloat16"}
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "text_config": text,
        } | ends
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        generation = ends | {"do_sample": False}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        tensors = load_file(str(folder / "model.safetensors"))
        self.load_state_dict(
            {
                name.replace("model.language_model.", "backbone.", 1): value
                for name, value in tensors.items()
            }
        )
