"""Many tabs of one browser: browsers open at most six connections to a host, so the tabs share one event stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser

from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator
from tests.support.browser.chromium import WatchedPage

TABS = 8
"""Tabs of one browser: more than its connections to one host."""


KEEP_SILENCE = """{
    const start = window.setTimeout.bind(window);
    window.setTimeout = (run, ms, ...rest) => {
        if (ms === 40000) window.endSilence = run;
        return start(run, ms, ...rest);
    };
}"""
"""A script that keeps the timer for the silence of a leader. A test ends it at once."""


@pytest.fixture
def client() -> ApiClient:
    """Return an app with short answers."""
    return ApiClient(FakeGenerator(tiny_tokenizer(), "hm</think>Hello"))


@contextmanager
def open_tabs(browser: Browser, url: str, count: int) -> Iterator[list[WatchedPage]]:
    """Open `count` live tabs of one browser. At the end no console has an error."""
    context = browser.new_context()
    tabs = [WatchedPage.open_tab(context, url) for _ in range(count)]
    for tab in tabs:
        tab.page.wait_for_selector(".machine")
        tab.page.wait_for_selector("#link[data-state=live]")
    yield tabs
    context.close()
    assert [error for tab in tabs for error in tab.errors] == []


def test_tabs_of_one_browser_share_a_stream(browser: Browser, client: ApiClient) -> None:
    """Eight tabs are live over one stream, the last one can chat, and another tab takes the stream over."""
    feed = client.app.state.live_feed
    with serving(client.app) as url, open_tabs(browser, url, TABS) as tabs:
        assert len(feed.subscribers) == 1
        tabs[-1].ask("Hi")
        assert tabs[-1].page.locator(".message.assistant > .markdown").inner_text() == "Hello"
        for ready in (False, True):
            tabs.pop(0).page.close()  # the tab that reads the stream
            client.status.ready = ready
            text = "Generating 2 answers" if ready else "Loading layers"
            for tab in tabs:
                tab.page.wait_for_selector(f"#now:has-text('{text}')")
            assert len(feed.subscribers) == 1


def test_a_tab_replaces_a_leader_that_stopped(browser: Browser, client: ApiClient) -> None:
    """A tab whose leader is silent reads the stream itself. The leader follows when it runs again."""
    feed = client.app.state.live_feed
    with serving(client.app) as url, open_tabs(browser, url, 1) as (leader,):
        follower = leader.page.context.new_page()
        follower.add_init_script(KEEP_SILENCE)
        follower.goto(url)
        follower.wait_for_selector(".machine")
        debugger = leader.page.context.new_cdp_session(leader.page)
        debugger.send("Debugger.enable")
        debugger.send("Debugger.pause")
        client.status.ready = False
        follower.wait_for_timeout(1000)
        assert "Generating" in follower.inner_text("#now")
        follower.evaluate("window.endSilence()")
        follower.wait_for_selector("#now:has-text('Loading layers')")
        debugger.send("Debugger.disable")
        leader.page.wait_for_selector("#now:has-text('Loading layers')")
        client.status.ready = True
        for page in (leader.page, follower):
            page.wait_for_selector("#now:has-text('Generating')")
        assert len(feed.subscribers) == 1
