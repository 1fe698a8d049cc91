"""One browser for each file of tests. Without Chromium the tests of this folder skip."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser.chromium import find_chromium, running_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run a headless Chromium for the tests of one file.

    Playwright runs an event loop on the thread of the tests. Tests of other files need that thread for loops of their
    own.
    """
    if find_chromium() is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with running_browser() as browser:
        yield browser
