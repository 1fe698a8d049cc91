"""The prose of docstrings, comments and pages follows CONTRIBUTING, as far as a program can tell."""

from __future__ import annotations

import ast
import inspect
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "mtp", "worker", "coordinator")
SOURCES = [f for p in PACKAGES for f in sorted((ROOT / p).rglob("*.py")) if "_pb2" not in f.name]
PAGES = [page for at in ("*.md", "docs/*.md", "deploy/*.md") for page in sorted(ROOT.glob(at))]

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

MAX_SENTENCE_WORDS = 28
"""Words. CONTRIBUTING asks for 25; the margin is for code and figures, which count as words here."""

MAX_WORDS = 34_285
"""Words of all pages, with tables and code. Lower it when words go. Before adding, ask what goes."""

RETIRED = re.compile(
    r"\b(alike|allowance|amid|be told|by hand|checkup|convoys?|for ever|graft(s|ed)?|hears?|heard|in vain|lately|"
    r"let go|lets go|lest|mend(s|ed|ing)?|no one|nobody|whoever|on its way out|pulses?|remed(y|ies)|so many|such a|"
    r"taken for|thereby|to be had|(is|are|was|were) told|believed?)\b",
    re.IGNORECASE,
)
"""Idioms and retired terms. CONTRIBUTING has the words to write instead."""

OPENING = re.compile(r"(All that|As|How|Of|That|Those|What|When|Where|Whether|Which|Who)\b")
"""First words of a fragment. A docstring opens with an imperative verb or a noun phrase instead."""


def long_sentences(text: str) -> list[str]:
    """Return the sentences of `text` that are too long. Colons and semicolons end a sentence, too."""
    sentences = re.split(r"(?<=[.;:!?])[*_)\"]*\s+|\n\s*\n|\n\s*(?=[*-] |\d+\. )", text)
    return [found for found in sentences if len(found.split()) > MAX_SENTENCE_WORDS]


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and constants, without their indented blocks."""
    for node in ast.walk(tree):
        for child in node.body if isinstance(node, ast.Module | Definition) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                yield re.sub(r"(?m)^    .*$", "", inspect.cleandoc(str(child.value.value)))


def plain_text(page: str) -> str:
    """Return the sentences of a page: without code, headings and tables, and with the text of links."""
    page = re.sub(r"^```.*?^```", "\n", page, flags=re.M | re.S)
    page = re.sub(r"^(#.*|\|.*|    .*)$", "\n", page, flags=re.M)
    return re.sub(r"`[^`]*`", "…", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page))


@pytest.mark.parametrize("package", PACKAGES)
def test_texts_of_the_code(package: str) -> None:
    """Docstrings, comments and messages use standard words, and docstrings short sentences."""
    for file in (f for f in SOURCES if f.is_relative_to(ROOT / package)):
        with file.open("rb") as source:
            for token in tokenize.tokenize(source.readline):
                if token.type in (tokenize.STRING, tokenize.COMMENT) and " " in token.string:
                    found = RETIRED.search(re.sub(r"`[^`]*`", "", token.string))
                    assert not found, f"{file}:{token.start[0]}: {found}"
        for text in docstrings(ast.parse(file.read_text())):
            assert not OPENING.match(text), f"{file}: {text[:80]}"
            assert long_sentences(text) == [], file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_texts_of_the_pages(page: Path) -> None:
    """Pages use standard words and short sentences."""
    text = plain_text(page.read_text())
    assert not (found := RETIRED.search(text)), found
    assert long_sentences(text) == []


def test_the_pages_stay_short() -> None:
    """The words of all pages stay below their limit."""
    assert sum(len(page.read_text().split()) for page in PAGES) <= MAX_WORDS


@pytest.mark.parametrize("package", PACKAGES)
def test_public_definitions_have_docstrings(package: str) -> None:
    """Every public class and function has a docstring. A method may have that of an interface."""
    classes = [n for f in SOURCES for n in ast.parse(f.read_text()).body if isinstance(n, ast.ClassDef)]
    interfaces = [c for c in classes if {"ABC", "Protocol"} & {ast.unparse(b) for b in c.bases}]
    known = {m.name for c in interfaces for m in c.body if isinstance(m, Definition)}
    for file in (f for f in SOURCES if f.is_relative_to(ROOT / package)):
        for node in ast.parse(file.read_text()).body:
            inner = node.body if isinstance(node, ast.ClassDef) and not node.bases else []
            for found in [node, *inner] if not getattr(node, "name", "_").startswith("_") else []:
                if isinstance(found, Definition) and not found.name.startswith("_"):
                    documented = found.name in known or ast.get_docstring(found)
                    assert documented, f"{file}:{found.lineno}: {found.name}"
