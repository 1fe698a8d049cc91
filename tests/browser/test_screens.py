"""The screens as they are read and used: figures, charts, invitations and the chat. The app runs in this process."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from coordinator.planning.recommend import Recommendation
from coordinator.serve.client_settings import AGENTS
from coordinator.status.history import Sample
from coordinator.text.schemas import Json
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
    return [Sample(now - SECONDS + i, 80.0, accepted.get(i), 1, 0, 0.2, 4.0, None, None) for i in range(SECONDS)]


def chart_of(opened: WatchedPage, title: str) -> Locator:
    """Return the chart with this title."""
    return opened.page.locator(f".chart:has(.chart-title:text-is('{title}'))")


def test_charts_show_sparse_values_scales_and_the_value_at_the_pointer(browser: Browser, client: ApiClient) -> None:
    """Gaps are bridged, 100 % is inside the plot, scales are short, and pointer and keys read values."""
    client.app.state.live_feed.history.samples.extend(sparse_history())
    with serving(client.app) as url:
        opened = WatchedPage.open(browser, url, viewport={"width": 1280, "height": 860})
        page = opened.page
        opened.show("inside")
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


def test_the_figures_of_a_machine_are_those_of_the_coordinator(opened: WatchedPage, client: ApiClient) -> None:
    """The page computes no share of time itself."""
    status = client.status.status()
    busy = replace(status.nodes[0], stage_ms=5.0, busy=0.25)
    slow = replace(status.nodes[1], health="ready", stage_ms=9.0, busy=1.0)
    client.status.status = lambda: replace(status, nodes=(busy, slow))  # type: ignore[method-assign]
    machines = opened.page.locator(".machine")
    expect(machines.nth(0).locator(".stage-time b")).to_have_text("25 %")
    expect(machines.nth(1).locator(".stage-time b")).to_have_text("100 %")
    shares = re.findall(r"(\d+) %", opened.page.inner_text("#view-cluster"))
    assert all(int(share) <= 100 for share in shares)


def test_only_a_running_cluster_has_a_longest_step(opened: WatchedPage, client: ApiClient) -> None:
    """The machine that bounds the others is marked while something ran in the last ten seconds."""
    status = client.status.status()
    nodes = [replace(status.nodes[i], health="ready", stage_ms=5.0 + i, busy=0.0) for i in (0, 1)]
    client.status.status = lambda: replace(status, nodes=tuple(nodes))  # type: ignore[method-assign]
    machines = opened.page.locator(".machine")
    expect(machines.nth(1)).to_contain_text("6.00 ms")
    assert machines.get_by_text("longest step").count() == 0
    nodes[0] = replace(nodes[0], busy=0.1)
    expect(machines.nth(1)).to_contain_text("longest step")
    assert machines.get_by_text("longest step").count() == 1


def test_an_error_is_not_the_headline(opened: WatchedPage, client: ApiClient) -> None:
    """The headline is the present step. The problems of machines are below it, until the step has none."""
    status = client.status.status()
    cause = "mac-2: connection refused"
    waiting = replace(status, ready=False, detail=f"waiting for workers: 1 of 2; {cause}")
    client.status.status = lambda: waiting  # type: ignore[method-assign]
    headline, below = opened.page.locator("#now-text"), opened.page.locator("#now-cause")
    expect(headline).to_have_text("Waiting for workers: 1 of 2")
    expect(below).to_have_text(cause)
    client.status.status = lambda: replace(waiting, detail="loading")  # type: ignore[method-assign]
    expect(headline).to_have_text("Loading")
    expect(below).to_be_hidden()


def test_what_an_invitation_needs_is_said_before_the_click(opened: WatchedPage, client: ApiClient) -> None:
    """Without a way to join there is no button, but the reason and the command to copy."""
    opened.expected += ("503",)  # the app of this test has no catalog of models
    page = opened.page
    opened.show("models")
    expect(page.locator("#view-models")).to_contain_text("Machines cannot join")
    assert page.get_by_role("button", name="Create the join command").count() == 0
    expect(page.locator(".invitation code")).to_have_text("mtp-coord token create")
    assert page.get_by_role("button", name="Download and use").count() == 0


def answer_with(page: Page, path: str, *contents: Json) -> list[Any]:
    """Answer requests for `path` with `contents` in turn, the last one again and again. Return the bodies sent."""
    sent: list[Any] = []

    def answer(route: Route) -> None:
        """Answer one request."""
        sent.append(route.request.post_data_json)
        route.fulfill(json=contents[min(len(sent), len(contents)) - 1])

    page.route(f"**{path}", answer)
    return sent


COUNT_SHIFTS = """() => {
    window.shifts = 0;
    const count = (list) => { for (const entry of list.getEntries()) window.shifts += entry.value; };
    new PerformanceObserver(count).observe({ type: "layout-shift" });
}"""
"""A script that adds up how far elements move."""

FITTING = Recommendation(
    "qwen3.8:27b",
    "own/27B-4bit",
    4,
    15_400_000_000,
    20_000_000_000,
    262_144,
    15.9,
    27.9,
    2,
    "a group of 2",
    "--parallel 1x2",
    False,
    best=True,
)


def test_a_model_that_fits_is_downloaded_and_used(opened: WatchedPage, client: ApiClient) -> None:
    """Its row has the predicted speeds and the progress of its repo. Nothing moves while the view is filled.

    Other machines get other predictions. Without a model that fits there is no card.
    """
    page = opened.page
    answer_with(page, "/v1/cluster/models", {"served": "tiny", "models": [], "free_bytes": 30_000_000_000})
    large = replace(FITTING, name="large", download=40_000_000_000)
    found = {"models": [asdict(FITTING), asdict(large)], "measured": ["mac-1"]}
    asked = answer_with(page, "/v1/cluster/recommendations", found, {"models": [], "measured": []})
    page.evaluate(COUNT_SHIFTS)
    half = {"phase": "downloading", "model": FITTING.repo, "done": 1, "total": 2, "error": ""}
    sent = answer_with(page, "/v1/models/load", half, half, {**half, "phase": "ready"})
    opened.show("models")
    expect(page.locator(".fitting .model-row", has_text="large")).to_contain_text("the disk is too full")
    expect(page.locator("#view-models")).to_contain_text("30.0 GB free on its disk")
    expect(page.locator("#view-models")).to_contain_text("That of mac-1 follows from a measurement")
    assert page.evaluate("window.shifts") == 0
    row = page.locator(".fitting .model-row", has_text=FITTING.name)
    for text in (
        "recommended",
        "15.4 GB in memory, 20.0 GB to download",
        "262,144",
        "15.9 → 27.9 tokens/s",
        "2 machines",
        "head fetched",
    ):
        expect(row).to_contain_text(text)
    row.get_by_role("button").click()
    expect(row.locator("progress")).to_have_attribute("value", "0.5")
    expect(row).to_contain_text("It is in use now.")
    assert sent[0] == {"model": "own/27B-4bit"}
    opened.show("connect")
    opened.show("models")
    status = client.status.status()
    client.status.status = lambda: replace(status, nodes=status.nodes[:1])  # type: ignore[method-assign]
    opened.show("cluster")
    expect(page.locator(".others .other")).to_have_count(0)
    assert len(asked) == 1
    opened.show("models")
    expect(page.get_by_text("Fits your machines")).to_be_hidden()


def test_agents_start_by_one_command(opened: WatchedPage) -> None:
    """Each agent has its command with the address of the page, and its settings. Other clients follow."""
    page = opened.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.show("connect")
    expect(page.locator(".agents .card")).to_have_count(len(AGENTS))
    claude = page.get_by_role("article", name="Claude Code")
    origin = page.evaluate("location.origin")
    command = f"mtp-coord launch claude --url {origin}"
    expect(claude.locator("code").first).to_have_text(command)
    claude.get_by_role("button", name="Copy: command").click()
    assert page.evaluate("navigator.clipboard.readText()") == command
    claude.locator("summary").click()
    expect(claude.locator("details pre")).to_contain_text("export ANTHROPIC_AUTH_TOKEN=any")
    expect(page.get_by_role("article", name="Open WebUI")).to_contain_text(f"{origin}/v1")
    short = page.evaluate(
        """async () => {
            const { serverOptions } = await import("/assets/connect.js");
            return ["http://localhost:8080", "http://127.0.0.1:8080"].map((one) => serverOptions(one));
        }"""
    )
    assert short == ["", ""], "commands assume this address"


def test_agents_fold_on_a_phone(browser: Browser, client: ApiClient) -> None:
    """All agents are on one screen of a phone. A tap shows the command of one."""
    with serving(client.app) as url:
        opened = WatchedPage.open(browser, url, viewport={"width": 390, "height": 844})
        opened.show("connect")
        cards = opened.page.locator(".agents .card")
        expect(cards).to_have_count(len(AGENTS))
        box = cards.last.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 844
        claude = opened.page.get_by_role("article", name="Claude Code")
        expect(claude.get_by_role("button", name="Copy: command")).to_be_hidden()
        claude.get_by_text("Claude Code", exact=True).click()
        expect(claude.get_by_role("button", name="Copy: command")).to_be_visible()
        opened.close()
        assert opened.errors == []


def test_a_refused_page_has_the_settings_that_it_knows(opened: WatchedPage) -> None:
    """Without the answer of the coordinator the four blocks of the page remain."""
    opened.expected += ("403",)
    page = opened.page
    page.route("**/v1/cluster/connect", lambda route: route.fulfill(status=403))
    with page.expect_response("**/v1/cluster/connect"):
        opened.show("connect")
    expect(page.locator(".blocks .card")).to_have_count(4)
    expect(page.get_by_role("heading", name="Agents")).to_be_hidden()


@pytest.mark.parametrize("former", ["timeline", "speed"])
def test_former_links_lead_inside(opened: WatchedPage, former: str) -> None:
    """The timeline and the charts are one view, with the timeline first."""
    page = opened.page
    page.evaluate("(name) => { location.hash = name; }", former)
    expect(page.locator("#tab-inside")).to_have_attribute("aria-selected", "true")
    assert page.evaluate("location.hash") == "#inside"
    timeline, chart = page.locator("canvas.timeline"), page.locator(".chart").first
    boxes = timeline.bounding_box(), chart.bounding_box()
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] < boxes[1]["y"]


def test_a_running_answer_shows_its_speed(opened: WatchedPage, client: ApiClient) -> None:
    """Tokens a second since the first piece, until the final figures replace them."""
    generator = client.generator
    generator.text = "hm</think>Hello world, how are you?"
    generator.pause, generator.hang_after = 0.1, 5
    page = opened.page
    opened.show("chat")
    begin(page, "Hi")
    figures = page.locator(".message.assistant .answer-figures")
    expect(figures).to_have_text(re.compile(r"^\d+\.\d tokens/s$"))
    page.keyboard.press("Escape")
    expect(figures).to_have_text(re.compile("^first token.* tokens/s · seed .* · Stopped.$"))
    speeds = page.evaluate(
        """async () => {
            const { rateSoFar } = await import("/assets/completion.js");
            const running = { first: 1000, last: 3000, later: 10 };
            return [{ ...running, first: null, last: null }, { ...running, last: 1199 }, running].map(rateSoFar);
        }"""
    )
    assert speeds == [None, None, 5]


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


def begin(page: Page, question: str) -> None:
    """Ask `question`, and wait until its answer is on its way."""
    page.fill("#chat-input", question)
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.streaming")


def test_escape_stops_an_answer(opened: WatchedPage, client: ApiClient) -> None:
    """The field of the message stops the answer from the keyboard."""
    generator = client.generator
    generator.hang_after = 1
    page = opened.page
    opened.show("chat")
    begin(page, "Hi")
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.streaming", state="detached")
    expect(page.locator(".composer button[type=submit]")).to_have_text("Send")


def test_a_question_that_is_entered_during_an_answer_waits(opened: WatchedPage, client: ApiClient) -> None:
    """Enter does not stop the answer. The question is sent when the answer ends, unless the user edits it or leaves."""
    generator = client.generator
    generator.pause = 0.1
    page = opened.page
    bubbles, note = page.locator(".bubble"), page.locator(".composer [role=status]")
    opened.show("chat")
    begin(page, "One")
    begin(page, "Two")
    expect(note).to_contain_text("is sent when the answer ends")
    expect(bubbles).to_have_text(["One", "Two"])
    expect(page.locator(".message.assistant:not(.streaming)")).to_have_count(2)
    assert page.locator(".answer-figures").filter(has_text="Stopped").count() == 0
    assert page.input_value("#chat-input") == ""
    expect(note).to_have_text("")
    generator.hang_after = 1
    begin(page, "Three")
    begin(page, "Four")
    page.keyboard.type("!")
    expect(note).to_have_text("")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".composer button[type=submit]")).to_have_text("Send")
    expect(bubbles).to_have_text(["One", "Two", "Three"])
    assert page.input_value("#chat-input") == "Four!"
    page.keyboard.press("Enter")
    begin(page, "Five")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(bubbles).to_have_text(["One", "Two", "Three", "Four!", "Five"])
    begin(page, "Six")
    page.click("text=New chat")
    expect(bubbles).to_have_count(0)
    expect(page.locator(".composer button[type=submit]")).to_have_text("Send")
    assert page.input_value("#chat-input") == "Six"


def test_a_question_without_an_answer_can_be_asked_again(opened: WatchedPage, client: ApiClient) -> None:
    """An answer that is stopped before its first token, or loses its connection, says so and can be regenerated."""
    generator = client.generator
    page = opened.page
    opened.show("chat")
    expect(page.get_by_text("New chat", exact=True)).to_have_count(1)
    generator.hang_after = 0
    begin(page, "Hi")
    expect(page.get_by_role("button", name="Edit this message")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator(".message.assistant")).to_contain_text("Stopped.")
    opened.expected += ("ERR_",)  # the browser reports the connection
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="Regenerate").click()
    lost = "The connection to the coordinator was lost."
    expect(page.locator(".message.assistant")).to_contain_text(lost)
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".message.streaming")
    page.reload()
    expect(page.locator(".message.assistant")).to_have_text(re.compile("^AnswerReasoning.*" + CLOSED))


CLOSED = "The page was closed before the answer ended."


@pytest.mark.parametrize("leave", ["close", "reload", "hide"])
def test_a_page_that_is_closed_during_an_answer_keeps_what_has_come(
    opened: WatchedPage, client: ApiClient, leave: str
) -> None:
    """A page that is opened again shows the text so far, and says why it ends there."""
    client.generator.text = "hm</think>Hello world, how are you?"
    client.generator.hang_after = 4
    page = opened.page
    opened.show("chat")
    begin(page, "Hi")
    arrived = page.locator(".message.assistant .markdown").last
    expect(arrived).to_contain_text("Hello")
    text = arrived.inner_text()
    context = page.context
    if leave == "close":
        page.close()
    elif leave == "reload":
        page.reload()
    else:  # as a phone does before it ends the page
        page.evaluate("dispatchEvent(new Event('visibilitychange'))")
    again = context.new_page()
    again.goto(opened.page.url)
    again.click("#tab-chat")
    again.click(".conversations .title:has-text('Hi')")
    answer = again.locator(".message.assistant")
    expect(answer.locator(".markdown").last).to_have_text(text)
    expect(answer).to_contain_text(CLOSED)


def test_a_chat_that_is_opened_during_an_answer_can_be_continued(opened: WatchedPage, client: ApiClient) -> None:
    """The answer of the other chat ends, and the last answer of this one can be regenerated."""
    generator = client.generator
    page = opened.page
    opened.ask("First")
    page.click("button.wide:has-text('New chat')")
    generator.hang_after = 1
    begin(page, "Second")
    page.click(".conversations .title:has-text('First')")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def stored_titles(page: Page) -> list[str]:
    """Return the titles of the stored conversations, sorted."""
    found = page.evaluate("JSON.parse(localStorage.getItem('mtp-conversations') ?? '[]')")
    return sorted(one["title"] for one in found if "messages" in one)


def test_two_tabs_share_their_chats(opened: WatchedPage, client: ApiClient) -> None:
    """Chats of both tabs stay, the newest version of each counts, and a removed one does not come back."""
    one = opened.page
    opened.show("chat")
    two = one.context.new_page()
    two.goto(one.url)
    two.click("#tab-chat")
    ended = ".message.assistant:not(.streaming) .answer-foot button"

    def ask(page: Page, text: str, count: int = 1) -> None:
        page.fill("#chat-input", text)
        page.keyboard.press("Enter")
        expect(page.locator(ended + ":has-text('Copy')")).to_have_count(count)

    ask(one, "First")
    ask(two, "Second")
    assert stored_titles(one) == ["First", "Second"]
    titles = ".conversations .title"
    for page in (one, two):
        expect(page.locator(titles)).to_have_text(["Second", "First"])
    two.click(f"{titles}:has-text('First')")
    ask(two, "More of it", 2)  # the first tab shows this chat
    expect(one.locator(".message.user .bubble")).to_have_text(["First", "More of it"])
    two.click("[aria-label='Delete: First']")
    expect(one.locator(titles)).to_have_text(["Second"])
    one.click("button.wide:has-text('New chat')")
    ask(one, "Third")
    two.click("button.wide:has-text('New chat')")
    client.generator.hang_after = 1
    begin(two, "Fourth")
    one.click("[aria-label='Delete: Second']")
    expect(two.locator(f"{titles}:has-text('Second')")).to_have_count(0)  # a tab hears of a removal a moment later
    two.keyboard.press("Escape")
    two.reload()
    assert "First" not in stored_titles(two)
    assert "Second" not in stored_titles(two)


def test_chats_are_renamed_found_and_saved(opened: WatchedPage, client: ApiClient) -> None:
    """A new title is text, and it stays when another tab stores the answer that it was waiting for."""
    one = opened.page
    opened.ask("First")
    one.click("button.wide:has-text('New chat')")
    opened.ask("Second")
    two = one.context.new_page()
    two.goto(one.url)
    two.click("#tab-chat")
    titles, head = ".conversations .title", ".thread-head h3"
    client.generator.hang_after = 1
    begin(two, "More")
    one.get_by_role("button", name="Rename this chat").click()
    one.keyboard.type("<b>Trees</b>/..")
    one.keyboard.press("Enter")
    expect(two.locator(head)).to_have_text("<b>Trees</b>/..")
    two.keyboard.press("Escape")
    expect(two.locator(".answer-figures").last).to_contain_text("Stopped.")
    expect(one.locator(".bubble")).to_have_text(["Second", "More"])
    for page in (one, two):
        expect(page.locator(titles)).to_have_text(["<b>Trees</b>/..", "First"])
        expect(page.locator(head)).to_have_text("<b>Trees</b>/..")
    one.get_by_role("button", name="Rename this chat").click()
    one.keyboard.type("No")
    one.keyboard.press("Escape")
    expect(one.locator(head)).to_have_text("<b>Trees</b>/..")
    one.fill("[type=search]", "MORE")
    expect(one.locator(titles)).to_have_text(["<b>Trees</b>/.."])
    one.fill("[type=search]", "nowhere")
    expect(one.locator(".conversations")).to_have_text("No chat has this text.")
    saved = {}
    for name in ("this chat as Markdown", "this chat as JSON", "all chats as JSON"):
        with one.expect_download() as download:
            one.get_by_role("button", name=f"Save {name}").click()
        saved[download.value.suggested_filename] = Path(download.value.path()).read_text()
    assert saved.keys() == {"b-Trees-b.md", "b-Trees-b.json", "mtp-cluster-chats.json"}
    assert saved["b-Trees-b.md"].startswith(
        "# <b>Trees</b>/..\n\n## Question\n\nSecond\n\n## Answer\n\n> hm\n\nHello\n\n"
    )
    assert [message["role"] for message in json.loads(saved["b-Trees-b.json"])["messages"]] == ["user", "assistant"] * 2
    assert len(json.loads(saved["mtp-cluster-chats.json"])) == 2


def test_steps_that_overlap_count_once(opened: WatchedPage) -> None:
    """The share of time is the part of the lane that is drawn, as a machine begins a step before another ends."""
    share = opened.page.evaluate(
        """async () => {
            const { TimelineView } = await import("/assets/timeline.js");
            const frames = [[1, "d", 1, 0, 996, 9, 0, 1000], [2, "d", 1, 0, 996.5, 9, 0, 1000]];
            const live = { frames, now: () => 1000, status: { nodes: [{ name: "w", span: "0-7" }] } };
            const root = document.createElement("section");
            document.body.append(root);
            const view = new TimelineView(root, live);
            view.setVisible(true);
            view.redraw();
            const share = root.querySelector(".shares b").textContent;
            view.setVisible(false);
            root.remove();
            return share;
        }"""
    )
    assert share == "50 %"


def test_figures_agree_and_say_what_to_do(opened: WatchedPage, client: ApiClient) -> None:
    """The share of drafts is that of the table, an open request has its figures, and a lost machine says what to do."""
    status = client.status.status()
    lost = replace(status.nodes[2], health="lost", detail="connection refused")
    shown = replace(status, nodes=(*status.nodes[:2], lost))
    client.status.status = lambda: shown  # type: ignore[method-assign]
    generator = client.generator
    generator.hang_after = 1
    page = opened.page
    opened.show("chat")
    begin(page, "Hi")
    opened.show("cluster")
    drafts = page.locator(".figure:has-text('Drafts accepted')")
    expect(drafts).to_contain_text("67 %")
    expect(drafts).to_contain_text("120 of 180")
    row = page.locator(".requests tbody tr")
    expect(row).to_contain_text("browser")
    expect(row).to_have_text(re.compile(r"\d+ tokenswaited [\d.]+ m?s.*answering"))
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Stop").click()
    expect(row).to_contain_text("stopped")
    assert len(generator.cancelled) == 1
    expect(row.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.locator(".message.assistant")).to_contain_text("The request was stopped on the page of the server.")
    expect(page.locator(".other .why")).to_have_text("Lost: connection refused. Start mtp-worker on it again.")
    opened.show("inside")
    page.wait_for_selector("table th:has-text('Draft 1')")
    empty = chart_of(opened, "Drafts accepted")
    expect(empty.locator(".empty")).to_be_visible()
    assert empty.locator(".grid").count() == 0, "a line crosses the text"


def test_times_carry_into_the_next_unit(opened: WatchedPage) -> None:
    """No time has 60 seconds."""
    texts = opened.page.evaluate(
        """async () => {
            const { seconds } = await import("/assets/format.js");
            return [59.94, 59.96, 119.7, 3599.6].map(seconds);
        }"""
    )
    assert texts == ["59.9 s", "1 min 0 s", "2 min 0 s", "1 h 0 min"]
