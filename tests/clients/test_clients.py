"""Clients of other projects with the API over a real socket: texts, streams, tools, formats and errors.

Each client runs as a program in its own environment and prints what it got as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator
from tests.support.api.scripted_tools import GREETING, OBJECT, REPORT, THOUGHT, scripted_answer

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / ".cache" / "clients"
"""The folder of `make clients`."""

SECONDS = 120
"""Seconds. Limit for one program; most of it is the import of the client on a busy machine."""

ROME = {"city": "Rome"}
TEXTS = {"text": GREETING, "pieces": GREETING}

OPENAI_AGENTS = {"report": REPORT, "streamed": REPORT, "object": OBJECT}
LANGCHAIN = {**TEXTS, "call": ROME, "streamed": [ROME], "report": REPORT, "object": OBJECT}
LITELLM = {**TEXTS, "call": ROME, "report": REPORT}
PYDANTIC_AI = {"text": GREETING, "object": OBJECT}
VERCEL = {"text": GREETING, "streamed": ROME, "report": REPORT, "object": OBJECT}

PYTHON: dict[str, tuple[str, dict[str, Any]]] = {
    "openai_agents": ("python", {"chat": OPENAI_AGENTS, "responses": OPENAI_AGENTS}),
    "langchain": (
        "python",
        {
            **dict.fromkeys(("chat", "responses", "anthropic", "ollama"), LANGCHAIN),
            **dict.fromkeys(("function_calling", "json_mode", "json_schema"), OBJECT),
        },
    ),
    "llm": ("python", {**TEXTS, "object": OBJECT, "report": REPORT}),
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
        dict.fromkeys(("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"), OBJECT),
    ),
    "litellm": (
        "openai-2",
        {**dict.fromkeys(("chat", "anthropic", "ollama"), LITELLM), "format": OBJECT},
    ),
}
"""The environment of each client in Python, and the output of its program."""

NODE: dict[str, dict[str, Any]] = {
    "openai": {
        **TEXTS,
        "report": REPORT,
        "object": OBJECT,
        "format": OBJECT,
        "call": ROME,
        "streamed": ROME,
        "refused": "BadRequestError temperature",
    },
    "anthropic": {
        "text": GREETING,
        "thinking": THOUGHT,
        "call": ROME,
        "streamed": ROME,
        "stop": "tool_use",
        "report": REPORT,
        "counted": True,
        "refused": "BadRequestError true",
    },
    "ollama": {
        **TEXTS,
        "thinking": THOUGHT,
        "call": ROME,
        "report": REPORT,
        "object": OBJECT,
        "listed": True,
    },
    "vercel": dict.fromkeys(("compatible", "chat", "responses", "anthropic"), VERCEL),
}
"""The output of the program of each client in node."""


CODEX = """
model = "tiny"
model_provider = "cluster"
[model_providers.cluster]
name = "cluster"
base_url = "@URL/v1"
wire_api = "responses"
"""
OPENCODE = """{
  "model": "cluster/tiny",
  "permission": {"bash": "allow"},
  "provider": {"cluster": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "@URL/v1"},
    "models": {"tiny": {"limit": {"context": 400000, "output": 1000}}}}}
}"""
ASKED = "How warm is it?"
AGENTS: dict[str, tuple[str, str, list[str]]] = {
    "codex": (
        ".codex/config.toml",
        CODEX,
        ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", ASKED],
    ),
    "claude": (".claude/settings.json", "{}", ["-p", ASKED, "--allowedTools", "Bash"]),
    "opencode": ("opencode.json", OPENCODE, ["run", ASKED]),
}
"""The settings of each agent, with their file, and its arguments for one turn."""


def served(context: int) -> Iterator[str]:
    """Serve a generator that uses the tools and formats of each request."""
    generator = FakeGenerator(tiny_tokenizer(), window=3, cached=2, answer=scripted_answer)
    with serving(ApiClient(generator, context_length=context).app) as found:
        yield found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve a context that one of the programs exceeds."""
    yield from served(18_000)


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


@pytest.mark.parametrize("client", PYTHON)
def test_a_client_in_python(client: str, url: str, tmp_path: Path) -> None:
    """The client gets every text, call and object, whole and streamed, in all dialects that it speaks."""
    environment, expected = PYTHON[client]
    python = INSTALLED / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{client} is not installed: `make clients` installs it")
    script = HERE / "python" / f"{client}_client.py"
    assert run([str(python), str(script)], url, tmp_path) == expected


@pytest.mark.parametrize("client", NODE)
def test_a_client_in_node(client: str, url: str, tmp_path: Path) -> None:
    """The client gets every text, call and object, whole and streamed, in all dialects that it speaks."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (INSTALLED / "node" / "node_modules").exists():
        pytest.skip("the clients of node are not installed: `make clients` installs them")
    # Node looks for packages beside the program.
    script = shutil.copy(HERE / "node" / f"{client}.mjs", INSTALLED / "node")
    assert run([node, str(script)], url, tmp_path) == NODE[client]


@pytest.mark.parametrize("agent", AGENTS)
def test_a_turn_of_an_agent(agent: str, wide_url: str, tmp_path: Path) -> None:
    """The agent sends its own prompt and tools, runs the command of the model's call, and prints the report."""
    program = INSTALLED / "node" / "node_modules" / ".bin" / agent
    if not program.exists():
        pytest.skip(f"{agent} is not installed: `make clients` installs it")
    file, settings, arguments = AGENTS[agent]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(settings.replace("@URL", wide_url))
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    found = subprocess.run(
        [str(program), *arguments],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "ANTHROPIC_BASE_URL": wide_url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            **dict.fromkeys(names, "tiny"),
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
