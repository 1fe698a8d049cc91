"""The answer of a local `generate`: text as it becomes final, or one JSON object, then the figures."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import typer

from coordinator.cli.shown_text import ShownText
from coordinator.generation.request import Finished, GenerationEvent, GenerationStats, TokenChunk
from coordinator.text.chat_parser import ChatParser
from coordinator.text.detokenizer import Piece, TextStream
from coordinator.text.tokenizer import Tokenizer
from proto.errors import WorkerLostError
from proto.frame import TokenLogprob
from proto.terminal.size import format_size


class PrintedAnswer:
    """The answer so far. With `stream` its text goes to stdout as soon as it is final.

    A complete stop string ends the answer. The last of `tokens` is then the one that completed it. `thinking` is None
    without a chat template, otherwise true if the answer opens in reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: tuple[str, ...],
        *,
        stream: bool,
        thinking: bool | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.reason: str | None = None
        self.stats = GenerationStats(0, 0)
        self._shown = ShownText(enabled=stream)
        self._tokenizer = tokenizer
        self._parser: ChatParser | None = None
        if tokenizer is not None and thinking is not None:
            self._parser = ChatParser(tokenizer, thinking=thinking)
        self._pieces = TextStream(tokenizer.text_bytes if tokenizer else _no_text, stops)

    def add_event(self, event: GenerationEvent) -> None:
        """Add the tokens of an event. Raises WorkerLostError if the engine failed."""
        if isinstance(event, Finished):
            self.stats = event.stats
            if event.reason == "error":
                raise WorkerLostError(event.error or "the engine failed")
            if self.reason is None:
                self.reason = event.reason
                self._add_piece(self._pieces.finish())
        elif isinstance(event, TokenChunk) and self.reason is None:
            self._add_tokens(event)

    def _add_tokens(self, chunk: TokenChunk) -> None:
        for index, token in enumerate(chunk.tokens):
            self.tokens.append(token)
            self.logprobs += chunk.logprobs[index : index + 1]
            self._add_piece(self._pieces.add(token))
            if self._pieces.stopped:
                self.reason = "stop"
                return

    def _add_piece(self, piece: Piece) -> None:
        self.text += piece.text
        if self._parser is None:
            self._shown.show_content(piece.text)
        else:
            self._shown.show_parts(self._parser.add(piece.text))

    def to_json(self) -> str:
        """Return the object that `--json` prints. `logprobs` is null unless requested."""
        entries = [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "top": [{"token": token, "logprob": value} for token, value in entry.top],
            }
            for entry in self.logprobs
        ]
        result = {
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.reason,
            "logprobs": entries or None,
            "stats": summary(self.stats, len(self.tokens)),
        }
        return json.dumps(result)

    def summarize(self) -> None:
        """End the text on stdout, and print log-probabilities and figures on stderr."""
        if self._parser is not None:
            self._shown.show_parts(self._parser.finish())
        if self._tokenizer is None:
            typer.echo(",".join(map(str, self.tokens)))
        else:
            self._shown.end_line()
            if self._parser is not None and self.text and not self._shown.content:
                typer.echo("the answer ended inside its reasoning; --json shows it", err=True)
        for entry in self.logprobs:
            others = " ".join(f"{self._name(t)} {p:.3f}" for t, p in entry.top)
            typer.echo(f"{entry.logprob:8.3f}  {self._name(entry.token)}  ({others})", err=True)
        typer.echo(_figures(summary(self.stats, len(self.tokens)), self.reason or ""), err=True)

    def _name(self, token: int) -> str:
        if self._tokenizer is None:
            return str(token)
        return repr(self._tokenizer.token_bytes(token).decode(errors="replace"))


def _no_text(token: int) -> bytes:
    """Return no bytes: without a tokenizer, tokens have no text."""
    return b""


def summary(stats: GenerationStats, tokens: int) -> dict[str, Any]:
    """Return the figures of a run.

    `acceptance_by_position[i]` is the accepted share of the drafts at position i + 1.
    """
    after_first = max(0, tokens - 1)
    pairs = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": tokens,
        "first_token_seconds": stats.prefill_seconds,
        "prompt_tps": _rate(stats.prompt_tokens, stats.prefill_seconds),
        "generation_tps": _rate(after_first, stats.decode_seconds),
        "windows": stats.windows,
        "tokens_per_window": _rate(after_first, stats.windows),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_by_position": [_rate(kept, drafted) for kept, drafted in pairs],
        "peak_memory_bytes": mx.get_peak_memory(),
    }


def _rate(count: float, over: float) -> float:
    return round(count / over, 4) if over > 0 else 0.0


def _figures(figures: dict[str, Any], reason: str) -> str:
    """Return the figures as lines for people."""
    drafts = "none"
    if figures["drafted"]:
        by_position = " ".join(f"{p:.0%}" for p in figures["acceptance_by_position"])
        drafts = (
            f"{figures['accepted']} of {figures['drafted']} accepted, by position {by_position}; "
            f"{figures['tokens_per_window']:.2f} tokens a window"
        )
    return (
        f"prompt      {figures['prompt_tokens']} tokens, {figures['prompt_tps']:.1f} tokens/s, "
        f"first token after {figures['first_token_seconds']:.2f} s\n"
        f"generation  {figures['completion_tokens']} tokens, {figures['generation_tps']:.1f} tokens/s, "
        f"ended by {reason}\n"
        f"drafts      {drafts}\n"
        f"memory      {format_size(figures['peak_memory_bytes'])} at the peak"
    )
