"""The prompt of `mtp-coord generate`: text, a file, stdin, or token ids."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from coordinator.text.tokenizer import Tokenizer
from proto.errors import RequestError, UsageError


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens. `thinking` tells whether the answer starts in reasoning; None without a chat template."""

    tokens: tuple[int, ...]
    thinking: bool | None = None


@dataclass(frozen=True)
class PromptSource:
    """The source of a prompt. Raises UsageError unless exactly one of `text`, `file` and `tokens` is given."""

    text: str | None
    file: Path | None
    tokens: str | None
    raw: bool

    def __post_init__(self) -> None:
        given = sum(x is not None for x in (self.text, self.file, self.tokens))
        if given != 1:
            found = "none" if given == 0 else "more than one"
            raise UsageError(
                f"give one of PROMPT, --prompt, --prompt-file and --tokens; {found} was given"
            )

    def read_text(self) -> str:
        """Return the text of the prompt. Raises UsageError for an unreadable file."""
        assert self.tokens is None
        if self.file is not None:
            return _read_text(self.file)
        assert self.text is not None
        return self.text

    def read_tokens(self, vocab_size: int, tokenizer: Tokenizer | None) -> Prompt:
        """Return the prompt in tokens. Raises UsageError for an unreadable file and for unknown token ids."""
        if self.tokens is not None:
            return Prompt(_parse_tokens(self.tokens, vocab_size))
        assert tokenizer is not None
        text = self.read_text()
        if self.raw:
            return Prompt(tokenizer.encode(text))
        try:
            prompt = tokenizer.chat_prompt([{"role": "user", "content": text}])
        except RequestError as error:
            raise UsageError(
                f"{error}. Use --raw to continue the prompt without a template"
            ) from error
        return Prompt(prompt.tokens, prompt.thinking)


def _parse_tokens(text: str, vocab: int) -> tuple[int, ...]:
    tokens = []
    for word in text.split(","):
        if not (word.strip().isascii() and word.strip().isdigit()):
            raise UsageError(f"--tokens: {word!r:.40} is not a token id. Write 1,2,3")
        if (token := int(word)) >= vocab:
            raise UsageError(f"--tokens: {token} is not a token of this model, which has {vocab}")
        tokens.append(token)
    return tuple(tokens)


def _read_text(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if file == Path("-") else file.read_bytes()
        return data.decode()
    except OSError as error:
        raise UsageError(f"--prompt-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {file}: not UTF-8 at byte {error.start}") from error
