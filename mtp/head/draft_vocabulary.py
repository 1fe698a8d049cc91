"""The part of the vocabulary that is drafted, so that a draft reads only these rows of lm_head.

The answer does not depend on the part, since any draft may be rejected. Between processes it is a bitmap with one bit
for each token, the lowest bit first. It is empty for all tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import tokenizers

from proto.errors import UsageError

AUTO_SHARE = 0.4
"""Share of the tokens under `auto`: 99,000 of 248,000. Other programs trim their heads to about as many."""

STEP = 64
"""Number of tokens of which a part has a multiple, for the kernels of all devices."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The value of `--draft-vocab`: the number of most frequent tokens, or a file of token ids. None of both is all."""

    size: int = 0
    auto: bool = False
    file: Path | None = None

    @classmethod
    def parse(cls, text: str) -> DraftVocabulary:
        """Return the value for `N`, `auto`, `off` or a file. Raises UsageError for other text."""
        if text == "off":
            return cls()
        if text == "auto":
            return cls(auto=True)
        if text.isdecimal() and 0 < int(text[:12]) < 10**9:
            return cls(int(text))
        if not Path(text).is_file():
            raise UsageError(
                f"--draft-vocab {text!r:.300}: not found. Use auto, off, a number of tokens or a file of ids"
            )
        return cls(file=Path(text))

    def __bool__(self) -> bool:
        return self != DraftVocabulary()

    def __str__(self) -> str:
        return "auto" if self.auto else str(self.file or self.size or "off")

    def resolve(self, backend: tokenizers.Tokenizer, ends: Iterable[int], vocab: int) -> bytes:
        """Return the bitmap for a model of `vocab` tokens, with the control tokens and `ends` in it.

        Raises UsageError for a file without ids of this model.
        """
        if not self:
            return b""
        frequent = frequent_tokens(backend)
        count = int(vocab * AUTO_SHARE) if self.auto else self.size
        chosen = dict.fromkeys(_ids_of(self.file, vocab) if self.file else frequent[:count])
        chosen |= dict.fromkeys((*backend.get_added_tokens_decoder(), *ends))
        for token in (*frequent, *range(vocab)):
            if len(chosen) % STEP == 0:
                break
            chosen[token] = None
        bits = np.zeros(vocab, np.bool_)
        bits[[token for token in chosen if token < vocab]] = True
        return b"" if bits.all() else np.packbits(bits, bitorder="little").tobytes()


def frequent_tokens(backend: tokenizers.Tokenizer) -> list[int]:
    """Return the tokens of a BPE tokenizer, the bytes first and then by its merges, the most frequent first."""
    model = json.loads(backend.to_str())["model"]
    ids: dict[str, int] = model["vocab"]
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    merged = dict.fromkeys(ids[text] for pair in pairs if (text := "".join(pair)) in ids)
    return [*sorted(set(ids.values()) - merged.keys()), *merged]


def _ids_of(file: Path, vocab: int) -> list[int]:
    try:
        found = [int(word) for word in re.split(r"[\s,\[\]]+", file.read_text()) if word]
    except (OSError, ValueError) as error:
        raise UsageError(f"--draft-vocab {file}: {error}. Write one token id a line") from error
    wrong = next((token for token in found if not 0 <= token < vocab), None)
    if wrong is not None or not found:
        cause = "no token ids" if wrong is None else f"{wrong} is no token id"
        raise UsageError(f"--draft-vocab {file}: {cause}. The model has those from 0 to {vocab - 1}")
    return found


def drafted_tokens(bitmap: bytes, vocab: int) -> list[int]:
    """Return the tokens of a bitmap. Raises UsageError if they are not those of a model of `vocab` tokens."""
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    if len(bitmap) != -(-vocab // 8) or not bits.any() or bits[vocab:].any():
        raise UsageError(f"--draft-vocab: {len(bitmap)} bytes are no part of {vocab} tokens")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def drafted_share(bitmap: bytes, vocab: int) -> float:
    """Return the share of the rows of lm_head that a second copy holds for drafts; 0 without a part."""
    return int.from_bytes(bitmap).bit_count() / vocab


class DraftRows:
    """The output projection over a part of the tokens. Its rows are those of `module`: lm_head or a tied embedding."""

    def __init__(self, module: Any, tokens: list[int]) -> None:
        vocab, rows = module.weight.shape[0], mx.array(tokens, mx.int32)
        self.module = copy(module)
        for name, value in module.parameters().items():
            if value.ndim and value.shape[0] == vocab:
                self.module[name] = value[rows]
        places = np.full(vocab, len(tokens), np.int32)
        places[tokens] = np.arange(len(tokens))
        self._places = mx.array(places)
        mx.eval(self._places, self.module.parameters())

    def __call__(self, x: mx.array) -> mx.array:
        """Return the logits of `x [rows, hidden]`: `[rows, vocab]`, minus infinity for tokens outside the part."""
        found = getattr(self.module, "as_linear", self.module)(x)
        outside = mx.full((x.shape[0], 1), -mx.inf, found.dtype)
        return mx.take(mx.concatenate([found, outside], axis=-1), self._places, axis=-1)
