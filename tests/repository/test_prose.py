"""The prose of docstrings, comments, messages and pages follows CONTRIBUTING, as far as a program can tell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prose.page_text import read_blocks
from tests.support.prose.python_text import documented_methods, read_texts, undocumented
from tests.support.prose.rules import find_fragment, find_long_sentences, find_words

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "mtp", "worker", "coordinator")

PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")}
    | {*ROOT.glob("mtp/builtin/*.md")}
)


def python_files(package: str) -> list[Path]:
    """Return the source files of `package`, without the generated ones."""
    return sorted(file for file in (ROOT / package).rglob("*.py") if "_pb2" not in file.name)


def complaints_about_code(file: Path) -> Iterator[str]:
    """Yield a line for each text of `file` that breaks a rule; the messages of tests are not checked."""
    is_test = file.is_relative_to(ROOT / "tests")
    for text in read_texts(file.read_text(encoding="utf-8")):
        if is_test and text.kind == "message":
            continue
        found = list(find_words(text.content))
        if text.kind == "docstring":
            found += find_fragment(text.content)
        if text.kind != "message":
            found += find_long_sentences(text.content)
        yield from (f"{file}:{text.line}: {text.kind}: {complaint}" for complaint in found)


def complaints_about_page(page: Path) -> Iterator[str]:
    """Yield a line for each block of `page` that breaks a rule; rows of tables may be longer than a sentence."""
    for block in read_blocks(page.read_text(encoding="utf-8")):
        found = list(find_words(block.content))
        if not block.is_row:
            found += find_long_sentences(block.content)
        yield from (f"{page}:{block.line}: {complaint}" for complaint in found)


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_texts_of_the_code(package: str) -> None:
    """Docstrings, comments and messages use standard words and short sentences."""
    assert [line for file in python_files(package) for line in complaints_about_code(file)] == []


def test_texts_of_the_pages() -> None:
    """Pages use standard words and short sentences."""
    assert [line for page in PAGES for line in complaints_about_page(page)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_definitions_have_docstrings(package: str) -> None:
    """Every public class, function and method says what it is for, or overrides one that does."""
    trees = {file: ast.parse(file.read_text()) for name in PACKAGES for file in python_files(name)}
    documented = documented_methods(trees.values())
    assert [
        f"{file}:{node.lineno}: {node.name}"
        for file in python_files(package)
        for node in undocumented(trees[file], documented)
    ] == []
