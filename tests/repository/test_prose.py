"""The prose of docstrings, comments, messages and pages follows CONTRIBUTING, as far as a program can tell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prose.page_text import read_blocks
from tests.support.prose.python_text import read_texts, undocumented
from tests.support.prose.rules import find_fragment, find_long_sentences, find_words

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "mtp", "worker", "coordinator")

PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")}
    | {*ROOT.glob("mtp/builtin/*.md")}
)


def python_files(*places: str) -> list[Path]:
    """Return our source files under `places`, without the generated ones."""
    files = {file for place in places for file in (ROOT / place).rglob("*.py")}
    return sorted(file for file in files if "_pb2" not in file.name)


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


def relative(path: Path) -> str:
    """Return `path` as a test id."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", python_files(*PACKAGES, "tests"), ids=relative)
def test_texts_of_the_code(file: Path) -> None:
    """Docstrings, comments and messages use standard words and short sentences."""
    assert list(complaints_about_code(file)) == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_texts_of_the_pages(page: Path) -> None:
    """Pages use standard words and short sentences."""
    assert list(complaints_about_page(page)) == []


@pytest.mark.parametrize("file", python_files(*PACKAGES), ids=relative)
def test_public_definitions_have_docstrings(file: Path) -> None:
    """Every public class, function and method says what it is for."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert [f"{file}:{node.lineno}: {node.name}" for node in undocumented(tree)] == []


@pytest.mark.parametrize(
    "docstring",
    [
        "Most tokens of a chunk of a prompt of so many.",
        "What a worker says of itself by mDNS.",
        "Whether the ratio rule decides.",
        "The address, where mDNS is not to be had.",
        "A refusal of what a request says in vain.",
        "A window built on the hope that the one before it is kept whole.",
        "A sentence " + "of many words " * 9 + "ends here.",
    ],
)
def test_a_bad_docstring_is_found(docstring: str) -> None:
    """The rules refuse the sentences that they were written against."""
    assert [*find_fragment(docstring), *find_words(docstring), *find_long_sentences(docstring)]


def test_all_texts_of_a_file_are_read() -> None:
    """Docstrings of constants, comments over several lines, raised errors and code blocks are distinguished."""
    source = '''
"""Module."""
LIMIT = 3
"""Bytes.

    a table

The end.
"""
# One comment
# over two lines.
def f(): raise ValueError("not found: " + f"{LIMIT} bytes.")
'''
    texts = [(text.kind, text.content) for text in read_texts(source)]
    assert texts == [
        ("docstring", "Module."),
        ("docstring", "Bytes.\n\n\nThe end."),
        ("message", "not found: "),
        ("message", " bytes."),
        ("comment", "One comment over two lines."),
    ]
    assert [node.name for node in undocumented(ast.parse(source))] == ["f"]


def test_blocks_of_a_page_are_read() -> None:
    """Code is left out, list items are apart, and a link counts as its text."""
    page = "# Title\n\nOne [link](a.md)\nline.\n```sh\nlanes\n```\n* item\n* other\n\n| row |\n"
    blocks = [(block.line, block.is_row, block.content) for block in read_blocks(page)]
    assert blocks == [
        (3, False, "One link\nline."),
        (8, False, "* item"),
        (9, False, "* other"),
        (11, True, "| row |"),
    ]
