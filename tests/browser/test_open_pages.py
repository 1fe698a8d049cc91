"""The page with an API key, after an hour, and in many tabs. The app runs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect

from coordinator.trust.client_access import Invitation
from coordinator.web.context import ApiOptions
from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator
from tests.support.browser.chromium import WatchedPage

KEY = "secret-key"


HOUR_OF_DELTAS = 4 * 3600
MOST_GROWTH = 6_000_000
"""Bytes. Bound on the growth of the page's heap over an hour. Its lists hold about 3 MB when they are full."""


def test_the_page_asks_for_a_key_and_keeps_it(browser: Browser) -> None:
    """A wrong key is refused. A right one stays in this tab, or in this browser on request."""
    generator = FakeGenerator(tiny_tokenizer(), "hm, a greeting</think>Hello", accepted=1)
    client = ApiClient(generator, options=ApiOptions(api_keys=(KEY,)))
    invitation = Invitation("mtp-worker --join mtp1.abc", 7)
    object.__setattr__(client.app.state.api, "invite", lambda: invitation)
    with serving(client.app) as url:
        watched = WatchedPage.open(browser, url)
        page = watched.page
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-input", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_have_text("The coordinator refused this key.")
        page.fill("#key-input", KEY)
        page.click("#key-form button[type=submit]")
        page.wait_for_selector(".machine")
        assert page.evaluate("[localStorage.length, sessionStorage.length]")[1] == 1
        stranger = page.context.new_page()  # a tab without the key does not get the state of this one
        stranger.goto(url)
        stranger.wait_for_selector("#key-dialog[open]")
        assert stranger.locator(".machine").count() == 0
        stranger.close()
        watched.show("models")
        page.click("text=Create the join command")
        command = page.locator(".invitation code:visible")
        expect(command).to_have_count(1)
        assert command.inner_text() == invitation.command
        watched.ask("Hi")
        reasoning = page.locator(".message.assistant .reasoning:not([open])")
        assert "a greeting" in (reasoning.text_content() or "")
        assert page.locator(".message.assistant > .markdown").inner_text() == "Hello"
        watched.show("cluster")
        page.reload()
        page.wait_for_selector(".machine")
        refused = ("401", "503")  # the app of this test has no catalog of models
        assert [e for e in watched.errors if not any(code in e for code in refused)] == []
        watched.close()


def test_an_hour_of_messages_leaves_the_page_small(browser: Browser) -> None:
    """Lists are bounded, and the heap does not grow with time."""
    with serving(ApiClient().app) as url:
        watched = WatchedPage.open(browser, url)
        watched.page.wait_for_selector(".machine")
        session = watched.page.context.new_cdp_session(watched.page)

        def heap() -> int:
            """Return the bytes of the page's heap after a collection."""
            session.send("HeapProfiler.collectGarbage")
            return int(session.send("Runtime.getHeapUsage")["usedSize"])

        before = heap()
        sizes = watched.page.evaluate(
            """async (count) => {
                const { LiveState } = await import("/assets/stream.js");
                const { ClusterView } = await import("/assets/cluster.js");
                const state = new LiveState();
                const view = new ClusterView(document.createElement("section"), state);
                const send = (name, data) => state.handle(`event: ${name}\\ndata: ${JSON.stringify(data)}`);
                const status = await (await fetch("/status")).json();
                status.activity = "";
                send("snapshot", { time: 1, status, events: [], history: [], frames: [] });
                for (let i = 0; i < count; i += 1) {
                    const frames = [0, 1, 2].map((k) => [3 * i + k, "w", 3, 1, i / 4, 20, 1, 9, 11, 8]);
                    const history = i % 4 ? [] : [[i / 4, 40, 0.8, 1, 0, 0.1, 0.2, 0.02, 0.03]];
                    const events = i % 40 ? [] : [{ at: i, kind: "join", text: `w${i} joined`, seconds: null }];
                    send("delta", { status: { running: i % 3 }, frames, history, events });
                    if (i % 40 === 0) view.update();
                }
                window.kept = state;
                return [state.frames.length, state.history.length, state.events.length];
            }""",
            HOUR_OF_DELTAS,
        )
        assert sizes == [6000, 600, 100]
        assert heap() - before < MOST_GROWTH
        assert watched.errors == []
        watched.close()


TABS = 8
"""Tabs of one browser, which share one event stream: browsers open at most six connections to one host."""

KEEP_SILENCE = """{
    const start = window.setTimeout.bind(window);
    window.setTimeout = (run, ms, ...rest) => {
        if (ms === 40000) window.endSilence = run;
        return start(run, ms, ...rest);
    };
}"""
"""A script that keeps the timer for the silence of a leader. A test ends it at once."""


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


@pytest.mark.slow
def test_tabs_of_one_browser_share_a_stream(browser: Browser) -> None:
    """Eight tabs are live over one stream, the last one can chat, and another tab takes the stream over."""
    client = ApiClient(FakeGenerator(tiny_tokenizer(), "hm</think>Hello"))
    feed = client.app.state.live_feed
    with serving(client.app) as url, open_tabs(browser, url, TABS) as tabs:
        assert len(feed.subscribers) == 1
        tabs[-1].ask("Hi")
        assert tabs[-1].page.locator(".message.assistant > .markdown").inner_text() == "Hello"
        for ready in (False, True):
            tabs.pop(0).page.close()  # the tab that reads the stream
            client.status.ready = ready
            text = "Generating 2 answers" if ready else "Loading: 1 GB"
            for tab in tabs:
                tab.page.wait_for_selector(f"#now:has-text('{text}')")
            assert len(feed.subscribers) == 1


def test_a_tab_replaces_a_leader_that_stopped(browser: Browser) -> None:
    """A tab whose leader is silent reads the stream itself. The leader follows when it runs again."""
    client = ApiClient(FakeGenerator(tiny_tokenizer(), "hm</think>Hello"))
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
        follower.wait_for_selector("#now:has-text('Loading: 1 GB')")
        debugger.send("Debugger.disable")
        leader.page.wait_for_selector("#now:has-text('Loading: 1 GB')")
        client.status.ready = True
        for page in (leader.page, follower):
            page.wait_for_selector("#now:has-text('Generating')")
        assert len(feed.subscribers) == 1
