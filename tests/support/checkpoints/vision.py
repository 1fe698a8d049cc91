"""A tiny random vision tower for a raw test checkpoint, and images for it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from tests.support.checkpoints.checkpoints import read_tensors, without, write_checkpoint
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer

VOCAB = 512

_SIZES = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
}


def write_vision_checkpoint(path: Path, **options: Any) -> Path:
    """Write a checkpoint that reads images, with a tokenizer, and return `path`. `options` are `write_checkpoint`'s."""
    write_checkpoint(path, vocab=VOCAB, **options)
    without(path, "model.visual.patch_embed.proj.weight")
    return with_tower(path)


def with_tower(path: Path) -> Path:
    """Add a tokenizer and a tower to a raw checkpoint of one file, whose vocabulary has VOCAB words. Return `path`."""
    write_tokenizer(path, vision=True)
    weights = add_tower(path, _SIZES, pixels=(1024, 65_536))
    weights |= read_tensors(path)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    return path


def add_tower(path: Path, sizes: dict[str, int], pixels: tuple[int, int]) -> dict[str, mx.array]:
    """Name a tower in the files of a checkpoint, for images of `pixels`, at least and at most. Return random tensors.

    The tokenizer of the checkpoint is `write_tokenizer`'s, with the tokens of images.
    """
    config = json.loads((path / "config.json").read_text())
    sizes = {**sizes, "out_hidden_size": config["text_config"]["hidden_size"]}
    words = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    ids = {word["content"]: word["id"] for word in words}
    config["vision_config"] = {**sizes, "model_type": "qwen3_5_vision"}
    config["image_token_id"] = ids["<|image_pad|>"]
    config["vision_start_token_id"] = ids["<|vision_start|>"]
    config["vision_end_token_id"] = ids["<|vision_end|>"]
    (path / "config.json").write_text(json.dumps(config))
    size = {"shortest_edge": pixels[0], "longest_edge": pixels[1]}
    processor = {"size": size, "patch_size": sizes["patch_size"]}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return {f"model.visual.{name}": value for name, value in _weights(sizes).items()}


def _weights(sizes: dict[str, int]) -> dict[str, mx.array]:
    hidden, inner, patch = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]
    merged = hidden * sizes["spatial_merge_size"] ** 2
    mx.random.seed(11)
    found = {
        "patch_embed.proj.weight": mx.random.normal((hidden, 3, 2, patch, patch), scale=0.05),
        "pos_embed.weight": mx.random.normal((sizes["num_position_embeddings"], hidden)),
    }
    pairs = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)}
    pairs |= {"mlp.linear_fc1": (inner, hidden), "mlp.linear_fc2": (hidden, inner)}
    shapes = {f"blocks.{i}.{n}": s for i in range(sizes["depth"]) for n, s in pairs.items()}
    shapes |= {"merger.linear_fc1": (merged, merged)}
    shapes |= {"merger.linear_fc2": (sizes["out_hidden_size"], merged)}
    norms = [f"blocks.{i}.norm{n}" for i in range(sizes["depth"]) for n in (1, 2)]
    for name, shape in shapes.items():
        found[f"{name}.weight"] = mx.random.normal(shape, scale=shape[1] ** -0.5)
        found[f"{name}.bias"] = mx.random.normal(shape[:1], scale=0.1)
    for name in [*norms, "merger.norm"]:
        found[f"{name}.weight"] = mx.random.uniform(0.5, 1.5, (hidden,))
        found[f"{name}.bias"] = mx.random.normal((hidden,), scale=0.1)
    found["patch_embed.proj.bias"] = mx.zeros((hidden,))
    return found


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a random image of smooth colours."""
    chance = np.random.default_rng(seed)
    small = Image.fromarray(chance.integers(0, 255, (4, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file."""
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()
