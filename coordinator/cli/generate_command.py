"""`mtp-coord generate`: one prompt through a model in this process, its text to stdout as it comes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import mlx.core as mx
import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from coordinator.cli.printed_answer import PrintedAnswer
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import GenerationRequest, PrefillProgress
from coordinator.local_engine.generator import local_generator
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import resolve_model
from mtp.depth.controller import MtpMode
from proto.errors import RequestError, UsageError
from proto.params import Acceptance, SamplingParams
from proto.terminal import logs

DEFAULT_TOKENS = 512
"""Tokens to generate where --max-tokens does not say, or fewer where the context ends."""

INTERRUPTED = 130


def generate(
    model: Annotated[str, typer.Option(help="A directory, a hub repo, or 'builtin'.")] = "builtin",
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with the prompt; '-' is stdin.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="The prompt as token ids, separated by commas.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompt itself: no chat template.")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Most tokens to generate.  [default: {DEFAULT_TOKENS}]"),
    ] = None,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this times the likeliest.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    mtp: Annotated[
        str,
        typer.Option(
            help="Drafts a step: auto, off, a number, or filled: one-token windows, one for every stage."
        ),
    ] = "auto",
    acceptance: Annotated[
        Acceptance,
        typer.Option(help="How drafts are judged; under 'ratio' the text depends on --mtp."),
    ] = "coupled",
    stages: Annotated[int, typer.Option(min=1, help="Cut the model into this many stages.")] = 1,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Compute in this type instead of the stored one."),
    ] = None,
    kv_bits: Annotated[
        Literal["4", "8"] | None, typer.Option(help="Quantize keys and values.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Report log-probabilities, and those of N alternatives.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate text from one prompt, in this process.

    Text goes to stdout as it comes; a summary of speed, drafts and memory ends on stderr.
    """
    logs.configure(logs.LogLevel.warning)
    with naming_flags():
        params = SamplingParams(
            temp, top_k, top_p, min_p, seed=seed, logprobs=logprobs, acceptance=acceptance
        )
    mode = MtpMode.parse(mtp)
    stops = tuple(stop or ())
    if not all(stops):
        raise UsageError("--stop '': an empty string ends every text before it begins")
    source = PromptSource(prompt, prompt_file, tokens, raw)
    checkpoint = Checkpoint.open(resolve_model(model))
    tokenizer = _tokenizer(checkpoint, needed=tokens is None or bool(stops))
    request = _request(
        checkpoint, tokenizer, source.read(checkpoint, tokenizer), max_tokens, params
    )
    answer = PrintedAnswer(tokenizer, stops, stream=not as_json)
    with Bars() as bars, naming_flags():
        engine = local_generator(
            checkpoint,
            stages=stages,
            dtype=None if dtype is None else getattr(mx, dtype),
            mtp=mode,
            kv_bits=None if kv_bits is None else int(kv_bits),
            on_progress=bars.loading,
        )
        asyncio.run(_run(engine, request, answer, bars))
    if as_json:
        typer.echo(answer.to_json())
    else:
        answer.summarize()
    if answer.reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


# ---- in


@contextmanager
def naming_flags() -> Iterator[None]:
    """A RequestError inside becomes a UsageError that calls the field by its flag."""
    try:
        yield
    except RequestError as error:
        if error.param is None:
            raise
        flag = "--temp" if error.param == "temperature" else f"--{error.param.replace('_', '-')}"
        told = str(error)
        rest = told.removeprefix(error.param)
        raise UsageError(f"{flag}{rest}" if rest != told else f"{flag}: {told}") from error


@dataclass(frozen=True)
class PromptSource:
    """Where the prompt is: exactly one of `text`, `file`, `tokens`. Raises UsageError otherwise."""

    text: str | None
    file: Path | None
    tokens: str | None
    raw: bool

    def __post_init__(self) -> None:
        given = sum(x is not None for x in (self.text, self.file, self.tokens))
        if given != 1:
            found = "none" if given == 0 else "more than one"
            raise UsageError(f"give one of --prompt, --prompt-file and --tokens; {found} was given")

    def read(self, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """The prompt's tokens. Raises UsageError for what cannot be read or is no token of this model."""
        if self.tokens is not None:
            return _parse_tokens(self.tokens, checkpoint.config.vocab_size)
        assert tokenizer is not None
        text = self.text if self.file is None else _read_text(self.file)
        assert text is not None
        if self.raw:
            return tokenizer.encode(text)
        try:
            return tokenizer.chat_prompt([{"role": "user", "content": text}]).tokens
        except RequestError as error:
            raise UsageError(f"{error}. With --raw the prompt is taken as it stands") from error


def _parse_tokens(text: str, vocab: int) -> tuple[int, ...]:
    tokens = []
    for word in text.split(","):
        if not (word.strip().isascii() and word.strip().isdigit()):
            raise UsageError(f"--tokens: {word!r:.40} is not a token id; write 1,2,3")
        if (token := int(word)) >= vocab:
            raise UsageError(f"--tokens: {token} is no token of this model, which has {vocab}")
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


def _tokenizer(checkpoint: Checkpoint, *, needed: bool) -> Tokenizer | None:
    """The checkpoint's tokenizer. Tokens in and tokens out go without one."""
    if not needed and not (checkpoint.path / "tokenizer.json").exists():
        return None
    return Tokenizer.load(checkpoint.path, checkpoint.config.eos_token_ids)


def _request(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    prompt: tuple[int, ...],
    max_tokens: int | None,
    params: SamplingParams,
) -> GenerationRequest:
    """Raises UsageError for a prompt that leaves no room for an answer, or not for so long a one."""
    context = checkpoint.config.max_positions
    if not prompt:
        raise UsageError("the prompt is empty")
    if len(prompt) >= context:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, and this model's context is {context}: shorten it"
        )
    if max_tokens is not None and len(prompt) + max_tokens > context:
        raise UsageError(
            f"--max-tokens {max_tokens}: the prompt has {len(prompt)} tokens, and this model's context is "
            f"{context}: ask for {context - len(prompt)} or fewer"
        )
    ends = frozenset(checkpoint.config.eos_token_ids)
    return GenerationRequest(
        prompt,
        max_tokens or min(DEFAULT_TOKENS, context - len(prompt)),
        params,
        stop_tokens=ends if tokenizer is None else ends | tokenizer.eos_ids,
    )


# ---- the run


class Bars:
    """Progress of loading and of a long prompt on stderr, if that is a terminal. Gone before the first token."""

    def __init__(self) -> None:
        self._progress = Progress(
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def loading(self, done: int, total: int) -> None:
        """Bytes of weights read."""
        self._show("loading", done, total)

    def prefill(self, event: PrefillProgress) -> None:
        """Tokens of the prompt done; at the last one the bars leave the screen to the text."""
        if event.done < event.total:
            self._show("prompt", event.done, event.total)
        else:
            self._progress.stop()

    def _show(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name)
        self._progress.update(self._tasks[name], completed=done, total=total, visible=done < total)


async def _run(
    engine: AbstractAsyncContextManager[GenerationLoop],
    request: GenerationRequest,
    answer: PrintedAnswer,
    bars: Bars,
) -> None:
    """Generate until the text ends. Interrupted (Ctrl-C), `answer` holds what there is, its reason `cancelled`."""
    async with engine as loop:
        try:
            async for event in loop.generate(request):
                if isinstance(event, PrefillProgress):
                    bars.prefill(event)
                answer.take(event)
                # A finished sequence is not in the snapshot. Its Finished event carries its figures.
                if requests := loop.snapshot().requests:
                    answer.stats = requests[0].stats
                    if answer.reason is not None:
                        return
        except asyncio.CancelledError:
            answer.reason = "cancelled"
