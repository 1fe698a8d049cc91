"""An embedder whose process is a short program, which starts in a moment and needs no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from coordinator.text.embedder import Embedder
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer

SLOW = 13
"""A number of tokens for which the process takes a minute."""

PROGRAM = f"""
import json, sys, time
print('{{"size": 4, "pooling": "mean"}}', flush=True)
for job in sys.stdin:
    tokens = json.loads(job)
    time.sleep(60 if len(tokens) == {SLOW} else 0)
    print([0, 0.6, 0.8 * tokens[0], 0.8 * tokens[-1]], flush=True)
"""
"""The numbers of its vectors tell the first and the last token of the input."""


def write_embedding_tokenizer(folder: Path) -> int:
    """Write the tiny tokenizer with the end token that Qwen3-Embedding's adds to each text, and return the token."""
    file = write_tokenizer(folder) / "tokenizer.json"
    tokenizer, end = Tokenizer.from_file(str(file)), "<|endoftext|>"
    token: int = tokenizer.encode(end).ids[0]
    tokenizer.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, token)])
    tokenizer.save(str(file))
    return token


def stand_in_embedder(folder: Path, program: str = PROGRAM) -> Embedder:
    """Return an embedder named `vectors` for inputs of up to 20 tokens, whose process is `program`."""
    write_embedding_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 20}))
    embedder = Embedder("vectors", folder)
    embedder.command = (sys.executable, "-I", "-c", program)
    return embedder
