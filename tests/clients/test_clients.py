"""Clients of other projects with the API over a real socket: texts, streams, tools, formats and errors.

Each client runs as a program in its own environment and prints what it got as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.serve.client_settings import AGENTS as LAUNCHED
from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator
from tests.support.api.scripted_tools import (
    COUNT,
    FORMS,
    GREETING,
    OBJECT,
    REPORT,
    THOUGHT,
    scripted_answer,
)

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / ".cache" / "clients"
"""The folder of `make clients`."""

SECONDS = 120
"""Seconds. Limit for one program; most of it is the import of the client on a busy machine."""

ROME = {"city": "Rome"}
SPOKEN = {"text": GREETING, "pieces": GREETING, "long": COUNT}
CALLED = {"call": ROME, "forced": ROME, "report": REPORT}

OPENAI_AGENTS = {
    "text": GREETING,
    "report": REPORT,
    "streamed": REPORT,
    "object": OBJECT,
    "forced": "18 degrees in Rome",
    "long": COUNT,
}
LANGCHAIN_OLLAMA = {**SPOKEN, "call": ROME, "streamed": [ROME], "report": REPORT, "object": OBJECT}
LANGCHAIN = {**LANGCHAIN_OLLAMA, "forced": ROME}
LITELLM_OLLAMA = {**SPOKEN, "call": ROME, "report": REPORT, "format": OBJECT}
LITELLM = {**LITELLM_OLLAMA, "forced": ROME}
OLLAMA = {**SPOKEN, "call": ROME, "report": REPORT, "object": OBJECT}
PYDANTIC_AI = {**SPOKEN, "report": REPORT, "object": OBJECT, "forced": OBJECT}
VERCEL = {
    "text": GREETING,
    "streamed": ROME,
    "report": REPORT,
    "object": OBJECT,
    "forced": ROME,
    "long": COUNT,
}

Output = dict[str, dict[str, Any]]
"""The output of a client's program, by dialect."""

PYTHON: dict[str, tuple[str, Output]] = {
    "openai_agents": ("python", {"chat": OPENAI_AGENTS, "responses": OPENAI_AGENTS}),
    "langchain": (
        "python",
        {
            "chat": {
                **LANGCHAIN,
                **dict.fromkeys(("function_calling", "json_mode", "json_schema"), OBJECT),
            },
            **dict.fromkeys(("responses", "anthropic"), LANGCHAIN),
            "ollama": LANGCHAIN_OLLAMA,
        },
    ),
    "llm": ("python", {"chat": {**SPOKEN, "object": OBJECT, "report": REPORT}}),
    "pydantic_ai": (
        "python",
        {
            "chat": {**PYDANTIC_AI, "format": OBJECT},
            "responses": {**PYDANTIC_AI, "format": OBJECT},
            "anthropic": PYDANTIC_AI,
        },
    ),
    "instructor": (
        "openai-2",
        {
            "chat": dict.fromkeys(("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"), OBJECT),
            "responses": {"RESPONSES_TOOLS": OBJECT},
        },
    ),
    "litellm": ("openai-2", {"chat": LITELLM, "anthropic": LITELLM, "ollama": LITELLM_OLLAMA}),
}
"""The environment of each client in Python, and the output of its program.

`tests/cluster/test_makers_clients.py` has the Python clients of OpenAI, Anthropic and Ollama.
"""

NODE: dict[str, Output] = {
    "openai": {
        "chat": {
            **SPOKEN,
            "report": REPORT,
            "object": OBJECT,
            "forced": ROME,
            "refused": "BadRequestError temperature",
        },
        "responses": {**SPOKEN, "call": ROME, "streamed": ROME, "object": OBJECT, "forced": ROME},
    },
    "anthropic": {
        "anthropic": {
            "text": GREETING,
            "thinking": THOUGHT,
            **CALLED,
            "streamed": ROME,
            "stop": "tool_use",
            "long": COUNT,
            "counted": True,
            "refused": "BadRequestError true",
        }
    },
    "ollama": {"ollama": {**OLLAMA, "thinking": THOUGHT, "listed": True}},
    "vercel": dict.fromkeys(("compatible", "chat", "responses", "anthropic"), VERCEL),
}
"""The output of the program of each client in node."""

FEATURES = {
    "text": "chat",
    **dict.fromkeys(("pieces", "streamed"), "stream"),
    **dict.fromkeys(("call", "report"), "tool"),
    **dict.fromkeys(("forced", "TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS", "function_calling"), "forced tool"),
    **dict.fromkeys(("object", "format", "JSON", "JSON_SCHEMA", "json_mode", "json_schema"), "structured"),
    "long": "long",
}
"""The feature that each field of an output shows."""

Record = Callable[[str, object], None]


ASKED = "How warm is it?"
AGENTS: dict[str, tuple[str, list[str]]] = {
    "claude": ("anthropic", ["-p", ASKED, "--allowedTools", "Bash"]),
    "codex": (
        "responses",
        ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", ASKED],
    ),
    "opencode": ("chat", ["run", ASKED]),
    "pi": ("chat", ["--no-session", "-p", ASKED]),
    "cline-cli": ("chat", ["--auto-approve", "true", ASKED]),
    "copilot": ("chat", ["-p", ASKED, "-s", "--allow-all-tools", "--no-ask-user"]),
}
"""The dialect of each agent that `mtp-coord launch` starts and npm has, and its arguments for one turn.

Crush's package downloads its program from elsewhere, and goose is in no registry of packages.
"""


def served(context: int) -> Iterator[str]:
    """Serve a generator that uses the tools and formats of each request."""
    generator = FakeGenerator(tiny_tokenizer(), window=3, cached=2, answer=scripted_answer)
    with serving(ApiClient(generator, context_length=context).app) as found:
        yield found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve a context that one of the programs exceeds."""
    yield from served(48_000)


@pytest.fixture(scope="module")
def wide_url() -> Iterator[str]:
    """Serve a context with room for the prompts of agents, which have many tokens in the small tokenizer."""
    yield from served(400_000)


def run(command: list[str], url: str, folder: Path) -> Any:
    """Run a client's program and return the JSON of its last line."""
    environment = {**os.environ, "BASE_URL": url, "LLM_USER_PATH": str(folder)}
    # No client asks a service of its maker.
    quiet = {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    found = subprocess.run(
        command,
        env={**environment, **quiet},
        cwd=folder,
        timeout=SECONDS,
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


def check(client: str, found: Output, expected: Output, record: Record) -> None:
    """Assert that a client's output is as expected. Record each feature for the table of clients."""
    for dialect, fields in expected.items():
        shown: dict[str, bool] = {}
        for field in fields.keys() & FEATURES.keys():
            equal = found.get(dialect, {}).get(field) == fields[field]
            shown[FEATURES[field]] = shown.get(FEATURES[field], True) and equal
        for feature, works in shown.items():
            record("feature", (client, dialect, feature, works))
    assert found == expected


@pytest.mark.parametrize("client", PYTHON)
def test_a_client_in_python(client: str, url: str, tmp_path: Path, record_property: Record) -> None:
    """The client gets every text, call and object, whole and streamed, in all dialects that it speaks."""
    environment, expected = PYTHON[client]
    python = INSTALLED / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{client} is not installed: `make clients` installs it")
    script = HERE / "python" / f"{client}_client.py"
    found = run([str(python), str(script)], url, tmp_path)
    check(f"{client}, Python", found, expected, record_property)


@pytest.mark.parametrize("client", NODE)
def test_a_client_in_node(client: str, url: str, tmp_path: Path, record_property: Record) -> None:
    """The client gets every text, call and object, whole and streamed, in all dialects that it speaks."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (INSTALLED / "node" / "node_modules").exists():
        pytest.skip("the clients of node are not installed: `make clients` installs them")
    # Node looks for packages beside the program.
    script = shutil.copy(HERE / "node" / f"{client}.mjs", INSTALLED / "node")
    found = run([node, str(script)], url, tmp_path)
    check(f"{client}, node", found, NODE[client], record_property)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("agent", AGENTS)
def test_a_turn_of_an_agent(agent: str, form: str, wide_url: str, tmp_path: Path, record_property: Record) -> None:
    """The agent sends its own prompt and tools, runs the command of the model's call, and prints the report.

    Also if the model leaves a mark of the call out, or writes JSON.
    """
    programs = INSTALLED / "node" / "node_modules" / ".bin"
    if not (programs / LAUNCHED[agent].program).exists():
        pytest.skip(f"{agent} is not installed: `make clients` installs it")
    dialect, arguments = AGENTS[agent]
    launch = "from coordinator.cli import main; main()"
    found = subprocess.run(
        [
            *(sys.executable, "-c", launch, "launch", agent, "--url", wide_url, "--"),
            *(f"{ASKED} Write calls {form}." if a == ASKED else a for a in arguments),
        ],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(HERE.parents[1]),
            "HOME": str(tmp_path),
        },
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
        capture_output=True,
        text=True,
    )
    assert REPORT in found.stdout, (found.stdout + found.stderr)[-3000:]
    assert (tmp_path / "ran.txt").read_text() == "18\n"
    for feature in ("chat", "stream", "tool"):  # an agent streams all its answers
        record_property("feature", (agent, dialect, feature, True))
