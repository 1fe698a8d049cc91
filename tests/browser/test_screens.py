"""The screens as they are read and used: figures, charts, invitations and the chat. The app runs in this process."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Locator, expect

from coordinator.status.history import Sample
from tests.support.api.api_client import ApiClient, tiny_tokenizer
from tests.support.api.api_server import serving
from tests.support.api.fake_generator import FakeGenerator
from tests.support.browser.chromium import WatchedPage

WIDEST_PANEL = 260
"""CSS pixels. Upper bound of the width of the settings, beside a chat of 1,280."""

SECONDS = 300
"""Samples in the history of the charts: more than three minutes."""


@pytest.fixture
def client() -> ApiClient:
    """Return an app whose answers are short and slow enough to be stopped."""
    return ApiClient(FakeGenerator(tiny_tokenizer(), "hm</think>Hello"))


@pytest.fixture
def opened(browser: Browser, client: ApiClient) -> Iterator[WatchedPage]:
    """Open the page. At the end its console has no error."""
    with serving(client.app) as url:
        watched = WatchedPage.open(browser, url, viewport={"width": 1280, "height": 860})
        watched.page.wait_for_selector(".machine")
        yield watched
        watched.close()
        assert watched.errors == []


def sparse_history() -> list[Sample]:
    """Return samples up to now. Drafts were accepted in four seconds of them, two of which are neighbours."""
    accepted = {SECONDS - 50: 1.0, SECONDS - 40: 1.0, SECONDS - 39: 0.5, SECONDS - 1: 0.25}
    now = time.time()
    return [
        Sample(now - SECONDS + i, 80.0, accepted.get(i), 1, 0, 0.2, 4.0, None, None)
        for i in range(SECONDS)
    ]


def chart_of(opened: WatchedPage, title: str) -> Locator:
    """Return the chart with this title."""
    return opened.page.locator(f".chart:has(.chart-title:text-is('{title}'))")


def test_charts_show_sparse_values_scales_and_the_value_at_the_pointer(
    browser: Browser, client: ApiClient
) -> None:
    """Gaps are bridged, 100 % is inside the plot, scales are short, and pointer and keys read values."""
    client.app.state.live_feed.history.samples.extend(sparse_history())
    with serving(client.app) as url:
        opened = WatchedPage.open(browser, url, viewport={"width": 1280, "height": 860})
        page = opened.page
        opened.show("speed")
        drafts, rate = chart_of(opened, "Drafts accepted"), chart_of(opened, "Tokens per second")
        page.wait_for_selector(".chart .stroke")
        bridges = drafts.locator("path.bridge").get_attribute("d") or ""
        dots = drafts.locator("path.dots").get_attribute("d") or ""
        assert (bridges.count("M"), dots.count("M")) == (2, 2)
        heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", bridges + dots)]
        assert min(heights) > 2, "100 % lies on the edge of the plot"
        assert drafts.locator(".scale span").all_inner_texts() == ["100 %", "50 %", "0"]
        assert rate.locator(".scale span").all_inner_texts() == ["80", "40", "0"]
        box = drafts.locator(".plot").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40)
        assert drafts.locator(".reading").inner_text().count(":") == 2
        assert "accepted" in drafts.locator(".reading").inner_text()
        page.mouse.move(0, 0)
        assert drafts.locator(".reading").is_hidden()
        drafts.locator(".plot").focus()
        page.keyboard.press("Home")
        before = drafts.locator(".plot").get_attribute("aria-valuetext")
        page.keyboard.press("ArrowRight")
        after = drafts.locator(".plot").get_attribute("aria-valuetext")
        assert before != after
        assert drafts.locator(".reading").inner_text() == after
        begin = drafts.locator(".times span").first
        whole = begin.inner_text()
        page.get_by_role("button", name="1 min").click()
        assert begin.inner_text() != whole
        page.reload()
        pressed = page.locator(".ranges [aria-pressed=true]")
        expect(pressed).to_have_text("1 min")
        opened.close()
        assert opened.errors == []


def test_the_figures_of_a_machine_are_those_of_the_coordinator(
    opened: WatchedPage, client: ApiClient
) -> None:
    """The page computes no share of time itself, and marks the machine that the coordinator names."""
    status = client.status.status()
    busy = replace(status.nodes[0], stage_ms=5.0, busy=0.25)
    slow = replace(status.nodes[1], health="ready", stage_ms=9.0, busy=1.0, slowest=True)
    client.status.status = lambda: replace(status, nodes=(busy, slow))  # type: ignore[method-assign]
    machines = opened.page.locator(".machine")
    expect(machines.nth(0)).to_contain_text("computed 25 % of the last 10 s")
    expect(machines.nth(1)).to_contain_text("computed 100 % of the last 10 s")
    expect(opened.page.locator(".machine.slow b").first).to_have_text(slow.name)
    shares = re.findall(r"(\d+) %", opened.page.inner_text("#view-cluster"))
    assert all(int(share) <= 100 for share in shares)


def test_what_an_invitation_needs_is_said_before_the_click(
    opened: WatchedPage, client: ApiClient
) -> None:
    """Without an API key there is no button, but its reason and the commands to copy."""
    opened.expected += ("503",)  # the app of this test has no catalog of models
    page = opened.page
    opened.show("models")
    expect(page.locator("#view-models")).to_contain_text("need an API key with the scope admin")
    assert page.get_by_role("button", name="Create the join command").count() == 0
    expect(page.locator(".invitation code")).to_contain_text("mtp-coord token create")
    assert page.get_by_role("button", name="Download and use").count() == 0


def test_a_question_can_be_chosen_and_edited(opened: WatchedPage, client: ApiClient) -> None:
    """An example is sent by a click. An edited question replaces what followed it, and Escape changes nothing."""
    page = opened.page
    opened.show("chat")
    page.click(".examples button >> nth=1")
    page.wait_for_selector(".message.assistant:not(.streaming)")
    first = page.locator(".bubble").inner_text()
    opened.ask("And then?")
    page.get_by_role("button", name="Edit this message").first.click()
    page.fill(".editing textarea", "No")
    page.keyboard.press("Escape")
    assert page.locator(".bubble").all_inner_texts() == [first, "And then?"]
    page.get_by_role("button", name="Edit this message").first.click()
    page.fill(".editing textarea", "Better")
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text(["Better"])
    expect(page.locator(".message.assistant:not(.streaming)")).to_have_count(1)


def test_settings_are_a_narrow_panel_with_plain_names(opened: WatchedPage) -> None:
    """The panel is beside the chat, its fields are explained, and Escape closes it and returns the focus."""
    page = opened.page
    opened.show("chat")
    page.click(".settings")
    panel = page.locator(".parameters")
    box, thread = panel.bounding_box(), page.locator(".thread").bounding_box()
    assert box is not None
    assert thread is not None
    assert box["width"] <= WIDEST_PANEL
    assert box["x"] >= thread["x"] + thread["width"]
    assert panel.locator("label").count() == panel.locator("label .hint").count()
    assert "Most tokens" not in panel.inner_text()
    page.get_by_label("Longest answer").fill("9")
    page.keyboard.press("Escape")
    assert panel.is_hidden()
    assert page.evaluate("document.activeElement.textContent") == "Settings: longest answer 9"


def test_escape_stops_an_answer(opened: WatchedPage, client: ApiClient) -> None:
    """The field of the message stops the answer from the keyboard."""
    generator = client.generator
    generator.hang_after = 1
    page = opened.page
    opened.show("chat")
    page.fill("#chat-input", "Hi")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.streaming")
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.streaming", state="detached")
    expect(page.locator(".composer button[type=submit]")).to_have_text("Send")
