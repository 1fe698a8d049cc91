"""docs/REQUEST.md: the walk names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "REQUEST.md").read_text(encoding="utf-8")

STEP = re.compile(r"`([\w/]+\.py):([\w.]+)`")
"""A reference, such as `coordinator/schedule/loop.py:GenerationLoop.generate`."""

SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]


def definitions(file: str) -> set[str]:
    """Return the names of the functions, classes and methods of `file`; a method is `Class.method`."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("file", sorted({file for file, _ in STEP.findall(PAGE)}))
def test_named_functions_exist(file: str) -> None:
    """Every function that the page names in `file` is defined there."""
    named = {name for found, name in STEP.findall(PAGE) if found == file}
    assert named - definitions(file) == set()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_steps_are_numbered_and_name_a_function(section: str) -> None:
    """The steps of a walk count from 1, and each names a function unless it continues the step before."""
    steps = re.split(r"^(\d+)\. ", section, flags=re.MULTILINE)[1:]
    numbers, texts = steps[0::2], steps[1::2]
    assert numbers == [str(number) for number in range(1, len(texts) + 1)]
    without = [text for text in texts if not STEP.search(text)]
    assert len(without) <= 1


def test_the_walks_are_there() -> None:
    """A request of ten to fifteen steps in at most 20 files, then the other walks."""
    titles = [section.partition("\n")[0] for section in SECTIONS]
    others = ["A relayed token", "A rollback", "A recovery", "A load", "A group", "An image"]
    assert titles == ["A request", *others]
    assert 10 <= len(re.findall(r"^\d+\. ", SECTIONS[0], re.MULTILINE)) <= 15
    assert len({file for file, _ in STEP.findall(SECTIONS[0])}) <= 20
