"""A checkpoint of random weights that every compared server can load, and prompts for it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import mlx.core as mx

from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from tests.support.checkpoints.checkpoints import write_checkpoint

VOCAB = 4096
"""Vocabulary of the built-in model, so that its tokenizer fits."""


def write_random_model(path: Path, *, hidden: int, layers: int, dtype: mx.Dtype) -> Path:
    """Write a model without an MTP head, in two files with an index, as stock mlx-lm's pipeline requires.

    It only generates tokens that begin a word. So each token shows in a stream at once, no answer ends before its
    limit, and every server counts the same.
    """
    write_checkpoint(
        path,
        layers=layers,
        hidden=hidden,
        vocab=VOCAB,
        tie=False,
        mtp=False,
        announce_mtp=False,
        shards=2,
        layout="mlx",
        dtype=dtype,
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint_dir() / name, path)
    _say_only(words(Tokenizer.load(path)), path)
    return path


def words(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens that are a space and letters."""
    texts = {i: tokenizer.token_bytes(i).decode(errors="replace") for i in range(VOCAB)}
    return {
        token: text
        for token, text in texts.items()
        if text[0:1] == " " and text[1:].isascii() and text[1:].isalpha()
    }


def prompt_of(tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """Return random words of exactly `tokens` tokens. Each seed gives different words."""
    choices = sorted(words(tokenizer).values())
    drawn = random.Random(seed)
    text = ""
    while (missing := tokens - len(tokenizer.encode(text))) > 0:
        text += "".join(drawn.choices(choices, k=max(1, missing // 2)))
    assert len(tokenizer.encode(text)) == tokens
    return text


def _say_only(tokens: dict[int, str], path: Path) -> None:
    """Zero the rows of the other tokens in lm_head. Among thousands of random logits the largest is above 0."""
    for file in path.glob("*.safetensors"):
        weights = mx.load(str(file))
        assert isinstance(weights, dict)
        for name in [n for n in weights if n.endswith("lm_head.weight")]:
            allowed = mx.zeros((VOCAB, 1), weights[name].dtype)
            allowed[mx.array(sorted(tokens))] = 1
            weights[name] = weights[name] * allowed
        mx.eval(weights)
        mx.save_safetensors(str(file), weights, {"format": "mlx"})
