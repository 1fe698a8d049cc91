"""`mtp-coord generate`: the answer to one prompt, computed in this process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import mlx.core as mx
import typer

from coordinator.answers.choice import Choice, ChoiceEnd
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.schedule.admission import check_request
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.request import Finished, GenerationEvent, GenerationRequest, GenerationStats
from coordinator.schedule.request import generate as generate_events
from coordinator.serve import options
from coordinator.serve.options import check_drafts
from coordinator.text.answer_reader import Content, Part, Reasoning
from coordinator.text.harmony import reader_of
from coordinator.text.tokenizer import TextStream, Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.missing_head import with_fetched_head
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from proto.errors import RequestError, UsageError
from proto.params import SamplingParams
from proto.stage_options import StageOptions
from proto.terminal import logs
from proto.terminal.options import JsonOption, takes_options
from proto.terminal.progress import byte_bar, format_size

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def encode_prompt(tokenizer: Tokenizer, text: str, *, raw: bool) -> tuple[tuple[int, ...], bool | None]:
    """Return the prompt's tokens, and whether the answer opens in reasoning, None if `raw`. Raises UsageError."""
    if raw:
        return tokenizer.encode(text), None
    try:
        chat = tokenizer.chat_prompt([{"role": "user", "content": text}])
    except RequestError as error:
        raise UsageError(f"{error}. Use --raw to continue it without a template") from error
    return chat.tokens, chat.thinking


class PrintedAnswer:
    """The answer so far. With `stream` its text goes to stdout as soon as it is final.

    `thinking` is None without a chat template, otherwise true if the answer opens in reasoning. Reasoning is dim on a
    terminal, and left out of a pipe.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: GenerationRequest, *, stream: bool, thinking: bool | None
    ) -> None:
        self.stats = GenerationStats(0, 0)
        self._tokenizer = tokenizer
        self._stream = stream
        self._shown = ""
        self._in_reasoning = False
        reader = None if thinking is None else reader_of(tokenizer.marks, thinking=thinking)
        self._choice = Choice(0, request, tokenizer, (), reader)

    def add_event(self, event: GenerationEvent) -> None:
        """Add the tokens of an event. Raises WorkerLostError if the engine failed."""
        found = self._choice.apply_event(event)
        if isinstance(event, Finished):
            self.stats = event.stats
        if self._stream:
            self._show([one.part for one in found])

    def _show(self, parts: Sequence[Part | ChoiceEnd]) -> None:
        for part in parts:
            match part:
                case Reasoning(text) if sys.stdout.isatty():
                    self._in_reasoning = True
                    sys.stdout.write(f"{DIM}{text}{PLAIN}")
                case Content(text) if text:
                    sys.stdout.write("\n\n" * self._in_reasoning + text)
                    self._in_reasoning = False
                    self._shown += text
        sys.stdout.flush()

    def to_json(self) -> str:
        """Return the object that `--json` prints."""
        tokens, pieces = self._choice.generated, TextStream(self._tokenizer.text_bytes)
        text = "".join(pieces.add_token(token).text for token in tokens) + pieces.finish().text
        reason = self._choice.finish_reason
        stats = summary(self.stats, len(tokens))
        return json.dumps({"tokens": tokens, "text": text, "finish_reason": reason, "stats": stats})

    def summarize(self) -> None:
        """End the text on stdout, and print the figures on stderr."""
        if not self._shown.endswith("\n"):
            typer.echo()
        choice = self._choice
        if choice.reasoning and not self._shown:
            typer.echo("the answer ended inside its reasoning; --json shows it", err=True)
        typer.echo(_figures(summary(self.stats, len(choice.generated)), choice.finish_reason), err=True)


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
        "text_drafted": stats.ngram_drafted,
        "text_accepted": stats.ngram_accepted,
        "acceptance_by_position": [_rate(kept, drafted) for kept, drafted in pairs],
        "peak_memory_bytes": mx.get_peak_memory(),
    }


def _rate(count: float, over: float) -> float:
    return round(count / over, 4) if over > 0 else 0.0


def _figures(figures: dict[str, Any], reason: str | None) -> str:
    """Return the figures as lines for people."""
    drafts = "none"
    if figures["drafted"]:
        text, kept = figures["text_drafted"], figures["text_accepted"]
        parts = []
        if figures["drafted"] > text:
            shares = " ".join(f"{p:.0%}" for p in figures["acceptance_by_position"])
            of_head = f"{figures['accepted'] - kept} of {figures['drafted'] - text}"
            parts.append(f"the head's {of_head} accepted, by position {shares}")
        parts += [f"{kept} of {text} repeated from the text accepted"] if text else []
        drafts = f"{'; '.join(parts)}; {figures['tokens_per_window']:.2f} tokens a window"
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


@dataclass(frozen=True)
class GenerateOptions:
    """The flags of `mtp-coord generate`."""

    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="The prompt; - is stdin.", show_default=False),
        typer.Option(help="The same, as an option."),
    ]
    model: Annotated[str, typer.Option(help="A directory, a hub repo, or 'builtin'.")] = BUILTIN
    raw: Annotated[bool, typer.Option("--raw", help="Go on from the prompt itself: no chat template.")] = False
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Most tokens to generate.  [default: {DEFAULT_TOKENS}]"),
    ] = None
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the likeliest token.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this times the likeliest.")] = 0.0
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0
    mtp: options.MtpOption = options.AUTO
    ngram: options.NgramOption = NgramMode.auto
    acceptance: options.AcceptanceOption = "match"
    draft_vocab: options.DraftVocabOption = options.ALL_TOKENS
    dtype: options.DtypeOption = None
    kv_bits: options.KvBitsOption = None
    exact: options.ExactOption = False
    json: JsonOption = False


@takes_options(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Generate text from one prompt in this process, without workers.

    The text goes to stdout as it comes, a summary of speed, drafts and memory to stderr. Reasoning is dim on a terminal
    and left out of a pipe.

    `mtp-coord generate "What is GatedDeltaNet?" --model Qwen/Qwen3.5-4B`
    """
    logs.configure(logs.LogLevel.warning)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    sampling = (options.temp, options.top_k, options.top_p, options.min_p)
    check_drafts(options.mtp, options.acceptance, options.draft_vocab, options.exact)
    params = SamplingParams(*sampling, seed=options.seed, acceptance=options.acceptance)
    with byte_bar("downloading the model") as on_progress:
        path = with_fetched_head(resolve_model(options.model, on_progress))
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    if options.exact:
        config.check_exact()
    tokenizer = Tokenizer.load(checkpoint.path, config.eos_token_ids)
    tokens, thinking = encode_prompt(tokenizer, text, raw=options.raw)
    most = options.max_tokens or max(1, min(DEFAULT_TOKENS, config.max_positions - len(tokens)))
    ends = frozenset(config.eos_token_ids) | tokenizer.eos_ids
    request = GenerationRequest(tokens, most, params, stop_tokens=ends)
    check_request(request, config.max_positions, config.vocab_size, config.max_positions)
    answer = PrintedAnswer(tokenizer, request, stream=not options.json, thinking=thinking)
    drafted = options.draft_vocab.resolve(tokenizer.backend, ends, config.vocab_size)
    stage = StageOptions(options.dtype, options.kv_bits, exact=options.exact, draft_vocab=drafted)
    asyncio.run(_run(checkpoint, stage, options, request, answer))
    if options.json:
        typer.echo(answer.to_json())
    else:
        answer.summarize()


async def _run(
    checkpoint: Checkpoint,
    stage: StageOptions,
    options: GenerateOptions,
    request: GenerationRequest,
    answer: PrintedAnswer,
) -> None:
    async with AsyncExitStack() as stack:
        with byte_bar("loading") as on_progress:
            generator = local_generator(
                checkpoint, options=stage, mtp=options.mtp, ngram=options.ngram, on_progress=on_progress
            )
            loop = await stack.enter_async_context(generator)
        async for event in generate_events(loop, request):
            answer.add_event(event)
