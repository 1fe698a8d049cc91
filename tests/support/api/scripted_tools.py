"""Scripted answers that use the tools and formats of a request, as a model would, for tests with real clients."""

from __future__ import annotations

import json
from typing import Any

from coordinator.schedule.request import GenerationRequest
from tests.support.api.api_client import tiny_tokenizer

OBJECT = {"city": "Rome", "degrees": 18}
GREETING = "Hello 🎉 there"
THOUGHT = "hm"
REPORT = "It is 18 degrees."
COUNT = "15000 words"
"""The answer to "Count these." with as many words, which shows that the whole prompt arrived."""


COMMAND = "echo 18 > ran.txt"
SHELLS: dict[str, dict[str, Any]] = {
    "exec_command": {"cmd": COMMAND},
    "Bash": {"command": COMMAND, "description": "Measure"},
    "bash": {"command": COMMAND, "description": "Measure"},
    "run_commands": {"commands": [COMMAND]},
}
"""The arguments of a command for the shell tools of agents, by the tool's name."""


FORMS = ("as usual", "without a closing mark", "without an opening mark", "as JSON")
"""Forms in which models write calls. A prompt that says `Write calls FORM.` chooses one."""


def scripted_answer(request: GenerationRequest) -> str:
    """Return the answer to a request.

    It calls the tool `weather` or the shell of an agent first, then a tool that takes `degrees`, if there are such
    tools. Asked to say hello, it calls a tool only if it must. Without tools a forced format gets OBJECT, and other
    requests get a text. Reasoning comes first where the template opens it.
    """
    tokenizer = tiny_tokenizer()
    prompt = b"".join(map(tokenizer.token_bytes, request.prompt)).decode()
    thought = f"{THOUGHT}\n</think>\n\n" if prompt.endswith("<think>\n") else ""
    return thought + _answer(prompt, bool(request.params.grammar))


def _answer(prompt: str, forced: bool) -> str:
    if "Count these." in prompt:
        return f"{prompt.count(' word')} words"
    if "Say hello." in prompt and not forced:
        return GREETING
    tools = _tools(prompt)
    has_result = "<|im_start|>tool\n" in prompt
    if "weather" in tools and not has_result:
        return _call("weather", {"city": "Rome"})
    for name in SHELLS.keys() & tools.keys() if not has_result else ():
        return _formed(_call(name, SHELLS[name]), name, prompt)
    for name, properties in tools.items():
        if "degrees" in properties:
            return _call(name, OBJECT)
    if forced:
        return json.dumps(OBJECT)
    return REPORT if has_result else GREETING


def _formed(call: str, name: str, prompt: str) -> str:
    form = next((form for form in FORMS if f"Write calls {form}." in prompt), FORMS[0])
    if form == "without a closing mark":
        return call.replace("\n</parameter>\n</function>", "\n</function>")
    if form == "without an opening mark":
        return call.removeprefix("<tool_call>\n")
    if form == "as JSON":
        text = json.dumps({"name": name, "arguments": SHELLS[name]})
        return f"<tool_call>\n{text}\n</tool_call>"
    return call


def _tools(prompt: str) -> dict[str, Any]:
    """Return the tools in a prompt of the small tokenizer's template: their properties by name."""
    found = {}
    for line in prompt.splitlines():
        if line.startswith(('{"type": "function"', '{"function"')):
            function = json.loads(line)["function"]
            found[function["name"]] = (function.get("parameters") or {}).get("properties") or {}
    return found


def _call(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<parameter={key}>\n{json.dumps(value) if isinstance(value, list) else value}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
