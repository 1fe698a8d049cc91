"""The pages: every link has a target, and every command and flag exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from coordinator.cli import COMMANDS
from tests.support.processes.programs import CommandLine, from_markdown

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")}
    | {*ROOT.glob("mtp/builtin/*.md"), *ROOT.glob("tests/**/*.md")}
)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
SECTION = re.compile(r"\]\((?!\w+://)([^)#]*)#([^)]+)\)")
CALLS = sorted(
    {call for page in PAGES for call in from_markdown(str(page.relative_to(ROOT)), page.read_text())},
    key=str,
)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of `page`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_the_first_block_of_the_readme_has_the_two_commands() -> None:
    """The README says what this is, and the first commands it shows are the two of make."""
    text = (ROOT / "README.md").read_text()
    assert text.startswith("# mtp-cluster\n\n**mtp-cluster ")
    block = re.search(r"^```sh\n(.*?)^```", text, re.S | re.M)
    assert block is not None
    assert [line.partition("#")[0].strip() for line in block[1].splitlines()] == [
        "make demo",
        "make test",
    ]


def test_pages_name_every_command() -> None:
    """A page shows every command of `mtp-coord`."""
    assert set(COMMANDS) <= {call.command for call in CALLS}


@each_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    """Every relative link leads to a file or folder of this repository."""
    targets = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


@each_page
def test_links_to_sections_lead_somewhere(page: Path) -> None:
    """Every link to a section names a heading of its page, as GitHub makes its anchor."""
    found = [(page.parent / link if link else page, anchor) for link, anchor in SECTION.findall(page.read_text())]
    assert [anchor for target, anchor in found if anchor not in anchors(target)] == []


@each_page
def test_make_targets_exist(page: Path) -> None:
    """`make NAME` in a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = page.read_text()
    named = re.findall(r"(?:^|`)make(?: [A-Z]+=\S+)* ([a-z][a-z-]*)", text, re.M)
    assert set(named) <= targets


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_commands_and_flags_exist(call: CommandLine) -> None:
    """The programs accept the commands and flags that the pages show."""
    assert call.unknown_flags() == []


def test_contributing_lists_every_folder() -> None:
    """The table of folders has each folder of the product with the first line of its docstring."""
    rows = ["| folder | content |", "| --- | --- |"]
    for name in ("coordinator", "worker", "mtp", "proto"):
        for file in sorted(ROOT.glob(f"{name}/*/__init__.py")):
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            rows.append(f"| `{name}/{file.parent.name}` | {text.partition(chr(10))[0]} |")
    table = "\n".join(rows)
    assert table in (ROOT / "CONTRIBUTING.md").read_text(), f"CONTRIBUTING.md lacks:\n{table}"
