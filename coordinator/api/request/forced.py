"""Forced output: the grammar of an answer that must be a tool call or have a format."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from coordinator.api.request.chat import ChatRequest
from coordinator.api.request.context import Api
from coordinator.text.call_grammar import call_grammar
from coordinator.text.output_format import OutputFormat
from coordinator.text.schema_path import check_schema
from proto.errors import RequestError


async def grammar_fields(api: Api, chat: ChatRequest, *, thinking: bool) -> dict[str, object]:
    """Return the fields of SamplingParams that force the chat's output; empty if nothing is forced.

    `thinking` is True if the answer begins inside reasoning: the grammar then starts at the token that closes it.
    Raises RequestError, naming the client's field, for a format or schema that cannot be compiled.
    """
    output = _forced_output(api, chat)
    if output is None:
        return {}
    if chat.settings.ignore_eos:
        raise RequestError(
            f"{output.param}: cannot be combined with ignore_eos. Send one of them.",
            param=output.param,
        )
    grammar = await asyncio.to_thread(_compile, api, chat, output)
    start = api.tokenizer.reasoning_end_id if thinking else None
    if thinking and start is None:
        raise RequestError(
            f"{output.param}: this model's reasoning has no end token. Switch reasoning off.",
            param=output.param,
        )
    return {"grammar": grammar, "grammar_start": start}


def _compile(api: Api, chat: ChatRequest, output: OutputFormat) -> bytes:
    """Compile a format. An error of the calls' grammar names the tool whose schema is the cause."""
    try:
        return api.compiler.compile(output)
    except RequestError:
        if chat.forced_tool is not None:
            for path, schema in _tool_schemas(chat):
                api.compiler.compile(OutputFormat("json_schema", schema, path))
        raise


def _tool_schemas(chat: ChatRequest) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of the tools' arguments, with their paths in the client's request."""
    for index, tool in enumerate(chat.tools):
        schema = tool["function"].get("parameters") or {}
        yield f"tools[{index}].{chat.settings.client_name('parameters')}", schema


async def text_grammar(api: Api, output: OutputFormat | None) -> dict[str, object]:
    """Return the fields of SamplingParams that force the format of a text completion."""
    if output is None:
        return {}
    return {"grammar": await asyncio.to_thread(api.compiler.compile, output)}


def _forced_output(api: Api, chat: ChatRequest) -> OutputFormat | None:
    if chat.forced_tool is None:
        return chat.output
    if chat.output is not None:
        raise RequestError(
            f"tool_choice: cannot force a call and {chat.output.param} at once. Send one of them.",
            param="tool_choice",
        )
    tools = [t for t in chat.tools if chat.forced_tool in ("", t["function"]["name"])]
    if not tools:
        raise RequestError(
            f"tool_choice: no tool is named {chat.forced_tool!r}. Send it in tools.",
            param="tool_choice",
        )
    style = api.tokenizer.call_style
    if style is None:
        raise RequestError(
            "tool_choice: this model's call format cannot be forced. Use auto.", param="tool_choice"
        )
    for path, schema in _tool_schemas(chat):
        check_schema(schema, path)
    single = chat.one_call or bool(chat.forced_tool)
    grammar = call_grammar(tools, style, api.tokenizer.tool_markers, single=single)
    return OutputFormat("lark", grammar, "tools")
