"""Conversations of coding agents, in the request shapes of Claude Code and of Codex, written for the tests.

Each transcript is the list of requests of one session. Every request repeats the conversation so far and adds calls
with their results, as the agents do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

CACHED: Json = {"cache_control": {"type": "ephemeral"}}

TOOL_NAMES = (
    *("Read", "Write", "Edit", "MultiEdit", "NotebookEdit", "Bash", "BashOutput", "KillShell"),
    *("Glob", "Grep", "LS", "Task", "TodoWrite", "WebFetch", "ExitPlanMode", "SlashCommand"),
    *(f"mcp__{server}__{verb}" for server in ("github", "jira") for verb in
      ("list", "get", "create", "update", "delete", "search", "comment")),
)  # fmt: skip
"""30 tools: those of an agent, and those of two MCP servers."""

RULES = (
    "Read a file before you change it.",
    "Prefer a small change to a large one.",
    "Run the tests of what you changed.",
    "Never print a secret.",
    "Answer in at most four lines unless asked for more.",
    "Use absolute paths in every call.",
)

BILLING = "x-anthropic-billing-header:"
"""The beginning of Claude Code's first block, which has a hash of each request."""

PATH = "/repo/parse.py"

STEPS: tuple[tuple[str, Json, str], ...] = (
    ("Grep", {"pattern": "def parse", "path": "/repo", "-n": True}, f"{PATH}:12:def parse(text):"),
    (
        "Read",
        {"file_path": PATH, "offset": 1},
        "     1\timport re\n     2\t\n    12\tdef parse(text):\n",
    ),
    ("TodoWrite", {"todos": [{"content": "Fix parse", "status": "in_progress"}]}, "Saved."),
    ("Edit", {"file_path": PATH, "old_string": "(text)", "new_string": "(text: str)"}, "Edited."),
    ("Bash", {"command": "cd /repo && pytest -q", "timeout": 60000}, "3 passed in 0.12s"),
)
"""The calls of the agent with their results, in order."""


def system_text(words: int) -> str:
    """Return a system prompt of about `words` words."""
    text = ["You are a coding agent in a terminal."]
    length, number = 8, 0
    while length < words:
        rule = f"{number + 1}. {RULES[number % len(RULES)]} This holds in part {number} as well."
        text.append(rule)
        length += len(rule.split())
        number += 1
    return "\n".join(text)


def _schema(name: str) -> Json:
    """Return the input schema of a tool, with the forms that agents use."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "description": f"The path that {name} uses."},
            "limit": {"type": "number", "description": "Lines."},
            "mode": {"type": "string", "enum": ["content", "count"], "default": "content"},
            "todos": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"content": {"type": "string", "minLength": 1}},
                    "required": ["content"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["file_path"],
        "additionalProperties": False,
    }


def claude_code(
    words: int, steps: int = len(STEPS), tools: int = len(TOOL_NAMES), max_tokens: int = 12
) -> Iterator[Json]:
    """Yield the bodies of `POST /v1/messages` of one session."""
    offered: list[Json] = [
        {"name": name, "description": f"{name} for the agent.", "input_schema": _schema(name)}
        for name in TOOL_NAMES[:tools]
    ]
    offered[-1] |= CACHED
    system = [
        {"type": "text", "text": "You are Claude Code.", **CACHED},
        {"type": "text", "text": system_text(words), **CACHED},
    ]
    reminder = "<system-reminder>\nThe date is today.\n</system-reminder>"
    messages: list[Json] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": reminder},
                {"type": "text", "text": "Give parse() a type.", **CACHED},
            ],
        }
    ]
    for number in range(steps + 1):
        changing = f"{BILLING} cc_version=2.1.104.{number:03x}; cc_entrypoint=cli; cch={number:05x};"
        yield {
            "max_tokens": max_tokens,
            "system": [{"type": "text", "text": changing}, *system],
            "tools": offered,
            "messages": list(messages),
            "metadata": {"user_id": "user_1_account__session_2"},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        }
        if number == steps:
            return
        name, given, result = STEPS[number % len(STEPS)]
        call_id = f"toolu_{number:024d}"
        call = {"type": "tool_use", "id": call_id, "name": name, "input": given}
        said = [{"type": "thinking", "thinking": "I look.", "signature": ""}, call]
        block = {"type": "tool_result", "tool_use_id": call_id, "content": result, **CACHED}
        answers: list[Json] = [block]
        if number == 1:
            answers.append({"type": "text", "text": reminder})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answers}]


def codex(words: int, steps: int = len(STEPS), tools: int = 17, max_tokens: int = 12) -> Iterator[Json]:
    """Yield the bodies of `POST /v1/responses` of one session."""
    offered: list[Json] = [
        {
            "type": "function",
            "name": name,
            "description": f"{name} for the agent.",
            "strict": False,
            "parameters": _schema(name),
        }
        for name in ("shell_command", "update_plan", "view_image", *TOOL_NAMES[:tools])
    ]
    offered.append({"type": "web_search", "external_web_access": False})
    context = "<environment_context>\n<cwd>/repo</cwd>\n<shell>bash</shell>\n</environment_context>"
    items: list[Json] = [
        _message("developer", "<permissions>Ask before you write outside /repo.</permissions>"),
        _message("user", context),
        _message("user", "Give parse() a type."),
    ]
    for number in range(steps + 1):
        yield {
            "instructions": system_text(words),
            "input": list(items),
            "tools": offered,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199-session",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "1"},
            "max_output_tokens": max_tokens,
        }
        if number == steps:
            return
        _, _, result = STEPS[number % len(STEPS)]
        arguments = '{"command": "sed -n 1,40p parse.py", "workdir": "/repo"}'
        call_id = f"call_{number:024d}"
        thought = {"type": "reasoning_text", "text": "I look."}
        items += [
            {"type": "reasoning", "summary": [], "content": [thought], "encrypted_content": None},
            _call(call_id, arguments if number != 1 else arguments[:-1]),
            {"type": "function_call_output", "call_id": call_id, "output": result},
        ]


def _message(role: str, text: str) -> Json:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _call(call_id: str, arguments: str) -> Json:
    return {
        "type": "function_call",
        "name": "shell_command",
        "arguments": arguments,
        "call_id": call_id,
    }
