"""The table of clients and features, which a run prints and writes from what its tests recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

FEATURES = ("chat", "stream", "tool", "forced tool", "structured", "long")
HEAD = """\
# The clients of the tests

`make clients` installs these clients, runs `tests/clients`, and writes this page. Each client runs as a program of its
own and talks to the API over a socket. The answers are scripted, so the tests show the dialects and not a model.

A client in a Docker container, such as Open WebUI, reaches the server at `http://host.docker.internal:8080/v1`. Start
the server with `--allowed-host NAME` for a client that uses another name. It gets status 421 otherwise.

* A cell says `yes` if the client got the right result, and `fails` if it did not. An empty cell has no test.
* "forced tool" names the tool that the model must call. Ollama's API has no such choice.
* "long" is a prompt of 30,010 tokens, whose words the answer counts.

"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the page of the table."""
    parser.addoption("--clients-page", type=Path, help="write the table of clients to this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of the features that the tests recorded, and write it if a page is named."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "feature":
                    client, dialect, feature, works = value
                    row = cells.setdefault((client, dialect), {})
                    row[feature] = "yes" if works else "fails"
    if not cells:
        return
    rows: list[tuple[str, ...]] = [("client", "dialect", *FEATURES), ("---",) * (2 + len(FEATURES))]
    rows += [
        (*key, *(row.get(name, "") for name in FEATURES)) for key, row in sorted(cells.items())
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    terminalreporter.section("clients")
    terminalreporter.write_line("\n".join(lines))
    if page := terminalreporter.config.getoption("clients_page", default=None):
        page.write_text(HEAD + "\n".join(lines) + "\n")
