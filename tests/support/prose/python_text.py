"""The texts of a Python file that people read: docstrings, comments and messages."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Text:
    """A text and the line it begins on."""

    line: int
    kind: Literal["docstring", "comment", "message"]
    content: str


def read_texts(source: str) -> Iterator[Text]:
    """Yield the docstrings, the comments, and the strings with a space in calls and raised errors."""
    tree = ast.parse(source)
    yield from _docstrings(tree)
    yield from _messages(tree)
    yield from _comments(source)


def documented_methods(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return the names of the methods of each class that have a docstring, their own or that of a base."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def names(cls: ast.ClassDef) -> set[str]:
        own = {m.name for m in cls.body if isinstance(m, Definition) and ast.get_docstring(m)}
        bases = [classes[b.id] for b in cls.bases if isinstance(b, ast.Name) and b.id in classes]
        return own.union(*map(names, bases))

    return {name: names(cls) for name, cls in classes.items()}


def undocumented(tree: ast.Module, documented: dict[str, set[str]]) -> Iterator[Definition]:
    """Yield the public classes, functions and methods without a docstring of their own or, if `documented`, of a base.

    A definition inside a function, and a member of a private class, is not public.
    """
    pending: list[ast.AST] = [tree]
    while pending:
        parent = pending.pop()
        inherited = documented[parent.name] if isinstance(parent, ast.ClassDef) else ()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Definition) and not node.name.startswith("_"):
                has = ast.get_docstring(node) is not None or node.name in inherited
                if not has and not _is_overload(node):
                    yield node
                if isinstance(node, ast.ClassDef):
                    pending.append(node)
            elif not isinstance(node, Definition):
                pending.append(node)


def _is_overload(node: Definition) -> bool:
    names = [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]
    return "overload" in names


def _docstrings(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | Definition):
            continue
        for previous, statement in zip([None, *node.body], node.body, strict=False):
            first = previous is None
            if (first or isinstance(previous, ast.Assign | ast.AnnAssign)) and (
                content := _string_statement(statement)
            ):
                yield Text(statement.lineno, "docstring", _without_blocks(content))


def _string_statement(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        value = node.value.value
        return inspect.cleandoc(value) if isinstance(value, str) else None
    return None


def _without_blocks(docstring: str) -> str:
    """Remove the indented blocks: formulas, tables and examples."""
    return "\n".join(line for line in docstring.split("\n") if not line.startswith("    "))


def _messages(tree: ast.Module) -> Iterator[Text]:
    seen = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise | ast.Call):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and id(part) not in seen:
                seen.add(id(part))
                if isinstance(part.value, str) and " " in part.value:
                    yield Text(part.lineno, "message", part.value)


def _comments(source: str) -> Iterator[Text]:
    """Yield each comment; comments on lines of their own that follow each other are one."""
    lines: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = token.line.lstrip().startswith("#")
        if lines and (not alone or token.start[0] != last + 1):
            yield Text(first, "comment", " ".join(lines))
            lines = []
        if not lines:
            first = token.start[0]
        lines.append(token.string.lstrip("#: "))
        last = token.start[0]
        if not alone:
            last = 0
    if lines:
        yield Text(first, "comment", " ".join(lines))
