"""`mtp-coord generate`: the answer to one prompt, computed in this process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer

from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    GenerationStats,
    TokenChunk,
)
from coordinator.schedule.request import generate as generate_events
from coordinator.serve import options
from coordinator.serve.options import checked_slices
from coordinator.text.chat_parser import ChatParser, Content, Part, Reasoning
from coordinator.text.tokenizer import Piece, TextStream, Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from proto.errors import RequestError, UsageError, WorkerLostError
from proto.frame import TokenLogprob
from proto.params import SamplingParams
from proto.terminal import logs
from proto.terminal.options import JsonOption, takes_options
from proto.terminal.progress import byte_bar, format_size

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class ShownText:
    """The text on stdout. Reasoning is dim on a terminal, and left out of a pipe."""

    def __init__(self) -> None:
        self.content = ""
        self._terminal = sys.stdout.isatty()
        self._in_reasoning = False

    def show(self, parts: Sequence[Part]) -> None:
        """Print the parts. After reasoning, content starts in a new paragraph."""
        for part in parts:
            match part:
                case Reasoning(text) if self._terminal:
                    self._in_reasoning = True
                    self._write(f"{DIM}{text}{PLAIN}")
                case Content(text) if text:
                    self._write("\n\n" * self._in_reasoning + text)
                    self._in_reasoning = False
                    self.content += text

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def encode_prompt(
    tokenizer: Tokenizer, text: str, *, raw: bool
) -> tuple[tuple[int, ...], bool | None]:
    """Return the prompt's tokens, and whether the answer opens in reasoning, None if `raw`. Raises UsageError."""
    thinking = None
    if raw:
        tokens = tokenizer.encode(text)
    else:
        try:
            chat = tokenizer.chat_prompt([{"role": "user", "content": text}])
        except RequestError as error:
            raise UsageError(f"{error}. Use --raw to continue it without a template") from error
        tokens, thinking = chat.tokens, chat.thinking
    if not tokens:
        raise UsageError("the prompt is empty")
    return tokens, thinking


def read_prompt(text: str | None, file: Path | None) -> str:
    """Return `text`, or the content of `file`; `-` is stdin. Raises UsageError without one, or with both."""
    if (text is None) == (file is None):
        found = "both were given" if text else "none was given"
        raise UsageError(f"give a PROMPT or --prompt-file; {found}")
    if file is None:
        assert text is not None
        return text
    try:
        data = sys.stdin.buffer.read() if file == Path("-") else file.read_bytes()
        return data.decode()
    except OSError as error:
        raise UsageError(f"--prompt-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {file}: not UTF-8 at byte {error.start}") from error


class PrintedAnswer:
    """The answer so far. With `stream` its text goes to stdout as soon as it is final.

    A complete stop string ends the answer. The last of `tokens` is then the one that completed it. `thinking` is None
    without a chat template, otherwise true if the answer opens in reasoning.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], *, stream: bool, thinking: bool | None
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.reason: str | None = None
        self.stats = GenerationStats(0, 0)
        self._shown = ShownText() if stream else None
        self._parser = None if thinking is None else ChatParser(tokenizer, thinking=thinking)
        self._pieces = TextStream(tokenizer.text_bytes, stops)

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
            for index, token in enumerate(event.tokens):
                self.tokens.append(token)
                self.logprobs += event.logprobs[index : index + 1]
                self._add_piece(self._pieces.add_token(token))
                if self._pieces.stopped:
                    self.reason = "stop"
                    return

    def _add_piece(self, piece: Piece) -> None:
        self.text += piece.text
        if self._shown is not None:
            parser = self._parser
            self._shown.show(parser.add_text(piece.text) if parser else [Content(piece.text)])

    def to_json(self) -> str:
        """Return the object that `--json` prints. `logprobs` is null unless requested."""
        entries = []
        for entry in self.logprobs:
            top = [{"token": token, "logprob": value} for token, value in entry.top]
            entries.append({"token": entry.token, "logprob": entry.logprob, "top": top})
        result = {
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.reason,
            "logprobs": entries or None,
            "stats": summary(self.stats, len(self.tokens)),
        }
        return json.dumps(result)

    def summarize(self) -> None:
        """End the text on stdout, and print the figures on stderr."""
        assert self._shown is not None
        if self._parser is not None:
            self._shown.show(self._parser.finish())
        if not self._shown.content.endswith("\n"):
            typer.echo()
        if self._parser is not None and self.text and not self._shown.content:
            typer.echo("the answer ended inside its reasoning; --json shows it", err=True)
        typer.echo(_figures(summary(self.stats, len(self.tokens)), self.reason or ""), err=True)


def summary(stats: GenerationStats, tokens: int) -> dict[str, Any]:
    """Return the figures of a run. `acceptance_by_position[i]` is that of the drafts at position i + 1."""
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
        shares = " ".join(f"{p:.0%}" for p in figures["acceptance_by_position"])
        by_position = f", the head's by position {shares}" if shares else ""
        drafts = (
            f"{figures['accepted']} of {figures['drafted']} accepted{by_position}; "
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


DEFAULT_TOKENS = 512
"""Tokens to generate without --max-tokens, or fewer if the context ends earlier."""

INTERRUPTED = 130


@dataclass(frozen=True)
class GenerateOptions:
    """The flags of `mtp-coord generate`."""

    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt.", show_default=False),
        typer.Option(help="The same, as an option."),
    ] = None
    model: Annotated[str, typer.Option(help="A directory, a hub repo, or 'builtin'.")] = BUILTIN
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with the prompt; '-' is stdin.")
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompt itself: no chat template.")
    ] = False
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Most tokens to generate.  [default: {DEFAULT_TOKENS}]"),
    ] = None
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the likeliest token.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this times the likeliest.")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0
    mtp: options.MtpOption = options.AUTO
    ngram: options.NgramOption = NgramMode.auto
    stages: Annotated[int, typer.Option(min=1, help="Cut the model into this many stages.")] = 1
    dtype: options.DtypeOption = None
    kv_bits: options.KvBitsOption = None
    exact: options.ExactOption = False
    slices: options.SlicesOption = None
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities, and those of N alternatives."),
    ] = None
    stop: Annotated[
        tuple[str, ...], typer.Option(help="End the text before this string; repeatable.")
    ] = ()
    json: JsonOption = False


@takes_options(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Generate text from one prompt in this process, without workers.

    The text goes to stdout as it comes, a summary of speed, drafts and memory to stderr. Reasoning is dim on a terminal
    and left out of a pipe.

    `mtp-coord generate "What is GatedDeltaNet?" --model Qwen/Qwen3.5-4B`
    """
    logs.configure(logs.LogLevel.warning)
    if not all(options.stop):
        raise UsageError("--stop '': an empty string would end every text before it begins")
    text = read_prompt(options.prompt, options.prompt_file)
    with naming_flags():
        sampling = (options.temp, options.top_k, options.top_p, options.min_p)
        params = SamplingParams(*sampling, seed=options.seed, logprobs=options.logprobs)
    with byte_bar("downloading the model") as on_progress:
        path = resolve_model(options.model, on_progress)
    checkpoint = Checkpoint.open(path)
    tokenizer = Tokenizer.load(path, checkpoint.config.eos_token_ids)
    tokens, thinking = encode_prompt(tokenizer, text, raw=options.raw)
    request = _request(checkpoint, tokenizer, tokens, options.max_tokens, params)
    answer = PrintedAnswer(tokenizer, options.stop, stream=not options.json, thinking=thinking)
    engine = partial(
        local_generator,
        checkpoint,
        stages=options.stages,
        dtype=options.dtype,
        mtp=options.mtp,
        ngram=options.ngram,
        kv_bits=options.kv_bits,
        exact=options.exact,
        slices=checked_slices(options.slices, options.exact),
    )
    with naming_flags():
        asyncio.run(_run(engine, request, answer))
    if options.json:
        typer.echo(answer.to_json())
    else:
        answer.summarize()
    if answer.reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


@contextmanager
def naming_flags() -> Iterator[None]:
    """Raise a RequestError of the block as a UsageError that names the field by its flag."""
    try:
        yield
    except RequestError as error:
        if error.param is None:
            raise
        flag = "--temp" if error.param == "temperature" else f"--{error.param.replace('_', '-')}"
        message = str(error)
        rest = message.removeprefix(error.param)
        raise UsageError(f"{flag}{rest}" if rest != message else f"{flag}: {message}") from error


def _request(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    prompt: tuple[int, ...],
    max_tokens: int | None,
    params: SamplingParams,
) -> GenerationRequest:
    """Return the request. Raises UsageError for a prompt or answer longer than the context."""
    context = checkpoint.config.max_positions
    if len(prompt) >= context:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, and this model's context is {context}. Shorten the prompt"
        )
    if max_tokens is not None and len(prompt) + max_tokens > context:
        raise UsageError(
            f"--max-tokens {max_tokens}: the prompt has {len(prompt)} tokens, and this model's context is "
            f"{context}. Ask for {context - len(prompt)} or fewer"
        )
    most = max_tokens or min(DEFAULT_TOKENS, context - len(prompt))
    ends = frozenset(checkpoint.config.eos_token_ids) | tokenizer.eos_ids
    return GenerationRequest(prompt, most, params, stop_tokens=ends)


async def _run(
    engine: Callable[..., AbstractAsyncContextManager[GenerationLoop]],
    request: GenerationRequest,
    answer: PrintedAnswer,
) -> None:
    """Load, and generate until the text ends. After Ctrl-C `answer` has the text so far, and the reason `cancelled`."""
    async with AsyncExitStack() as stack:
        with byte_bar("loading") as on_progress:
            loop = await stack.enter_async_context(engine(on_progress=on_progress))
        try:
            async for event in generate_events(loop, request):
                answer.add_event(event)
                # A finished sequence does not run. Its Finished event carries its figures.
                for sequence in loop.scheduler.running.values():
                    answer.stats = sequence.stats(loop.clock())
                    if answer.reason is not None:
                        return
        except asyncio.CancelledError:
            answer.reason = "cancelled"
