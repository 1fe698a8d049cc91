"""`mtp-coord generate`: the answer to one prompt, in this process or from a running coordinator."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import mlx.core as mx
import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from coordinator.cli.client import KeyOption, ShownText, call, open_client, stream_events
from coordinator.cli.options import DraftVocabOption, ExactOption, checked_exact
from coordinator.schedule import request as generation
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    GenerationStats,
    PrefillProgress,
    TokenChunk,
)
from coordinator.text.chat_parser import ChatParser, Content, Part, Reasoning
from coordinator.text.tokenizer import Piece, TextStream, Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from mtp.depth.controller import MtpMode
from mtp.head.draft_vocabulary import DraftVocabularySize
from proto.errors import ProtocolError, RequestError, UsageError, WorkerLostError
from proto.frame import TokenLogprob
from proto.params import Acceptance, SamplingParams
from proto.terminal import logs
from proto.terminal.progress import byte_bar, format_size


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
            self._show(self._parser.add(piece.text))

    def _show(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Reasoning(text):
                    self._shown.show_reasoning(text)
                case Content(text):
                    self._shown.show_content(text)

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
            self._show(self._parser.finish())
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


@dataclass(frozen=True)
class RemoteRequest:
    """One request. `fields` are those of the API; `raw` continues the text without a chat template."""

    url: str
    api_key: str | None
    text: str
    raw: bool
    fields: dict[str, Any]


def generate_remotely(request: RemoteRequest, *, as_json: bool) -> None:
    """Print the answer to `request` as it arrives, and a summary on stderr. With `as_json` print one JSON object.

    Raises the errors of `stream_events`, and UsageError for a malformed URL.
    """
    body = {"model": _served_model(request.url, request.api_key), **request.fields}
    path = "/v1/completions" if request.raw else "/v1/chat/completions"
    if request.raw:
        body["prompt"] = request.text
    else:
        body["messages"] = [{"role": "user", "content": request.text}]
    body["stream_options"] = {"include_usage": True}
    shown = ShownText(enabled=not as_json)
    usage: dict[str, Any] = {}
    started, first, reason, reasoning = time.monotonic(), 0.0, "", ""
    with open_client(request.url, request.api_key) as client:
        for event in stream_events(client, path, body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                first = first or time.monotonic()
                delta = choice.get("delta") or {"content": choice.get("text")}
                reasoning += delta.get("reasoning_content") or ""
                shown.show_reasoning(delta.get("reasoning_content") or "")
                shown.show_content(delta.get("content") or "")
                reason = choice.get("finish_reason") or reason
    if as_json:
        facts = {
            "text": shown.content,
            "reasoning": reasoning,
            "finish_reason": reason,
            "usage": usage,
        }
        typer.echo(json.dumps(facts))
        return
    shown.end_line()
    _summarize(usage, reason, first - started, time.monotonic() - (first or started))


def _served_model(url: str, api_key: str | None) -> str:
    """Return the name of the model that the server serves."""
    body = call("GET", url, "/v1/models", api_key)
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ProtocolError(f"{url} lists no model. Give the --url of an mtp-coord serve") from None


def _summarize(usage: dict[str, Any], reason: str, first: float, seconds: float) -> None:
    """Print the figures of the answer on stderr, as a local `generate` does."""
    tokens = usage.get("completion_tokens", 0)
    details = usage.get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens", 0)
    drafted = accepted + details.get("rejected_prediction_tokens", 0)
    drafts = f"{accepted} of {drafted} accepted" if drafted else "none"
    typer.echo(
        f"prompt      {usage.get('prompt_tokens', 0)} tokens, first token after {first:.2f} s\n"
        f"generation  {tokens} tokens, {max(0, tokens - 1) / max(seconds, 1e-9):.1f} tokens/s, ended by {reason}\n"
        f"drafts      {drafts}",
        err=True,
    )


DEFAULT_TOKENS = 512
"""Tokens to generate without --max-tokens, or fewer if the context ends earlier."""

INTERRUPTED = 130


def generate(
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A directory, a hub repo, or 'builtin'.  [default: builtin]"),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The same, as an option.")] = None,
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
            help="Drafts a step: auto, off, a number, or filled: several windows of an answer in flight."
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
    exact: ExactOption = False,
    draft_vocab: DraftVocabOption = "off",
    logprobs: Annotated[
        int | None, typer.Option(help="Report log-probabilities, and those of N alternatives.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; repeatable.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Ask the mtp-coord serve at this URL, and load no model here."),
    ] = None,
    api_key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate text from one prompt, in this process or on a running cluster.

    The text goes to stdout as it comes, a summary of speed, drafts and memory to stderr. Reasoning is dim on a terminal
    and left out of a pipe.

    `mtp-coord generate "What is GatedDeltaNet?" --url http://127.0.0.1:8080`
    """
    logs.configure(logs.LogLevel.warning)
    stops = tuple(stop or ())
    if not all(stops):
        raise UsageError("--stop '': an empty string would end every text before it begins")
    if text is not None and prompt is not None:
        raise UsageError("give PROMPT or --prompt, not both")
    source = PromptSource(prompt if text is None else text, prompt_file, tokens, raw)
    if url is not None:
        local = {
            "--model": model,
            "--tokens": tokens,
            "--stages": stages if stages != 1 else None,
            "--dtype": dtype,
            "--kv-bits": kv_bits,
            "--exact": exact or None,
            "--draft-vocab": draft_vocab if draft_vocab != "off" else None,
            "--mtp": mtp if mtp != "auto" else None,
            "--acceptance": acceptance if acceptance != "coupled" else None,
            "--logprobs": logprobs,
        }
        fields: dict[str, Any] = {
            "temperature": temp,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "seed": seed,
        }
        fields |= {"max_tokens": max_tokens or DEFAULT_TOKENS}
        fields |= {"stop": list(stops)} if stops else {}
        _refuse_local_flags(local)
        request = RemoteRequest(url, api_key, source.read_text(), raw, fields)
        generate_remotely(request, as_json=as_json)
        return
    with naming_flags():
        params = SamplingParams(
            temp, top_k, top_p, min_p, seed=seed, logprobs=logprobs, acceptance=acceptance
        )
    mode = MtpMode.parse(mtp)
    with byte_bar("downloading the model") as on_progress:
        path = resolve_model(model or BUILTIN, on_progress)
    checkpoint = Checkpoint.open(path)
    tokenizer = _tokenizer(checkpoint, needed=tokens is None or bool(stops))
    opened = source.read_tokens(checkpoint.config.vocab_size, tokenizer)
    request_here = _request(checkpoint, tokenizer, opened.tokens, max_tokens, params)
    answer = PrintedAnswer(tokenizer, stops, stream=not as_json, thinking=opened.thinking)
    with Bars() as bars, naming_flags():
        engine = local_generator(
            checkpoint,
            stages=stages,
            dtype=None if dtype is None else getattr(mx, dtype),
            mtp=mode,
            kv_bits=None if kv_bits is None else int(kv_bits),
            exact=checked_exact(exact, acceptance),
            draft_vocab=DraftVocabularySize.parse(draft_vocab),
            on_progress=bars.loading,
        )
        asyncio.run(_run(engine, request_here, answer, bars))
    if as_json:
        typer.echo(answer.to_json())
    else:
        answer.summarize()
    if answer.reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


# ---- in


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


def _refuse_local_flags(flags: Mapping[str, object]) -> None:
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        raise UsageError(
            f"--url: {', '.join(given)} of the server cannot be set from here. Leave it out"
        )


def _tokenizer(checkpoint: Checkpoint, *, needed: bool) -> Tokenizer | None:
    """Return the tokenizer of the checkpoint; None if it has none and none is needed."""
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
    """Return the request. Raises UsageError for a prompt or answer longer than the context."""
    context = checkpoint.config.max_positions
    if not prompt:
        raise UsageError("the prompt is empty")
    if len(prompt) >= context:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, and this model's context is {context}. Shorten the prompt"
        )
    if max_tokens is not None and len(prompt) + max_tokens > context:
        raise UsageError(
            f"--max-tokens {max_tokens}: the prompt has {len(prompt)} tokens, and this model's context is "
            f"{context}. Ask for {context - len(prompt)} or fewer"
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
    """Progress bars of loading and of a long prompt on a terminal. They disappear before the first token."""

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
        """Show the bytes of weights that were read."""
        self._show("loading", done, total)

    def prefill(self, event: PrefillProgress) -> None:
        """Show the computed tokens of the prompt. The bars disappear after the last one."""
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
    """Generate until the text ends. After Ctrl-C `answer` has the text so far, and the reason `cancelled`."""
    async with engine as loop:
        try:
            async for event in generation.generate(loop, request):
                if isinstance(event, PrefillProgress):
                    bars.prefill(event)
                answer.add_event(event)
                # A finished sequence does not run. Its Finished event carries its figures.
                for sequence in loop.scheduler.running.values():
                    answer.stats = sequence.stats(loop.clock())
                    if answer.reason is not None:
                        return
        except asyncio.CancelledError:
            answer.reason = "cancelled"
