"""`mtp-coord bench`: the speed of a running server, ours or another with OpenAI's API, as its clients see it."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from coordinator.cli.client import REPLY_SECONDS, KeyOption, UrlOption, call, connection, refusal
from coordinator.cli.cluster_commands import fetch, parse
from coordinator.cli.known_servers import find_server
from coordinator.status.history import percentile
from proto.errors import ClusterError, ProtocolError, UsageError, WorkerLostError
from proto.terminal.options import JsonOption, takes_options

PROMPTS, STREAMS = (128, 2048, 16_000), (1, 4, 8, 16)
"""Tokens of a cold prompt, and numbers of answers at once, without flags."""

COLUMNS = {"prompt": ",.0f", "streams": "", "drafts": "", "first": ".3f", "tokens/s": ".1f"}
COLUMNS |= {"p50": ".1f", "p95": ".1f", "p99": ".1f", "over off": ".2f", "step": ".2f", "accepted": ""}
"""The figures of a row, and their formats."""

LEGEND = """
first: seconds to the first token. p50, p95, p99: milliseconds between tokens; those of one read share its time equally.
over off: tokens/s over those without drafts. step: time of a step over one without drafts, which is β + δ for 1 draft.
accepted: percent of the head's drafts at each position, of all clients meanwhile."""


@dataclass(frozen=True)
class BenchOptions:
    """The flags of `mtp-coord bench`."""

    url: UrlOption = ""
    api_key: KeyOption = None
    model: Annotated[str | None, typer.Option(help="Model that requests name.  [default: the served one]")] = None
    prompt: Annotated[tuple[int, ...], typer.Option(min=1, help="Tokens of a cold prompt; repeatable.")] = PROMPTS
    streams: Annotated[tuple[int, ...], typer.Option(min=1, max=99, help="Answers at once; repeatable.")] = STREAMS
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds. Streams have one before them.")] = 2
    timeout: Annotated[float, typer.Option(min=1, help="Seconds. Longest answer.")] = 600.0
    json: JsonOption = False


@dataclass
class Answer:
    """One streamed answer. `reads` are the tokens of each read by the seconds from the request to it."""

    reads: dict[float, int] = field(default_factory=dict)
    usage: Counter[str] = field(default_factory=Counter)
    ended: bool = False

    def add_line(self, line: bytes, at: float) -> None:
        """Add a line that arrived at `at`. Chunks have a token for each token id, or equal shares without ids."""
        if not line.startswith(b"data:") or self.ended:
            return
        self.ended = line[5:].strip() == b"[DONE]"
        chunk = {} if self.ended else json.loads(line[5:])
        if error := chunk.get("error"):
            raise WorkerLostError(f"an answer ended with an error: {error!s:.300}. See the log of the server")
        if usage := chunk.get("usage"):
            parts = (usage, usage.get("prompt_tokens_details"), usage.get("completion_tokens_details"))
            self.usage = Counter({name: n for part in parts for name, n in (part or {}).items() if isinstance(n, int)})
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
            if count := len(choice["token_ids"]) if "token_ids" in choice else int(text):
                self.reads[at] = self.reads.get(at, 0) + count

    def intervals(self) -> list[float]:
        """Return the milliseconds of each token after the first read. The tokens of one read share its time equally."""
        scale, found = self.usage["completion_tokens"] / sum(self.reads.values()), list[float]()
        for before, (at, chunks) in zip(self.reads, list(self.reads.items())[1:], strict=False):
            count = max(1, round(chunks * scale))
            found += [1000 * (at - before) / count] * count
        return found


@dataclass
class Row:
    """Answers at once, to cold prompts of some words or to short ones. `counts` are the drafts meanwhile.

    Requests name the number of their `drafts`, None for the choice of the server, which `mode` names.
    """

    streams: int
    prompt: int | None = None
    mode: str = "-"
    drafts: int | None = None
    words: int = 0
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    def figures(self, plain: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the figures of COLUMNS, and the seconds of a step. Ratios are over `plain`, those without drafts."""
        found: dict[str, Any] = {"streams": self.streams, "drafts": self.mode}
        found["prompt"] = percentile((answer.usage["prompt_tokens"] for answer in self.answers), 0.5)
        found["first"] = percentile((min(answer.reads) for answer in self.answers), 0.5)
        intervals = [interval for answer in self.answers for interval in answer.intervals()]
        usage = sum((answer.usage for answer in self.answers), Counter[str]())
        steps = usage["completion_tokens"] - usage["accepted_prediction_tokens"] - len(self.answers)
        found["tokens/s"] = usage["completion_tokens"] / self.seconds
        found |= {f"p{p}": percentile(intervals, p / 100) or 0 for p in (50, 95, 99)}
        found["step seconds"] = sum(max(a.reads) - min(a.reads) for a in self.answers) / max(1, steps)
        if plain and self.drafts != 0:
            drafted = [self.counts["drafted", i] for i in range(len(self.counts))]
            found["accepted"] = [round(100 * self.counts["accepted", i] / n) for i, n in enumerate(drafted) if n]
            found["over off"] = found["tokens/s"] / plain["tokens/s"]
            found["step"] = found["step seconds"] / (plain["step seconds"] or 1)
        return found


class Bench:
    """A run of all measurements, whose rows are there at any time. `show_step` gets texts for people."""

    def __init__(self, options: BenchOptions, show_step: Callable[[str], object]) -> None:
        self._server = find_server(options.url, options.api_key)
        self.options, self._show_step = replace(options, url=self._server.url), show_step
        self.server: dict[str, Any] = {"url": self._server.url, "mtp": None}
        self.rows, self.notes = list[Row](), list[str]()

    async def run(self) -> None:
        """Measure everything. Raises UsageError, and the errors of a server that refuses, is lost or is too slow."""
        await asyncio.to_thread(self._find_server)
        mode, settings = self.server["mtp"], connection(self._server)
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=REPLY_SECONDS), **settings) as self._client:
            few, many = [(await self._ask(Row(1, n, words=n), "")).usage["prompt_tokens"] for n in (20, 100)]
            for prompt in self.options.prompt:
                words = max(1, 20 + round((prompt - few) * 80 / max(80, many - few)))
                await self._measure([Row(1, prompt, mode or "-", words=words)])
            for streams in self.options.streams:
                modes = {} if mode in (None, "off") else {"off": 0, "1": 1}
                await self._measure([Row(streams, None, *each) for each in (modes | {mode or "-": None}).items()])

    def _find_server(self) -> None:
        """Find the model, its context and, of a server of ours, the mode of drafts and the machines."""
        url, key, name = self.options.url, self.options.api_key, self.options.model
        try:
            listed = [one for one in json.loads(call("GET", url, "/v1/models", key))["data"] if one["id"]]
        except (ValueError, KeyError, TypeError, ProtocolError, UsageError):
            listed = []
        ours = any(one.get("owned_by") == "mtp-cluster" for one in listed)
        if name is None and len(listed) != 1 and not ours:
            names = ", ".join(str(one["id"]) for one in listed) or "none"
            raise UsageError(f"{url} lists {len(listed)} models: {names:.300}. Name one with --model")
        found = next((one for one in listed if name in (None, one["id"])), {"id": name})
        self.server |= {"model": found["id"], "context": found.get("max_model_len")}
        if ours:
            status = parse(fetch(url, key))
            machines = [f"{n.name} {n.chip} ({n.version})" for n in status.nodes if n.health == "ready"]
            self.server |= {"mtp": status.mtp, "machines": ", ".join(machines)}
        if self.server["mtp"] in (None, "off"):
            why = "the server has MTP off" if ours else "the server neither reports drafts nor switches them"
            self.notes.append(f"acceptance, cost of drafts, and off against auto are left out, because {why}")

    async def _measure(self, rows: list[Row]) -> None:
        """Measure `rows` in turns. The first round of streams only lets the server learn and compile kernels."""
        self.rows += rows
        for number in range(1 if rows[0].words else 0, self.options.rounds + 1):
            for row in rows.copy():
                text = f"prompt of {row.prompt} tokens" if row.prompt else f"{row.streams} streams, drafts {row.mode}"
                self._show_step(f"{text}: round {number} of {self.options.rounds}")
                try:
                    wanted = (row.prompt or 0) + self.options.tokens
                    if isinstance(context := self.server["context"], int) and 0 < context < wanted:
                        raise UsageError(f"the context has {context} tokens")
                    before, began = await self._draft_counts(), time.perf_counter()
                    stories = [f"Write a very long story about cat {i}, part {number}." for i in range(row.streams)]
                    answers = await asyncio.gather(*(self._ask(row, s) for s in stories), return_exceptions=True)
                    for failed in (one for one in answers if isinstance(one, BaseException)):
                        raise failed
                    if number:
                        row.seconds += time.perf_counter() - began
                        row.answers += [answer for answer in answers if isinstance(answer, Answer)]
                        row.counts += await self._draft_counts() - before
                except UsageError as error:
                    self.notes.append(f"{text}: left out, because {error}")
                    rows.remove(row)

    async def _draft_counts(self) -> Counter[tuple[str, int]]:
        if self.server["mtp"] is None:
            return Counter()
        status = parse(await asyncio.to_thread(fetch, self.options.url, self.options.api_key))
        names = {"drafted": status.drafted_by_position, "accepted": status.accepted_by_position}
        return Counter({(name, i): n for name, counts in names.items() for i, n in enumerate(counts)})

    async def _ask(self, row: Row, text: str) -> Answer:
        """Return the streamed answer to `text` or to a new prompt. Raises WorkerLostError and those of `refusal`."""
        url, answer, rest = self.options.url, Answer(), b""
        if row.words:  # no two prompts share their beginning
            text = " ".join(secrets.token_hex(2) for _ in range(row.words))
        body: dict[str, Any] = {"model": self.server["model"], "messages": [{"role": "user", "content": text}]}
        body |= {"max_tokens": self.options.tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.server["mtp"]:
            body |= {"ignore_eos": True, "return_token_ids": True, "num_draft_tokens": row.drafts}
        began = at = time.perf_counter()
        try:
            stream = self._client.stream("POST", "/v1/chat/completions", json=body)
            async with asyncio.timeout(self.options.timeout), stream as reply:
                if not reply.is_success:
                    raise refusal(url, reply.status_code, await reply.aread())
                async for part in reply.aiter_raw():
                    at = time.perf_counter()
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        answer.add_line(line, at - began)
            if not answer.ended or not answer.usage["completion_tokens"]:
                raise ValueError("an answer ended early, or without usage")
        except (TimeoutError, httpx.TransportError, ValueError, TypeError, AttributeError) as error:
            raise WorkerLostError(f"{url}: {error!r:.200}. See its log, or raise --timeout") from error
        answer.reads = answer.reads or {at - began: 1}  # no text came, as inside the mark of reasoning
        return answer


@takes_options(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure a running server: first token, time between tokens, streams, drafts.

    The server is one of mtp-coord, or another with OpenAI's API. Ctrl-C shows what is measured so far.
    """
    problem: BaseException | None = None
    with Console(stderr=True).status("looking at the server") as status:
        measured = Bench(options, status.update)
        try:
            asyncio.run(measured.run())
        except (ClusterError, KeyboardInterrupt) as error:
            problem = error
    done = [row for row in measured.rows if row.answers]
    plain = {(row.streams, row.prompt): row.figures() for row in done if row.drafts == 0}
    rows = [row.figures(plain.get((row.streams, row.prompt))) for row in done]
    report = {"server": measured.server, "rows": rows, "notes": measured.notes, "problem": str(problem or "")}
    if options.json:
        typer.echo(json.dumps(report, indent=2))
    elif rows:
        table = Table(*COLUMNS, box=None, padding=(0, 1, 0, 0))
        for figures in rows:
            table.add_row(*(format(figures[name], f) if name in figures else "" for name, f in COLUMNS.items()))
        server = "; ".join(f"{name} {value}" for name, value in measured.server.items() if value)
        Console(emoji=False, markup=False).print(server, table, LEGEND, *measured.notes, sep="\n")
    if problem is not None:
        raise typer.Exit(130) if isinstance(problem, KeyboardInterrupt) else problem
