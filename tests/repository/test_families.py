"""The seam of model families: a family with a folder is known to few product files outside it."""

from __future__ import annotations

import re

import pytest

from mtp.checkpoint.known_families import FAMILIES
from tests.repository.test_layout import MODULES, folder_of, imported_modules

REGISTRATION = "mtp.checkpoint.known_families"

PUBLISHED = {f"mtp.checkpoint.hub.{name}" for name in ("published", "known_repos")}
"""The tables of published models."""

MOST_FILES = 3

WORDS = {
    "mtp.glm_flash": r"(?i)glm|glm5_next",
    "mtp.flash_next": r"(?i)flash.?next|qwen4_exp",
}
"""The words by which a file names a family, by its folder."""

each_folder = pytest.mark.parametrize("folder", WORDS)


def test_each_family_of_a_folder_is_counted() -> None:
    """A new folder of a family has its words in WORDS."""
    modules = {type(family).__module__.rpartition(".")[0] for family in FAMILIES}
    assert modules - {"mtp.checkpoint.families", "mtp.mlx_models"} == WORDS.keys()


@each_folder
def test_few_files_name_a_family(folder: str) -> None:
    """The registration does, and little else outside the folder and the tables of published models."""
    outside = [m for m in MODULES if not m.name.startswith(folder) and m.name not in PUBLISHED]
    naming = [module.name for module in outside if re.search(WORDS[folder], module.text)]
    assert REGISTRATION in naming and len(naming) <= MOST_FILES, naming


@each_folder
def test_the_registration_alone_imports_a_family(folder: str) -> None:
    """No other product file outside the folder imports from it."""
    outside = [m for m in MODULES if folder_of(m.name) != folder]
    found = {m.name: {n for n in imported_modules(m) if n.startswith(f"{folder}.")} for m in outside}
    assert {name: names for name, names in found.items() if names} == {REGISTRATION: {f"{folder}.family"}}
