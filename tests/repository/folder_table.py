"""The table of folders in CONTRIBUTING: the top-level folders and their folders, with the docstring of each."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coordinator", "worker", "mtp", "proto", "tests")


def package_summary(package: Path) -> str:
    """Return the first line of the docstring of `package`."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def folder_rows() -> list[str]:
    """Return the table as lines of Markdown."""
    rows = ["| folder | content |", "| --- | --- |"]
    for name in PACKAGES:
        top = ROOT / name
        inner = sorted(found.parent for found in top.glob("*/__init__.py"))
        for package in [top, *inner]:
            folder = package.relative_to(ROOT).as_posix()
            rows.append(f"| `{folder}/` | {package_summary(package)} |")
    return rows
