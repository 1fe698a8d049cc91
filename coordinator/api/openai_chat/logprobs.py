"""Log-probabilities of tokens, in the format of chat completions and in the older one of completions."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.text.model_info import Json
from coordinator.text.tokenizer import Tokenizer
from proto.frame import TokenLogprob

LOWEST = -9999.0
"""The value for minus infinity, which JSON cannot represent; OpenAI documents this number."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> Json:
    """Return `logprobs` of a chat choice, with an entry for every token, also of reasoning and calls."""
    content = [
        {
            **_token(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_token(tokenizer, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offsets: Sequence[int]
) -> Json:
    """Return `logprobs` of a text completion. `offsets` count characters of the choice's text."""
    top = [{_name(tokenizer, token): _finite(value) for token, value in e.top} for e in entries]
    return {
        "tokens": [_name(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(offsets),
    }


def with_first_token(tokenizer: Tokenizer, logprobs: Json, token: int) -> Json:
    """Return `logprobs` of a completion, preceded by the first token of its prompt, which has no log-probability."""
    top = logprobs["top_logprobs"]
    return {
        "tokens": [_name(tokenizer, token), *logprobs["tokens"]],
        "token_logprobs": [None, *logprobs["token_logprobs"]],
        "top_logprobs": None if top is None else [None, *top],
        "text_offset": [0, *logprobs["text_offset"]],
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    content = tokenizer.token_bytes(token)
    return {
        "token": content.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(content),
    }


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text, or its bytes if they are not whole characters, so that all names differ."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST
