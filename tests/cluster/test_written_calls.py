"""Calls and marks as models write them, forced from the built-in model on one process and on two workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Pool
from tests.support.processes.processes import Coordinator, serving

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        },
    },
}
END = "\n</function>\n</tool_call>"
HEAD = "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n"
QUOTE = 'return "</parameter>"'
CASES: list[tuple[str, str, dict[str, str] | None]] = [
    (
        f"{HEAD}</parameter>\n<parameter=content>\n{QUOTE}\n</parameter>{END}",
        "",
        {"path": "a.txt", "content": QUOTE},
    ),
    (
        f"{HEAD}<parameter=content>\nhello\n</parameter>{END}",
        "",
        {"path": "a.txt", "content": "hello"},
    ),
    (f"{HEAD.removeprefix('<tool_call>')}</function>", "", {"path": "a.txt"}),
    (
        'Now.\n<tool_call>\n{"name": "write", "arguments": {"path": "a.txt"}}\n</tool_call>',
        "Now.",
        {"path": "a.txt"},
    ),
    ("Use <tool_call> and <think> here.", "Use <tool_call> and <think> here.", None),
    ("</think>\n\nDone.", "Done.", None),
]


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two workers"])
def url(request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    addresses = pool(request.param) if request.param else ()
    folder = tmp_path_factory.mktemp("serve")
    found: Coordinator
    with serving(folder, "builtin", addresses, "--mtp", "2") as found:
        yield found.url


def message_of(url: str, text: str, *, stream: bool) -> tuple[str, str, str, str]:
    """Return content, reasoning, arguments and the end of an answer that is forced to be `text`."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [TOOL],
        "guided_choice": [text],
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": stream,
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    if stream:
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        parts = [choice["delta"] for choice in choices]
        end = choices[-1]["finish_reason"]
    else:
        choice = reply.json()["choices"][0]
        parts, end = [choice["message"]], choice["finish_reason"]
    calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
    content = "".join(part.get("content") or "" for part in parts)
    reasoning = "".join(part.get("reasoning_content") or "" for part in parts)
    return content, reasoning, "".join(call.get("arguments", "") for call in calls), end


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("text", "content", "arguments"), CASES)
def test_what_a_model_writes_is_read(
    url: str, text: str, content: str, arguments: dict[str, str] | None, stream: bool
) -> None:
    """Whole and streamed, on every cut."""
    found, reasoning, sent, end = message_of(url, text, stream=stream)
    assert (found, reasoning) == (content, "")
    assert (json.loads(sent) if sent else None) == arguments
    assert end == ("tool_calls" if arguments else "stop")
