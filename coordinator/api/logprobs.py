"""Log-probabilities of tokens, in the chat form and in the older completions form."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.text.detokenizer import Piece
from coordinator.text.model_info import Json
from coordinator.text.tokenizer import Tokenizer
from proto.frame import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write; the number OpenAI documents."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> Json:
    """`choices[].logprobs` of a chat completion: every generated token, those of reasoning and calls too."""
    content = [
        {
            **_token(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_token(tokenizer, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, piece: Piece, entries: Sequence[TokenLogprob]
) -> Json:
    """`choices[].logprobs` of a text completion; `text_offset` counts characters of the choice's text."""
    top = [{_name(tokenizer, token): _finite(value) for token, value in e.top} for e in entries]
    return {
        "tokens": [_name(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(piece.offsets),
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    content = tokenizer.token_bytes(token)
    return {
        "token": content.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(content),
    }


def _name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text; of one that is not whole characters its bytes, so that no two have one name."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST
