"""The batches of training: random rows of two token streams, plain text and conversations."""

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mtp.builtin.training import conversations as chat
from mtp.builtin.training import tokenizer as bpe
from mtp.builtin.training.corpus import Document

CHAT_SHARE = 0.1  # share of conversations among the rows of a batch
TEMPLATE_BATCH = 2_000  # conversations a process renders at a time


@dataclass(frozen=True)
class Stream:
    """Concatenated tokens. `starts` are the positions where a document or a conversation begins."""

    tokens: Tensor
    starts: Tensor

    def rows(self, offsets: Tensor, length: int) -> Tensor:
        """Return tokens [len(offsets), length] on the stream's device."""
        return self.tokens[offsets[:, None] + torch.arange(length, device=self.tokens.device)]

    def to(self, device: torch.device) -> "Stream":
        """Copy the stream to `device`."""
        return Stream(self.tokens.to(device), self.starts.to(device))


@dataclass(frozen=True)
class Split:
    """The two streams of the training set or of the held-out set."""

    text: Stream
    chat: Stream

    def to(self, device: torch.device) -> "Split":
        """Copy both streams to `device`."""
        return Split(self.text.to(device), self.chat.to(device))

    def batch(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """Return tokens [size, length]; a row of text starts anywhere, a row of chat at a conversation's start."""
        conversations = round(size * CHAT_SHARE)
        device = self.text.tokens.device
        last = len(self.text.tokens) - length
        anywhere = torch.randint(last, (size - conversations,), generator=generator)
        usable = int((self.chat.starts <= len(self.chat.tokens) - length).sum())
        picks = torch.randint(usable, (conversations,), generator=generator).to(device)
        return torch.cat(
            [
                self.text.rows(anywhere.to(device), length),
                self.chat.rows(self.chat.starts[picks], length),
            ]
        )


def _stream(encoded: Sequence[Sequence[int]], end: int) -> Stream:
    flat: list[int] = []
    starts = []
    for ids in encoded:
        starts.append(len(flat))
        flat.extend(ids)
        flat.append(end)
    return Stream(torch.tensor(flat, dtype=torch.long), torch.tensor(starts, dtype=torch.long))


def _render(job: tuple[Path, list[chat.Conversation]]) -> list[str]:
    folder, part = job
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return [
        str(tokenizer.apply_chat_template(c.messages, tools=c.tools, tokenize=False)) for c in part
    ]


def split(documents: Sequence[Document], tokenizer: Tokenizer, folder: Path, seed: int) -> Split:
    """Encode the documents and the conversations made of them, in a fixed random order.

    `folder` holds the saved tokenizer, whose chat template renders the conversations as it does for users.
    """
    end = tokenizer.get_vocab()[bpe.END_OF_TEXT]
    order = list(documents)
    random.Random(seed).shuffle(order)
    text = [
        encoding.ids for encoding in tokenizer.encode_batch([document.text for document in order])
    ]
    talk = chat.conversations(documents, seed)
    with ProcessPoolExecutor() as pool:
        parts = [talk[i : i + TEMPLATE_BATCH] for i in range(0, len(talk), TEMPLATE_BATCH)]
        rendered = pool.map(_render, [(folder, part) for part in parts])
        lines = [line for part in rendered for line in part]
    return Split(
        _stream(text, end),
        _stream([encoding.ids for encoding in tokenizer.encode_batch(lines)], end),
    )
