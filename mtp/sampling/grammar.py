"""Grammars that constrain an answer: the tokens allowed at each position, as a pure function of grammar and text.

A grammar is text for llguidance: JSON, or Lark with `%json` for schemas. The last stage needs the tokenizer, which a
`Vocabulary` holds, because its files have none.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

import mlx.core as mx
import msgpack
import numpy as np
import tokenizers
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from proto.errors import ProtocolError
from proto.params import SamplingParams

MAX_UNPACKED_BYTES = 32 * 2**20
"""Bytes. Maximum size of an unpacked vocabulary; 250,000 tokens take about 5 MB."""

MAX_CHECKPOINTS = 8
"""Copies of a matcher that a sequence keeps. They reach back farther than the windows in flight."""

CHECKPOINT_TOKENS = 32
"""Tokens between two copies. A copy takes 50 us, and 16 ns more for each token that the matcher has read."""


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer, or SentencePiece's BPE made one, in a form that packs well.

    It holds the bytes of every token, the ids of control tokens, those that end a text, and the two ids of each merge.
    `layout` is the tokenizer's JSON without tokens and merges.
    """

    tokens: tuple[bytes, ...]
    control: tuple[int, ...]
    ends: tuple[int, ...]
    merges: tuple[int, ...]
    layout: str

    @classmethod
    def of_backend(
        cls,
        backend: tokenizers.Tokenizer,
        tokens: Iterable[bytes],
        control: Collection[int],
        ends: Iterable[int],
    ) -> Vocabulary:
        """Return the vocabulary of a tokenizer whose tokens have the bytes `tokens`."""
        layout = json.loads(backend.to_str())
        ids, merges = layout["model"].pop("vocab"), layout["model"].pop("merges")
        if "ByteLevel" not in json.dumps(layout["decoder"]):  # blanks and bytes are then spelled otherwise
            layout |= {"pre_tokenizer": _BYTES, "decoder": _BYTES}
            layout["model"] |= {"unk_token": None, "byte_fallback": False}
            kept = (token for token in layout["added_tokens"] if token["id"] in control or token["content"] not in ids)
            layout["added_tokens"] = list(kept)
        for added in layout["added_tokens"]:
            added["special"] = added["id"] in control
        pairs = tuple(ids[part] for pair in merges for part in pair)
        return cls(tuple(tokens), tuple(sorted(control)), tuple(sorted(ends)), pairs, json.dumps(layout))

    def backend(self) -> tokenizers.Tokenizer:
        """Return the tokenizer, which adds nothing to a text and reads no control tokens in it. Raises ValueError."""
        layout = json.loads(self.layout)
        spelled = [token.decode("latin-1").translate(_ALPHABET) for token in self.tokens]
        added = {int(token["id"]) for token in layout["added_tokens"]}
        ids = {text: i for i, text in enumerate(spelled) if text and i not in added}
        parts = [spelled[i] for i in self.merges]
        layout["model"] |= {"vocab": ids, "merges": list(zip(parts[::2], parts[1::2], strict=True))}
        layout |= {"normalizer": None, "post_processor": None}
        try:
            found = tokenizers.Tokenizer.from_str(json.dumps(layout))
        except BaseException as error:
            # The library raises no narrower class, and a panic of it is no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(f"its tokenizer does not load: {error}") from error
            raise
        found.encode_special_tokens = True
        return found

    def pack(self) -> bytes:
        """Return the vocabulary as compressed bytes."""
        merges = np.array(self.merges, np.uint32).reshape(-1, 2).T.tobytes()
        fields = (list(self.tokens), list(self.control), list(self.ends), merges, self.layout)
        return zlib.compress(msgpack.packb(fields))

    @classmethod
    def unpack(cls, packed: bytes) -> Vocabulary:
        """Invert `pack`. Raises ProtocolError for malformed bytes."""
        try:
            unzip = zlib.decompressobj()
            content = unzip.decompress(packed, MAX_UNPACKED_BYTES)
            if not unzip.eof:
                raise ValueError(f"it is incomplete, or exceeds {MAX_UNPACKED_BYTES} bytes")
            tokens, control, ends, merges, layout = msgpack.unpackb(content)
            pairs = np.frombuffer(merges, np.uint32).reshape(2, -1).T.ravel().tolist()
            if not ends or not all(0 <= int(i) < len(tokens) for i in (*control, *ends, *pairs)):
                raise ValueError("its token ids are out of range")
        except (ValueError, TypeError, zlib.error, msgpack.UnpackException) as error:
            raise ProtocolError(f"the vocabulary is malformed: {error}") from error
        return cls(tuple(tokens), tuple(control), tuple(ends), tuple(pairs), layout)


_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
_ALPHABET = dict(zip((b for b in range(256) if b not in _PLAIN), range(256, 512), strict=False))
"""The characters of bytes in the spelling of byte-level tokenizers. Bytes in _PLAIN are spelled as themselves."""


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


@lru_cache(maxsize=2)
def tokenizer_of(packed: bytes) -> LLTokenizer:
    """Return llguidance's tokenizer of a packed vocabulary, about three seconds of work. Raises ProtocolError."""
    vocabulary = Vocabulary.unpack(packed)
    try:
        wrapper = TokenizerWrapper(_Tokens(vocabulary))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"the vocabulary is malformed: {error}") from error
    return LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.ends))


PREPARE_SECONDS = 0.2
"""Seconds of processor time. Longest preparation of a grammar, for which the streams of others wait."""

MASK_SECONDS = 0.02
"""Seconds of processor time. Longest computation of the tokens allowed at one position, about a step of a stage."""

TRIAL_PATHS, TRIAL_STEPS = 4, 32
"""Texts that a trial follows, and their tokens. Masks take the longest at the beginning of objects and lists."""


def grammar_problem(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return why the last stage cannot apply `grammar`, or an empty text.

    The trial prepares the grammar as the last stage does, and computes the masks of random texts that it allows.
    """
    started = time.thread_time()
    first = LLMatcher(tokenizer, grammar, log_level=0)
    if first.is_error():
        return " ".join(first.get_error().split())
    if (seconds := time.thread_time() - started) > PREPARE_SECONDS:
        return f"it takes {seconds:.2f} s to prepare, and the limit is {PREPARE_SECONDS} s. Send a smaller format"
    for path in range(TRIAL_PATHS):
        draw, matcher = np.random.default_rng(path), first.deep_copy()
        for _ in range(TRIAL_STEPS):
            started = time.thread_time()
            allowed = _unpacked(matcher.compute_bitmask(), tokenizer)
            if (seconds := time.thread_time() - started) > MASK_SECONDS:
                return f"a token takes {seconds:.3f} s, and the limit is {MASK_SECONDS} s. Send a smaller format"
            if matcher.is_error():
                return " ".join(matcher.get_error().split())
            tokens = np.flatnonzero(allowed)
            if matcher.is_stopped() or not tokens.size:
                break
            matcher.try_consume_tokens([int(draw.choice(tokens))])
    return ""


def _unpacked(bits: bytes, tokenizer: LLTokenizer) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of llguidance as booleans `[vocabulary]`."""
    found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return found[: tokenizer.vocab_size].astype(np.bool_)


@lru_cache(maxsize=16)
def _prepared(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return the matcher at the start of a text. Its users copy it, so it is prepared once for equal grammars."""
    return LLMatcher(tokenizer, grammar, log_level=0)


class _Tokens:
    """A vocabulary as llguidance reads tokenizers.

    Forced text gets the tokens that the model was trained with: other tokens of the same text mislead it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.control)
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        self._backend = vocabulary.backend()

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of `text`. Bytes raise TypeError, and llguidance then sends text only."""
        return self._backend.encode(text, add_special_tokens=False).ids


@dataclass(frozen=True)
class Answer:
    """An answer: the verified `tokens` after the first `start`, which are the prompt, and then `pending` ones.

    `tokens` is the growing text of the sequence itself, since a copy for each mask would cost more with each token.
    """

    tokens: Sequence[int] = ()
    start: int = 0
    pending: tuple[int, ...] = ()

    @property
    def verified(self) -> int:
        """Verified tokens of the answer."""
        return max(0, len(self.tokens) - self.start)

    def __len__(self) -> int:
        return self.verified + len(self.pending)

    def part(self, first: int, end: int) -> list[int]:
        """Return the tokens `first` to `end` of the answer."""
        verified = self.verified
        found = list(self.tokens[self.start + first : self.start + min(end, verified)])
        return found + list(self.pending[max(0, first - verified) : max(0, end - verified)])

    def with_pending(self, tokens: Sequence[int]) -> Answer:
        """Return the answer with further pending tokens."""
        return replace(self, pending=(*self.pending, *tokens))


class GrammarState:
    """The grammar of one sequence and the answer's tokens that its matcher has read.

    The matcher follows any change of the pending text: it returns to a copy from before the difference. llguidance's
    own rollback returns wrong masks for grammars with token ids (1.9.1). Verified tokens are compared once. Until the
    answer contains the token `start`, every token is allowed; None constrains the whole answer.
    """

    @classmethod
    def make(cls, params: SamplingParams, vocabulary: bytes) -> GrammarState | None:
        """Return the state at the start of an answer, or None without a grammar. Raises ProtocolError."""
        if not params.grammar:
            return None
        if not vocabulary:
            raise ProtocolError("a sequence has a grammar, but no sequence brought the vocabulary")
        grammar = params.grammar.decode("utf-8", "replace")
        return cls(grammar, tokenizer_of(vocabulary), params.grammar_start)

    def __init__(self, grammar: str, tokenizer: LLTokenizer, start: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._start = start
        self._matcher = self._new_matcher()
        self._read: list[int] = []
        self._sure = 0
        """Tokens of `_read` that were verified when they were compared."""
        self._searched = 0
        """Verified tokens of the answer in which the token `start` was looked for."""
        self._begins: int | None = None
        """The place after `start`, once it is verified."""
        self._checkpoints: list[tuple[int, LLMatcher]] = []  # copies by the tokens they had read

    def allowed(self, answer: Answer, length: int | None = None) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Return which tokens may follow the first `length` tokens of `answer`, booleans `[vocabulary]`, None for all.

        A text that the grammar does not allow has no constraint: the target rejects it at an earlier position. Beyond a
        limit of llguidance only the end is allowed.
        """
        length = len(answer) if length is None else length
        first = self._first_constrained(answer, length)
        if first is None or not (self._follow(answer, first, length) or self._matcher.is_error()):
            return None
        return _unpacked(self._matcher.compute_bitmask(), self._tokenizer)

    def forced(self, answer: Answer) -> list[int]:
        """Return the tokens that must follow `answer`, as the tokenizer cuts them; empty if there is a choice."""
        first = self._first_constrained(answer, len(answer))
        if first is None or not self._follow(answer, first, len(answer)):
            return []
        return list(self._matcher.compute_ff_tokens())

    def mask(self, logits: mx.array, answer: Answer) -> mx.array:
        """Return logits `[w, vocab]` with -inf for the tokens that the grammar does not allow.

        The last row follows `answer`, and each row before it follows one token less.
        """
        rows = logits.shape[0]
        first = len(answer) - rows + 1
        masks = [self.allowed(answer, first + i) for i in range(rows)]
        if all(mask is None for mask in masks):
            return logits
        table = np.zeros((rows, logits.shape[1]), np.bool_)
        for row, mask in zip(table, masks, strict=True):
            row[: None if mask is None else mask.size] = True if mask is None else mask
        return mx.where(mx.array(table), logits, -mx.inf)

    def waits(self, answer: Answer, length: int) -> bool:
        """Return whether the grammar begins later than after the first `length` tokens of `answer`."""
        return self._first_constrained(answer, length) is None

    def _first_constrained(self, answer: Answer, length: int) -> int | None:
        """Return where the part of the answer begins that the grammar covers, or None before it begins."""
        if self._start is None or self._begins is not None:
            return self._begins or 0
        part = answer.part(self._searched, length)
        found = self._searched + part.index(self._start) + 1 if self._start in part else None
        self._searched = min(length, answer.verified)
        if found is not None and found <= self._searched:
            self._begins = found
        return found

    def _follow(self, answer: Answer, first: int, length: int) -> bool:
        """Bring the matcher to the state after the tokens `first` to `length`. Return False if they are not allowed."""
        sure = min(self._sure, length - first)
        pairs = zip(self._read[sure:], answer.part(first + sure, length), strict=False)
        common = sure + len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if common < len(self._read):
            self._return_to(common)
        rest = answer.part(first + len(self._read), length)
        if not rest:
            return True
        newest = self._checkpoints[-1][0] if self._checkpoints else 0
        if len(self._read) - newest >= CHECKPOINT_TOKENS:
            self._checkpoints.append((len(self._read), self._matcher.deep_copy()))
            del self._checkpoints[:-MAX_CHECKPOINTS]
        count = self._matcher.try_consume_tokens(rest)
        self._read += rest[:count]
        self._sure = min(len(self._read), max(0, answer.verified - first))
        return count == len(rest)

    def _return_to(self, length: int) -> None:
        """Restore the newest matcher that had read at most `length` tokens, or a new one."""
        while self._checkpoints and self._checkpoints[-1][0] > length:
            self._checkpoints.pop()
        if self._checkpoints:
            read, matcher = self._checkpoints[-1]
            self._matcher = matcher.deep_copy()
        else:
            read, self._matcher = 0, self._new_matcher()
        del self._read[read:]

    def _new_matcher(self) -> LLMatcher:
        return _prepared(self._tokenizer, self._grammar).deep_copy()
