"""The training text: CPython's standard library, its tests, and the reST sources of its documentation.

Nothing is downloaded. The library is read from installed interpreters, the documentation from a folder (Debian's
python3-doc installs it as `html/_sources`). The result depends on these files alone.

Held-out text is chosen by module, not by file. For a module on HELD_OUT its source, its tests and its documentation
page stay out of training, in every version of the library. So training never reads another version of a held-out file.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HELD_OUT = frozenset(
    "bisect calendar chunk cmd colorsys configparser csv filecmp fileinput fractions getpass glob graphlib heapq "
    "linecache netrc numbers plistlib pprint queue quopri sched secrets shlex textwrap timeit wave zipapp".split()
)
"""Modules held out for validation: small, self-contained, and recognisable to a reader of the samples."""

SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "pydoc_data", "data"})
MAX_CODEC_BYTES = 8_000  # larger files of `encodings` are generated character tables
MAX_NON_ASCII = 0.02  # share of the characters above which a file is test data, not text
MIN_NEW_LINES = 0.5  # share of new lines above which a file of an older library counts


@dataclass(frozen=True)
class Document:
    """One file: `name` is its path inside the library or the documentation, e.g. `library/csv.rst`."""

    name: str
    text: str

    @property
    def module(self) -> str:
        """The module the file belongs to: `csv` for csv.py, test/test_csv.py and library/csv.rst."""
        parts = PurePosixPath(self.name).parts
        folders = {"test", "tests"} if self.is_source else {"library"}
        first = next((part for part in parts if part not in folders), parts[-1])
        return first.partition(".")[0].removeprefix("_").removeprefix("test_").lstrip("_")

    @property
    def is_source(self) -> bool:
        """True for Python source, false for documentation."""
        return self.name.endswith(".py")

    @property
    def held_out(self) -> bool:
        """True for a document that stays out of training."""
        return self.module in HELD_OUT


def _readable(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # some test files of the library have other encodings on purpose
        return None
    strange = sum(not char.isascii() for char in text)
    return text if text.strip() and strange <= MAX_NON_ASCII * len(text) else None


def _sources(library: Path) -> Iterator[Document]:
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if SKIPPED_FOLDERS.intersection(name.parts) or name.parts[0].startswith("config-"):
            continue
        if name.parts[0] == "encodings" and path.stat().st_size > MAX_CODEC_BYTES:
            continue
        if text := _readable(path):
            yield Document(name.as_posix(), text)


def _pages(docs: Path) -> Iterator[Document]:
    for path in sorted(docs.rglob("*.txt")):
        if text := _readable(path):
            yield Document(path.relative_to(docs).as_posix().removesuffix(".txt"), text)


def build(libraries: Sequence[Path], docs: Path | None) -> list[Document]:
    """Read the corpus.

    Args:
        libraries: `lib/python3.x` folders, newest first. A file of an older library counts only if most of its lines
            are new for its module.
        docs: folder of reST sources (`*.rst.txt`), or None.

    Returns: documents in a fixed order, the held-out ones included (see `Document.held_out`).
    """
    documents: list[Document] = []
    known: defaultdict[str, set[str]] = defaultdict(set)
    for library in libraries:
        accepted = []
        for document in _sources(library):
            lines = {stripped for line in document.text.splitlines() if (stripped := line.strip())}
            new = lines - known[document.module]
            if len(new) >= MIN_NEW_LINES * len(lines):
                accepted.append((document, lines))
        for (
            document,
            lines,
        ) in (
            accepted
        ):  # after the scan, so that files of one library are never compared with each other
            documents.append(document)
            known[document.module] |= lines
    if docs is not None:
        documents.extend(_pages(docs))
    return documents
