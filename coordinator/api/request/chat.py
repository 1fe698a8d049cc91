"""The internal request for the next message of a conversation. Every chat dialect translates its body to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coordinator.api.request.context import Api
from coordinator.api.request.settings import GenerationSettings
from coordinator.text.model_info import Json
from coordinator.text.output_format import OutputFormat
from coordinator.text.tokenizer import ChatPrompt

THINKING_SWITCH = "enable_thinking"
"""The variable with which Qwen's chat templates switch reasoning on and off."""


@dataclass(frozen=True)
class ChatRequest:
    """A conversation and the settings of its next message.

    `messages` are dicts as chat templates read them: role, content as text, `reasoning_content`, and `tool_calls`
    whose arguments are objects. `tools` are function tools in OpenAI's format. `thinking` switches reasoning on or
    off, where None leaves it to the template; `reasoning_budget` is its maximum number of tokens. With `one_call` the
    answer ends after its first tool call. `forced_tool` is the tool that the answer must call, or an empty string for
    any tool. `output` is the format of the content. `user` is a label for the log.
    """

    messages: Sequence[Json]
    settings: GenerationSettings
    tools: Sequence[Json] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    reasoning_budget: int | None = None
    one_call: bool = False
    forced_tool: str | None = None
    output: OutputFormat | None = None
    user: str | None = None


async def render_chat(api: Api, chat: ChatRequest) -> ChatPrompt:
    """Render the conversation with the checkpoint's template, in a thread.

    Raises RequestError, naming the client's field, if the template rejects the messages.
    """
    kwargs = dict(chat.template_kwargs)
    if chat.thinking is not None and api.tokenizer.uses_variable(THINKING_SWITCH):
        kwargs[THINKING_SWITCH] = chat.thinking
    render = partial(api.tokenizer.chat_prompt, tools=chat.tools, template_kwargs=kwargs)
    size = sum(len(message.get("content") or "") for message in chat.messages)
    prompt = await api.large_work.run(size, partial(render, chat.messages))
    if any("name" in message for message in chat.messages):
        without = [{k: v for k, v in m.items() if k != "name"} for m in chat.messages]
        if await api.large_work.run(size, partial(render, without)) == prompt:
            api.hints.report_hint("messages[].name")
    return prompt


def call_message(
    content: str, calls: Iterable[tuple[str, str, str]], markers: tuple[str, str]
) -> Json:
    """Return an assistant's message with tool calls, each given as id, name and arguments in JSON.

    A call whose arguments are not a JSON object becomes text between `markers`, so that the model sees its mistake.
    """
    message: Json = {"role": "assistant", "content": content}
    parsed = []
    for call_id, name, arguments in calls:
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            function = {"name": name, "arguments": value}
            parsed.append({"id": call_id, "type": "function", "function": function})
        else:
            start, end = markers
            text = f"{start}\n{name}: {arguments}\n{end}"
            message["content"] = "\n\n".join(part for part in (message["content"], text) if part)
    if parsed:
        message["tool_calls"] = parsed
    return message


def with_system_first(turns: Sequence[Json]) -> list[Json]:
    """Return a conversation whose only system message is the first message.

    The system messages at the beginning are joined. Most templates reject later ones, so these become messages of the
    user, marked as system text.
    """
    rest = list(turns)
    system = []
    while rest and rest[0]["role"] == "system":
        system.append(rest.pop(0)["content"])
    first = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    for index, turn in enumerate(rest):
        if turn["role"] == "system":
            text = f"<system>\n{turn['content']}\n</system>"
            rest[index] = {"role": "user", "content": text}
    return [*first, *rest]
