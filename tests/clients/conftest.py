"""The table of clients and features, which a run prints from what its tests recorded."""

from __future__ import annotations

import pytest

FEATURES = ("chat", "stream", "tool", "forced tool", "structured", "long")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of the features that the tests recorded."""
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
    rows += [(*key, *(row.get(name, "") for name in FEATURES)) for key, row in sorted(cells.items())]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    terminalreporter.section("clients")
    terminalreporter.write_line("\n".join(lines))
