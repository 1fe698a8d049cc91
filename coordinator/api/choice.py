"""One choice of an answer in the making: events in, the `choices[]` entries of chunks out."""

from __future__ import annotations

import abc

from coordinator.generation.request import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    PrefillProgress,
    TokenChunk,
)
from coordinator.text.detokenizer import Piece, TextStream
from coordinator.text.model_info import Json
from coordinator.text.tokenizer import Tokenizer
from proto.errors import WorkerLostError
from proto.frame import TokenLogprob


class Choice(abc.ABC):
    """What chat and text completions share: tokens become text, stop strings end it, counts are kept.

    `tokens` counts what was generated, up to and including the token that completed a stop string, `drafted` and
    `accepted` the drafts on the way there.
    """

    def __init__(
        self, index: int, request: GenerationRequest, tokenizer: Tokenizer, stop: tuple[str, ...]
    ) -> None:
        self.index = index
        self.request = request
        self.tokens = 0
        self.cached = 0
        self.drafted = 0
        self.accepted = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer.text_bytes, stop)
        self._logprobs: list[TokenLogprob] = []

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens were reasoning, where that is told apart."""
        return 0

    def accept(self, event: GenerationEvent) -> list[Json]:
        """Take one event; return the chunk entries it makes, the last with a finish_reason once done.

        Raises WorkerLostError when the engine gave up on the request.
        """
        match event:
            case PrefillProgress():
                self.cached = max(self.cached, event.cached)
                return []
            case TokenChunk():
                return self._accept_tokens(event)
            case Finished():
                self.drafted, self.accepted = event.stats.drafted, event.stats.accepted
                self.cached = max(self.cached, event.stats.cached_tokens)
                if event.reason not in ("stop", "length"):
                    raise WorkerLostError(event.error or f"the request was {event.reason}")
                return self._finish(event.reason)

    def _accept_tokens(self, chunk: TokenChunk) -> list[Json]:
        self._logprobs += chunk.logprobs
        self.drafted += chunk.drafted
        self.accepted += chunk.accepted
        for token in chunk.tokens:
            self.tokens += 1
            self._read(self._text.add(token))
            if self._text.stopped:
                return self._finish("stop")
        return self._flush()

    def _finish(self, reason: str) -> list[Json]:
        self._read(self._text.finish())
        self._read_end()
        self.finish_reason = self._reason(reason)
        return [*self._flush(), self._closing()]

    def _take_logprobs(self, piece: Piece) -> list[TokenLogprob]:
        """Entries of the piece's tokens; none where none were asked for."""
        taken = self._logprobs[: len(piece.tokens)]
        del self._logprobs[: len(taken)]
        return taken

    def _reason(self, reason: str) -> str:
        return reason

    @abc.abstractmethod
    def opening(self) -> list[Json]:
        """Chunk entries that come before any text."""

    @abc.abstractmethod
    def _read(self, piece: Piece) -> None:
        """Take a piece of text, keep it for `_flush` and for `result`."""

    @abc.abstractmethod
    def _read_end(self) -> None:
        """Take note that no piece will follow."""

    @abc.abstractmethod
    def _flush(self) -> list[Json]:
        """Chunk entries for what was read since the last call."""

    @abc.abstractmethod
    def _closing(self) -> Json:
        """The chunk entry that says why the choice ended."""

    @abc.abstractmethod
    def result(self) -> Json:
        """The entry of a whole answer."""
