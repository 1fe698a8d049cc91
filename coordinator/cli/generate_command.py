"""`mtp-coord generate`: the answer to one prompt, in this process or from a running coordinator."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import mlx.core as mx
import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from coordinator.cli.draft_vocab_option import DraftVocabOption
from coordinator.cli.exact_option import ExactOption, checked_exact
from coordinator.cli.http_call import KeyOption
from coordinator.cli.printed_answer import PrintedAnswer
from coordinator.cli.prompt_source import PromptSource
from coordinator.cli.remote_generate import RemoteRequest, generate_remotely
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import GenerationRequest, PrefillProgress
from coordinator.local_engine.generator import local_generator
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.resolve import BUILTIN, resolve_model
from mtp.depth.controller import MtpMode
from mtp.head.draft_vocabulary import DraftVocabularySize
from proto.errors import RequestError, UsageError
from proto.params import Acceptance, SamplingParams
from proto.terminal import logs
from proto.terminal.progress_bar import byte_bar

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
            async for event in loop.generate(request):
                if isinstance(event, PrefillProgress):
                    bars.prefill(event)
                answer.add_event(event)
                # A finished sequence is not in the snapshot. Its Finished event carries its figures.
                if requests := loop.snapshot().requests:
                    answer.stats = requests[0].stats
                    if answer.reason is not None:
                        return
        except asyncio.CancelledError:
            answer.reason = "cancelled"
