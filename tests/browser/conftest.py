"""One browser for the whole session. Without Chromium the tests of this folder skip."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser.chromium import find_chromium, running_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Run a headless Chromium."""
    if find_chromium() is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with running_browser() as browser:
        yield browser
