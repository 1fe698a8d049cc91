"""The settings with which other programs use this server: agents, and clients with a page of settings.

An agent's settings hide none of its user's own: they are environment variables, arguments, and files of this server's
state directory that a variable or an argument names. The facts are those of each program's documents and sources in
November 2026.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEY_VARIABLE = "MTP_CLUSTER_KEY"
"""The variable from which programs read the API key, if they can, so that no file has it."""

NO_KEY = "any"
"""Sent as the key to a server that needs none, because programs insist on one."""

MOST_OUTPUT = 32_000
"""Tokens. Default of Claude Code for the longest answer."""

PATIENCE_MS = 3_600_000
"""Milliseconds. Deadline of programs for an answer: a long prompt takes minutes on a Mac."""


@dataclass(frozen=True)
class Endpoint:
    """A server as its clients see it: its root without `/v1`, the key, the model, and the context in tokens."""

    root: str
    key: str
    model: str
    context: int
    authorities: Mapping[str, str] = field(default_factory=dict)
    """Variables by which programs accept the certificate of the server."""

    @property
    def v1(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.root}/v1"

    @property
    def output(self) -> int:
        """Tokens of the longest answer that leave the prompt most of the context."""
        return min(MOST_OUTPUT, self.context // 4)


@dataclass(frozen=True)
class Setup:
    """The settings of one start. `DIR` in variables and arguments stands for the directory of `files`.

    `cleared` are variables of the user that would lead elsewhere.
    """

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    cleared: tuple[str, ...] = ()

    def placed(self, directory: str) -> Setup:
        """Return the settings with the files in `directory`."""
        return Setup(
            tuple(argument.replace("DIR", directory) for argument in self.arguments),
            {name: value.replace("DIR", directory) for name, value in self.variables.items()},
            self.files,
            self.cleared,
        )

    def text(self, program: str) -> str:
        """Return the settings as lines for a shell, after the files."""
        lines = [f"# {name}\n{content}\n" for name, content in self.files.items()]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return "\n".join([*lines, shlex.join([program, *self.arguments])])


@dataclass(frozen=True)
class Agent:
    """A program for agents: its executable, the line that installs it, settings, and the tokens of its first prompt.

    `first_tokens` was counted with the built-in model in November 2026: 28,249, 12,950 and 9,930. 0 is not known.
    """

    name: str
    title: str
    program: str
    install: str
    setup: Callable[[Endpoint], Setup]
    first_tokens: int = 0


def _json(content: object) -> str:
    return json.dumps(content, indent=1)


def _claude(server: Endpoint) -> Setup:
    tiers = ("OPUS", "SONNET", "HAIKU", "FABLE")
    variables = {
        "ANTHROPIC_BASE_URL": server.root,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": server.model for tier in tiers},
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.output),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(PATIENCE_MS),
        **server.authorities,
    }
    # The `env` of the user's own settings would win over variables, and --settings wins over it.
    return Setup(
        ("--settings", "DIR/settings.json"),
        variables,
        {"settings.json": _json({"env": variables})},
        ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    )


def _codex(server: Endpoint) -> Setup:
    provider = {"name": "mtp-cluster", "base_url": server.v1, "wire_api": "responses", "env_key": KEY_VARIABLE}
    values: dict[str, object] = {"model_provider": "mtp", "model_context_window": server.context}
    values |= {f"model_providers.mtp.{name}": value for name, value in provider.items()}
    values["model_providers.mtp.stream_idle_timeout_ms"] = PATIENCE_MS
    arguments = ["-m", server.model]
    for name, value in values.items():
        arguments += ["-c", f"{name}={json.dumps(value)}"]
    return Setup(tuple(arguments), {KEY_VARIABLE: server.key})


def _opencode(server: Endpoint) -> Setup:
    limit = {"context": server.context, "output": server.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mtp-cluster",
        "options": {"baseURL": server.v1, "apiKey": f"{{env:{KEY_VARIABLE}}}", "timeout": False},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    config = {
        "provider": {"mtp": provider},
        "model": f"mtp/{server.model}",
        "small_model": f"mtp/{server.model}",
        "share": "disabled",
    }
    variables = {KEY_VARIABLE: server.key, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    return Setup((), variables | {"OPENCODE_DISABLE_AUTOUPDATE": "1"})


def _pi(server: Endpoint) -> Setup:
    model = {
        "type": "chat",
        "id": server.model,
        "name": server.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": server.context,
        "maxTokens": server.output,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "name": "mtp-cluster",
        "baseUrl": server.v1,
        "apiKey": f"${KEY_VARIABLE}",
        "api": "openai-completions",
        "models": [model],
    }
    extension = f"export default function (pi) {{\n  pi.registerProvider('mtp', {_json(provider)});\n}}\n"
    arguments = ("-e", "DIR/mtp.ts", "--provider", "mtp", "--model", server.model)
    return Setup(arguments, {KEY_VARIABLE: server.key}, {"mtp.ts": extension})


def _crush(server: Endpoint) -> Setup:
    costs = ("in", "out", "in_cached", "out_cached")
    model = {
        "id": server.model,
        "name": server.model,
        "context_window": server.context,
        "default_max_tokens": server.output,
        "can_reason": True,
        "supports_attachments": False,
        **{f"cost_per_1m_{cost}": 0 for cost in costs},
    }
    provider = {
        "name": "mtp-cluster",
        "type": "openai-compat",
        "base_url": server.v1,
        "api_key": f"${KEY_VARIABLE}",
        "discover_models": False,
        "models": [model],
    }
    chosen = {"provider": "mtp", "model": server.model}
    config = {"providers": {"mtp": provider}, "models": {"large": chosen, "small": chosen}}
    variables = {KEY_VARIABLE: server.key, "CRUSH_GLOBAL_DATA": "DIR"}
    variables |= {"CRUSH_DISABLE_PROVIDER_AUTO_UPDATE": "1", "CRUSH_DISABLE_METRICS": "1"}
    return Setup((), variables, {"crush.json": _json(config)})


def _goose(server: Endpoint) -> Setup:
    variables = {
        "GOOSE_PROVIDER": "openai",
        "OPENAI_HOST": server.root,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": server.key,
        "OPENAI_TIMEOUT": str(PATIENCE_MS // 1000),
        "GOOSE_MODEL": server.model,
        "GOOSE_CONTEXT_LIMIT": str(server.context),
        "GOOSE_MAX_TOKENS": str(server.output),
        "GOOSE_DISABLE_SESSION_NAMING": "true",
    }
    return Setup((), variables, cleared=("GOOSE_LEAD_MODEL", "OPENAI_BASE_URL"))


def _cline(server: Endpoint) -> Setup:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "baseUrl": server.v1,
        "apiKey": server.key,
        "model": server.model,
        "contextWindow": server.context,
        "maxTokens": server.output,
        "timeout": PATIENCE_MS,
    }
    entry = {
        "updatedAt": "2026-01-01T00:00:00.000Z",
        "tokenSource": "manual",
        "settings": settings,
    }
    content = {"version": 1, "lastUsedProvider": provider, "modes": {}}
    file = _json(content | {"providers": {provider: entry}})
    variables = {
        "CLINE_PROVIDER_SETTINGS_PATH": "DIR/providers.json",
        "CLINE_NO_AUTO_UPDATE": "1",
        # Otherwise a daemon with the settings of an earlier start may answer.
        "CLINE_SESSION_BACKEND_MODE": "local",
    }
    return Setup(("-P", provider, "-m", server.model), variables, {"providers.json": file})


def _copilot(server: Endpoint) -> Setup:
    variables = {
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_BASE_URL": server.v1,
        "COPILOT_PROVIDER_WIRE_API": "completions",
        "COPILOT_PROVIDER_API_KEY": server.key,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(server.context - server.output),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(server.output),
        "COPILOT_MODEL": server.model,
        "COPILOT_OFFLINE": "true",
        # A file with providers there would win over these variables.
        "COPILOT_PROVIDERS_CONFIG": "DIR/none.json",
    }
    return Setup((), variables)


def _npm(package: str) -> str:
    return f"npm install --global {package}"


AGENTS = {
    agent.name: agent
    for agent in (
        Agent("claude", "Claude Code", "claude", _npm("@anthropic-ai/claude-code"), _claude, 28_000),
        Agent("codex", "Codex", "codex", _npm("@openai/codex"), _codex, 13_000),
        Agent("opencode", "OpenCode", "opencode", _npm("opencode-ai"), _opencode, 10_000),
        Agent("pi", "pi", "pi", _npm("@earendil-works/pi-coding-agent"), _pi),
        Agent("crush", "Crush", "crush", _npm("@charmland/crush"), _crush),
        Agent("goose", "goose", "goose", "brew install block-goose-cli", _goose),
        Agent("cline-cli", "Cline CLI", "cline", _npm("cline"), _cline),
        Agent("copilot", "Copilot CLI", "copilot", _npm("@github/copilot"), _copilot),
    )
}
"""The agents that `mtp-coord launch` starts, by name."""


def other_clients(server: Endpoint) -> list[tuple[str, str, str]]:
    """Return title, hint and text to copy for clients that have a page or a file of settings."""
    zed = {
        "name": server.model,
        "display_name": server.model,
        "max_tokens": server.context,
        "max_output_tokens": server.output,
        "capabilities": {"tools": True, "images": False},
    }
    provider = {"mtp-cluster": {"api_url": server.v1, "available_models": [zed]}}
    entry: dict[str, Any] = {"openai_compatible": provider}
    continued = (
        f"name: mtp-cluster\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: {server.model}\n    provider: openai\n"
        f"    model: {server.model}\n    apiBase: {server.v1}\n    apiKey: {server.key}\n    roles: [chat, edit, apply]"
    )
    return [
        (
            "Open WebUI",
            "Its first start reads these variables. Later ones have Settings → Connections.",
            f"export OPENAI_API_BASE_URL={server.v1}\nexport OPENAI_API_KEY={server.key}\nopen-webui serve",
        ),
        ("Continue", "~/.continue/config.yaml", continued),
        (
            "Zed",
            "settings.json, and the key in the variable MTP_CLUSTER_API_KEY",
            json.dumps({"language_models": entry}, indent=2),
        ),
        (
            "Aider",
            "Any client of OpenAI's API has these two variables or settings.",
            f"export OPENAI_API_BASE={server.v1}\nexport OPENAI_API_KEY={server.key}\n"
            f"aider --model openai/{server.model}",
        ),
        ("Ollama's clients", "The address has no /v1.", f"export OLLAMA_HOST={server.root}"),
    ]
