"""`mtp-coord chat`: a conversation with a running coordinator in the terminal, with figures under each answer."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import typer

from coordinator.cli.chat_session import HELP, NUMBERS, ChatSession, MessageReader
from coordinator.cli.event_stream import stream_events
from coordinator.cli.http_call import (
    DEFAULT_URL,
    KeyOption,
    PortOption,
    UrlOption,
    authorization,
    server_url,
)
from coordinator.cli.shown_text import ShownText
from coordinator.cli.status_command import fetch, parse
from proto.errors import ClusterError, UsageError

SILENCE_SECONDS = 600.0
"""Seconds without a byte after which an answer fails. The server sends keep-alive comments every 10 s."""

PROMPT, MORE = "> ", ". "

Events = Generator[dict[str, Any], None, None]


@dataclass
class Figures:
    """The figures of one answer. Times are in seconds of a monotonic clock; `first` is None before the first text."""

    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def record_text(self) -> None:
        """Record the arrival of text."""
        self.last = time.monotonic()
        if self.first is None:
            self.first = self.last

    def line(self, seed: int) -> str:
        """Return one line such as `first token 0.21 s, 48.2 tokens/s, 312 tokens, 71 % of 210 drafts kept, seed 7`."""
        parts = []
        if self.first is not None:
            parts.append(f"first token {self.first - self.began:.2f} s")
        tokens = self.usage.get("completion_tokens", 0)
        if self.first is not None and tokens > 1 and self.last > self.first:
            parts.append(f"{(tokens - 1) / (self.last - self.first):.1f} tokens/s")
        if tokens:
            parts.append(f"{tokens} tokens")
        details = self.usage.get("completion_tokens_details") or {}
        accepted = details.get("accepted_prediction_tokens", 0)
        drafted = accepted + details.get("rejected_prediction_tokens", 0)
        if drafted:
            parts.append(f"{accepted / drafted:.0%} of {drafted} drafts kept")
        return ", ".join([*parts, f"seed {seed}"])


def chat(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    port: PortOption = None,
) -> None:
    """Talk to a running cluster. Each answer shows its speed and how many drafts were kept. `/help` lists commands."""
    root = server_url(url, port)
    parse(
        fetch(root, api_key)
    )  # an error of the connection or the key comes before the first question
    with contextlib.suppress(ImportError):
        import readline  # line editing and the history of this session, where the system has it

        readline.set_auto_history(True)
    if sys.stdin.isatty():
        typer.echo("/help lists the commands, Ctrl-D ends.")
    with httpx.Client(
        base_url=f"{root}/v1", headers=authorization(api_key), timeout=SILENCE_SECONDS
    ) as client:
        _Terminal(client, root, api_key).run()


class _Terminal:
    """The loop over the messages of one user."""

    def __init__(self, client: httpx.Client, root: str, api_key: str | None) -> None:
        self.client = client
        self.root = root
        self.api_key = api_key
        self.session = ChatSession()

    def run(self) -> None:
        """Read messages and answer them until the end of the input or `/quit`."""
        for text in self._read_messages():
            try:
                if text == "/quit":
                    return
                if text.startswith("/"):
                    self._run_command(text)
                elif text:
                    self.session.add_message(text)
                    self._answer()
            except ClusterError as error:
                typer.echo(f"{error}", err=True)

    def _read_messages(self) -> Iterator[str]:
        reader = MessageReader()
        prompt = sys.stdin.isatty()
        while True:
            try:
                line = input((MORE if reader.continues else PROMPT) if prompt else "")
            except EOFError:
                return
            except KeyboardInterrupt:  # it drops the line, as in a shell
                reader = MessageReader()
                typer.echo("")
                continue
            message = reader.add_line(line)
            if message is not None:
                yield message

    def _run_command(self, text: str) -> None:
        name, _, value = text[1:].partition(" ")
        match name:
            case "help":
                typer.echo(HELP)
            case "show":
                typer.echo(self.session.parameters())
            case "mtp":
                self._show_acceptance()
            case "new":
                self.session.messages.clear()
                typer.echo("new conversation")
            case "retry":
                self.session.drop_answer()
                self._answer()
            case _ if name in (*NUMBERS, "system", "think"):
                typer.echo(self.session.set_parameter(name, value.strip()))
            case _:
                raise UsageError(f"/{name}: there is no such command. /help lists them")

    def _show_acceptance(self) -> None:
        status = parse(fetch(self.root, self.api_key))
        rates = status.acceptance_by_position
        shown = " / ".join("-" if rate is None else f"{rate:.0%}" for rate in rates)
        typer.echo(f"mtp {status.mtp}: {shown or 'no drafts yet'}")

    def _answer(self) -> None:
        """Stream the answer to the last message. Ctrl-C stops it and keeps what has arrived."""
        shown, figures, complete = ShownText(), Figures(), False
        body = self.session.body()
        events = cast(Events, stream_events(self.client, "/chat/completions", body))
        try:
            with contextlib.closing(events):
                for event in events:
                    self._show_event(event, shown, figures)
            complete = True
        except KeyboardInterrupt:
            shown.show_content(" [stopped]" if shown.content else "")
        finally:
            self.session.add_answer(shown.content, complete=complete)
        shown.end_line()
        typer.secho(figures.line(self.session.last_seed), dim=True, err=True)

    def _show_event(self, event: dict[str, Any], shown: ShownText, figures: Figures) -> None:
        figures.usage = event.get("usage") or figures.usage
        for choice in event["choices"]:
            delta = choice["delta"]
            reasoning = delta.get("reasoning_content") or ""
            content = delta.get("content") or ""
            if reasoning or content:
                figures.record_text()
            shown.show_reasoning(reasoning)
            shown.show_content(content)
            for called in delta.get("tool_calls") or ():
                function = called.get("function") or {}
                typer.echo(
                    f"[tool call {function.get('name', '')} {function.get('arguments', '')}]"
                )
