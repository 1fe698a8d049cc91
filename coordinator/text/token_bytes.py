"""The bytes of a tokenizer's tokens, in the two spellings of published tokenizers."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from proto.errors import CheckpointError

BLANK = "▁"
"""The blank in the spelling of SentencePiece."""


def byte_table(backend: tokenizers.Tokenizer) -> tuple[list[bytes], bool]:
    """Return the bytes of every id, and whether the first blank of a text is none of it. Raises CheckpointError.

    Ordinary tokens are spelled in GPT-2's byte alphabet and added tokens literally, or all as SentencePiece spells
    them, with bytes as `<0x0A>`.
    """
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps: list[Any] = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    spells_blank = any(step.get("content") == " " and BLANK in str(step.get("pattern")) for step in steps)
    if "ByteLevel" not in kinds and not (spells_blank or "Metaspace" in kinds):
        raise CheckpointError(
            "the decoder is neither that of byte-level BPE nor that of SentencePiece. Use another model.",
            public="the form of the checkpoint's tokenizer is not supported",
        )
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}
    added = backend.get_added_tokens_decoder()
    table = []
    for token in range(max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1):
        spelling = backend.id_to_token(token) or ""
        if "ByteLevel" not in kinds:
            is_byte = "ByteFallback" in kinds and len(spelling) == 6 and spelling.startswith("<0x")
            table.append(bytes.fromhex(spelling[3:5]) if is_byte else spelling.replace(BLANK, " ").encode())
        elif token in added:
            table.append(added[token].content.encode())
        else:
            table.append(bytes(of_character[c] for c in spelling if c in of_character))
    strips = any(step.get("type") == "Strip" and step.get("start") for step in steps)
    scheme = next((step.get("prepend_scheme") for step in steps if step.get("type") == "Metaspace"), "never")
    return table, strips or scheme != "never"
