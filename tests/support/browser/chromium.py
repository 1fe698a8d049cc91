"""Debian's Chromium, driven by Playwright. Playwright's own browsers are not downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright import sync_api

PATIENCE_MS = 60_000
"""Milliseconds. Longest wait for an element, on a machine that runs other tests too."""


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def running_browser() -> Iterator[sync_api.Browser]:
    """Run one headless browser. Call it only if `find_chromium` found one."""
    path = find_chromium()
    assert path is not None, "Chromium is not installed"
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs privileges that a container lacks, and this browser opens only pages of these tests.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class WatchedPage:
    """A page, and the errors that its console has shown, without those that contain one of `expected`.

    Errors reach this process later than the page shows their effect. So name them before their cause.
    """

    page: sync_api.Page
    errors: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    @classmethod
    def open(cls, browser: sync_api.Browser, url: str, **context: object) -> WatchedPage:
        """Open `url` in a context of its own; `context` has Playwright's options such as `color_scheme`."""
        return cls.open_tab(browser.new_context(**context), url)  # type: ignore[arg-type]

    @classmethod
    def open_tab(cls, context: sync_api.BrowserContext, url: str) -> WatchedPage:
        """Open `url` in one more tab of `context`."""
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        watched = cls(page)
        page.on("console", watched._record_message)
        page.on("pageerror", lambda error: watched.errors.append(str(error)))
        page.goto(url)
        return watched

    def _record_message(self, message: sync_api.ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if not any(part in message.text for part in self.expected):
            self.errors.append(message.text)

    def show(self, view: str) -> None:
        """Choose a view by its tab."""
        self.page.click(f"#tab-{view}")

    def ask(self, text: str) -> None:
        """Send `text` in the chat and wait for the end of the answer."""
        self.show("chat")
        answers = self.page.locator(".message.assistant:not(.streaming)")
        before = answers.count()
        self.page.fill("#chat-input", text)
        self.page.keyboard.press("Enter")
        sync_api.expect(answers).to_have_count(before + 1, timeout=PATIENCE_MS)

    def close(self) -> None:
        """Close the page with its context."""
        self.page.context.close()
