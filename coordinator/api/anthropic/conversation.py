"""Translation of Anthropic's messages, tools and thinking to the internal request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coordinator.api.anthropic.schemas import (
    Block,
    Message,
    MessagesBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from coordinator.api.request.chat import ChatRequest, with_system_first
from coordinator.api.request.reasoning import BUDGETS
from coordinator.api.request.settings import GenerationSettings
from coordinator.text.model_info import Json

FIELD_NAMES = {"prompt": "messages", "max_tokens": "max_tokens", "parameters": "input_schema"}


def internal_request(body: PromptBody) -> ChatRequest:
    """Translate a body to the internal request. A body that only counts tokens gets default settings."""
    thinking, budget = thinking_of(body)
    choice = body.tool_choice
    tools = [tool.for_template() for tool in body.tools or ()]
    return ChatRequest(
        messages=template_messages(body),
        settings=_settings(body) if isinstance(body, MessagesBody) else GenerationSettings(),
        tools=[] if choice and choice.type == "none" else tools,
        thinking=thinking,
        reasoning_budget=budget,
        one_call=bool(choice and choice.disable_parallel_tool_use),
        forced_tool=body.forced_tool,
        output=body.output,
    )


def thinking_of(body: PromptBody) -> tuple[bool, int | None]:
    """Return whether the model reasons, and its budget in tokens. Without `thinking` it does not, as at Anthropic."""
    if body.thinking is None or body.thinking.type == "disabled":
        return False, None
    effort = body.output_config.effort if body.output_config else None
    return True, body.thinking.budget_tokens or BUDGETS.get(effort or "")


def template_messages(body: PromptBody) -> list[Json]:
    """Return the conversation as chat templates read it."""
    turns: list[Json] = []
    if body.system_text:
        turns.append({"role": "system", "content": body.system_text})
    for message in body.messages:
        turns += _turns(message)
    return with_system_first(turns)


def _turns(message: Message) -> Iterator[Json]:
    if message.role == "assistant":
        yield _assistant(message.blocks)
    elif message.role == "system":
        yield {"role": "system", "content": _text(message.blocks)}
    else:
        texts: list[Block] = []
        for block in message.blocks:
            if isinstance(block, ToolResultBlock):
                yield _tool_result(block)
            else:
                texts.append(block)
        if texts:
            yield {"role": "user", "content": _text(texts)}


def _assistant(blocks: list[Block]) -> Json:
    turn: Json = {"role": "assistant", "content": _text(blocks)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        turn["tool_calls"] = calls
    return turn


def _tool_result(block: ToolResultBlock) -> Json:
    content = block.content or ""
    text = content if isinstance(content, str) else _text(content)
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _text(blocks: Iterable[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def _settings(body: MessagesBody) -> GenerationSettings:
    return GenerationSettings(
        sampling={"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k},
        max_tokens=body.max_tokens,
        stop_strings=body.stop_sequences or (),
        field_names=FIELD_NAMES,
    )
