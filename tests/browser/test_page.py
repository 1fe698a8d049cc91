"""The page over two real workers of the built-in model: every view, a kill and a join while it is open."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect

from mtp.builtin import checkpoint_dir
from tests.support.browser.chromium import PATIENCE_MS, WatchedPage
from tests.support.processes.processes import (
    Cluster,
    as_worker,
    ending,
    launch_worker,
    running_cluster,
)
from tests.support.processes.reserved_port import reserved_port

COMPLETIONS = "**/v1/chat/completions"
VIEWS = ("cluster", "chat", "inside", "models", "connect")
AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
PHONE, DESK = ViewportSize(width=390, height=844), ViewportSize(width=1280, height=860)
FIRST_PAINT_MS = 1000
"""Milliseconds. Upper bound of the first paint on loopback, for the best of PAINTS attempts on a shared machine."""

PAINTS = 5

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["C", "F"]}},
            "required": ["unit"],
        },
    },
}
"""A tool whose calls are short."""

SEND_IS_INSIDE = """() => {
    const inner = document.querySelector(".composer button[type=submit]").getBoundingClientRect();
    return inner.right <= document.querySelector(".thread").getBoundingClientRect().right;
}"""

UNMARKED = """() => [...document.querySelectorAll("main *")].filter((one) => {
    const { overflowX, backgroundAttachment } = getComputedStyle(one);
    const scrolls = ["auto", "scroll"].includes(overflowX) && one.scrollWidth > one.clientWidth;
    return scrolls && !backgroundAttachment.includes("local");
}).map((one) => one.className || one.tagName)"""
"""The elements that scroll sideways without a shadow at the edge."""

NEWEST_KINDS = """async () => {
    const reader = (await fetch("/v1/events")).body.getReader();
    let text = "";
    while (!text.includes("\\n\\n")) text += new TextDecoder().decode((await reader.read()).value);
    await reader.cancel();
    return JSON.parse(text.split("\\n")[1].slice("data: ".length)).frames.map((frame) => frame[1]);
}"""
"""The kinds of the last frames in a new snapshot."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run two workers and a coordinator with the built-in model. A copy of it is listed beside it."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(checkpoint_dir(), folder / ".lmstudio/models/own/copy")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(folder))
            running = running_cluster(folder, "builtin", 2)
            cluster = stack.enter_context(running)
        yield cluster


@pytest.fixture(scope="module")
def opened(browser: Browser, cluster: Cluster) -> Iterator[WatchedPage]:
    """Open the page that stays open during all tests of this file. At the end its console has no error."""
    watched = WatchedPage.open(browser, cluster.url, viewport=DESK)
    yield watched
    errors = watched.errors
    watched.close()
    assert errors == []


@pytest.mark.smoke
def test_the_first_paint_takes_less_than_a_second(browser: Browser, cluster: Cluster) -> None:
    """The page shows something before the first data arrive."""
    best = float("inf")
    for _ in range(PAINTS):
        watched = WatchedPage.open(browser, cluster.url)
        watched.page.wait_for_selector(".figure")
        paints = watched.page.evaluate("performance.getEntriesByType('paint').map(e => e.startTime)")
        best = min(best, *paints)
        watched.close()
        if best < FIRST_PAINT_MS:
            break
    assert best < FIRST_PAINT_MS


@pytest.mark.smoke
def test_the_cluster_is_drawn_over_the_layers(opened: WatchedPage, cluster: Cluster) -> None:
    """Machines in pipeline order with their layers, GDN and attention told apart, and the head on the last."""
    page = opened.page
    page.wait_for_selector(".machine")
    expect(page.locator(".machine .wire").first).to_be_hidden()
    page.get_by_role("button", name="Details").click()
    names = page.locator(".machine b").first.inner_text(), page.locator(".machine").nth(1)
    assert names[0] in {worker.name for worker in cluster.workers}
    assert "to the coordinator" in names[1].inner_text()
    assert page.locator(".strip .layer").count() == 8 + 1
    assert page.locator(".strip .layer.g").count() == 6
    assert page.locator(".strip .layer.a").count() == 2
    assert page.locator(".strip .span:last-child .layer.head").count() == 1
    assert "weights" in page.locator(".mem-legend").first.inner_text()
    assert "2 stages" in page.locator("#view-cluster p.technical").first.inner_text()
    kind = "fused" if sys.platform == "linux" else "reference"
    assert kind in page.locator(".machine .facts").first.inner_text()
    for link in page.locator(".machine .wire").all_inner_texts():
        assert "a hop" in link
        assert "/s possible" in link


@pytest.mark.smoke
def test_an_answer_comes_with_its_figures(opened: WatchedPage) -> None:
    """Time to the first token, tokens a second, drafts kept and the seed; then the figures of the cluster."""
    opened.ask("Write a function that adds two numbers.")
    page = opened.page
    figures = page.locator(".answer-figures").last.inner_text()
    for part in ("first token", "tokens/s", "drafts kept", "seed"):
        assert part in figures
    assert page.locator(".message.assistant .markdown").last.inner_text()
    page.check("input[name=tint]")
    assert page.locator(".message.assistant .token.drafted").count() > 0
    assert page.locator(".message.assistant .token:not(.drafted)").count() > 0
    told = page.locator(".message.assistant .tokens").last.text_content()
    kept = page.evaluate("JSON.parse(localStorage['mtp-conversations'])[0].messages[1].content")
    assert told == kept
    page.uncheck("input[name=tint]")
    opened.show("cluster")
    expect(page.locator(".requests tbody tr").first).to_contain_text("done")
    expect(page.locator(".figure .value").first).not_to_have_text("0.0")


def test_a_fixed_seed_gives_the_same_answer_again(opened: WatchedPage) -> None:
    """Regenerating with a seed changes nothing, and parameters stay after a reload. A model of text takes no images."""
    page = opened.page
    opened.show("chat")
    expect(page.get_by_role("button", name="Add image")).to_be_hidden()
    page.click(".settings")
    page.fill("input[name=temperature]", "1.5")
    page.fill("input[name=seed]", "7")
    page.fill("input[name=max_tokens]", "40")
    opened.ask("Explain what a list is.")
    first = page.locator(".message.assistant").last.locator(".markdown").all_inner_texts()
    page.click("text=Regenerate")
    page.wait_for_selector(".message.streaming", state="attached")
    page.wait_for_selector(".message.streaming", state="detached")
    assert page.locator(".message.assistant").last.locator(".markdown").all_inner_texts() == first
    page.reload()
    page.wait_for_selector(".message.assistant")
    assert page.locator(".bubble").last.inner_text() == "Explain what a list is."
    assert page.locator(".settings").inner_text() == ("Settings: temperature 1.5, seed 7, longest answer 40")
    page.click(".settings")
    page.fill("input[name=temperature]", "")
    page.fill("input[name=seed]", "")
    page.click(".settings")


@contextmanager
def changed_requests(page: Page, **fields: Any) -> Iterator[None]:
    """Add `fields` to the requests of the chat."""

    def change(route: Route) -> None:
        """Add the fields to one request."""
        body = {**(route.request.post_data_json or {}), **fields}
        route.continue_(post_data=json.dumps(body))

    page.route(COMPLETIONS, change)
    try:
        yield
    finally:
        page.unroute(COMPLETIONS)


def test_a_tool_call_shows_its_name_and_arguments(opened: WatchedPage) -> None:
    """A call of a tool that the page offers is drawn with its arguments, not as text, and stays after a reload."""
    page = opened.page
    opened.show("chat")
    page.click("button.wide:has-text('New chat')")  # what was said before changes the answer
    page.click(".settings")
    page.fill("textarea[name=tools]", "[{")
    page.fill("#chat-input", "What is the weather in Paris?")
    page.keyboard.press("Enter")
    assert page.input_value("#chat-input"), "an invalid list of tools was sent"
    page.fill("textarea[name=tools]", json.dumps([TOOL]))
    page.fill("input[name=max_tokens]", "200")
    with changed_requests(page, tool_choice="required", parallel_tool_calls=False):
        opened.ask("What is the weather in Paris?")
    call = page.locator(".message.assistant").last.locator(".calls .code")
    assert call.locator(".code-head").inner_text() == "Tool call: weather"
    assert json.loads(call.locator("code").inner_text())["unit"] in ("C", "F")
    assert not page.locator(".message.assistant").last.locator("> .markdown").inner_text()
    page.reload()
    page.wait_for_selector(".message.assistant .calls .code-head")
    page.click(".settings")
    page.fill("textarea[name=tools]", "")
    page.fill("input[name=max_tokens]", "40")
    page.click(".settings")


HOSTILE = """<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>

[link](javascript:window.hurt=1) [good](https://example.org/a) **bold `code`** <b>no</b>

- one
  - two
1. three

| a | b |
| --- | --- |
| 1 | <i>2</i> |

```python
print("<script>")
```"""


def test_model_text_cannot_become_html(opened: WatchedPage) -> None:
    """Markup of the model is text. Links lead to web addresses only."""
    found: dict[str, Any] = opened.page.evaluate(
        """async (text) => {
            const { renderMarkdown } = await import("/assets/markdown.js");
            const root = document.createElement("div");
            document.body.append(root);
            for (let end = 1; end <= text.length; end += 7) renderMarkdown(root, text.slice(0, end));
            renderMarkdown(root, text);
            const tags = [...new Set([...root.querySelectorAll("*")].map((e) => e.tagName.toLowerCase()))];
            const links = [...root.querySelectorAll("a")].map((a) => a.href);
            const code = root.querySelector("pre code").textContent;
            const shown = root.textContent;
            root.remove();
            return { tags, links, code, shown, hurt: window.hurt ?? null };
        }""",
        HOSTILE,
    )
    assert found["hurt"] is None
    assert not {"script", "img", "b", "i"} & set(found["tags"])
    assert {"strong", "code", "ul", "ol", "table", "pre"} <= set(found["tags"])
    assert found["links"] == ["https://example.org/a"]
    assert found["code"] == 'print("<script>")'
    assert "<script>window.hurt=1</script>" in found["shown"]


def test_the_timeline_shows_pauses_and_exports_frames(opened: WatchedPage) -> None:
    """Frames of the last answer are there, as a trace that Perfetto reads too."""
    page = opened.page
    opened.ask("Write a loop over a dictionary.")
    opened.show("inside")
    page.focus("canvas.timeline")
    page.keyboard.press("Space")
    page.wait_for_selector("text=Resume")
    for _ in range(3):
        page.keyboard.press("-")
    label = page.locator("canvas.timeline").get_attribute("aria-label") or ""
    assert not label.startswith("Timeline: 0 steps")
    assert page.locator(".shares li").count() == 2
    with page.expect_download() as download:
        page.click("text=Export")
    trace = json.loads(Path(download.value.path()).read_text())
    blocks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in blocks} == {1, 2}
    assert {"prompt", "window"} & {event["name"] for event in blocks}
    assert all(event["dur"] > 0 and event["ts"] > 1e15 for event in blocks)
    page.click("text=Resume")
    assert page.evaluate(NEWEST_KINDS), "no frame has the times of the stages' clocks"


def test_speed_shows_acceptance_and_ten_minutes(opened: WatchedPage) -> None:
    """Acceptance by position, and charts with the last values."""
    opened.ask("What is a draft?")
    opened.show("inside")
    page = opened.page
    page.wait_for_selector("table th:has-text('Draft 1')")
    assert page.locator(".chart").count() == 5
    assert "median" in page.locator(".chart:has-text('Wait for the first token')").inner_text()


def test_models_are_listed_and_loaded(opened: WatchedPage) -> None:
    """The view has the models of this machine, refuses a path, and changes the model."""
    # The browser reports the refused name, and requests while the model changes.
    opened.expected += ("400", "503")
    opened.show("models")
    page = opened.page
    row = page.locator(".model-row:has-text('builtin')")
    expect(row).to_contain_text("in use")
    page.fill("input[name=repo]", "../etc")
    page.click("text=Download and use")
    expect(page.locator("#view-models")).to_contain_text("not found")
    other = page.locator(".model-row:has-text('own/copy')")
    other.get_by_role("button", name="Use: own/copy").click()
    expect(other).to_contain_text("in use", timeout=PATIENCE_MS)
    expect(page.locator("#model")).to_have_text("own/copy")
    page.wait_for_selector("#now:has-text('Ready')")


def test_the_chat_changes_the_model(opened: WatchedPage) -> None:
    """The picker lists the models of this machine. It asks before it changes the model, and No changes nothing."""
    page = opened.page
    opened.expected += ("503",)
    opened.show("chat")
    picker = page.locator("select[name=model]")
    expect(picker.locator("option")).to_have_count(2)
    page.once("dialog", lambda dialog: dialog.dismiss())
    picker.select_option("builtin")
    expect(picker).to_have_value("own/copy")
    page.once("dialog", lambda dialog: dialog.accept())
    picker.select_option("builtin")
    expect(page.locator("#model")).to_have_text("builtin", timeout=PATIENCE_MS)
    page.wait_for_selector("#now:has-text('Ready')")
    expect(picker).to_have_value("builtin")


def test_tabs_work_from_the_keyboard(opened: WatchedPage) -> None:
    """Arrows change the view, and only one tab is in the order of the Tab key."""
    page = opened.page
    opened.show("inside")
    page.focus("#tab-inside")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-models"
    assert page.locator("#view-models").is_visible()
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.id") == "tab-cluster"
    assert page.locator("[role=tab][tabindex='-1']").count() == len(VIEWS) - 1
    assert page.evaluate("location.hash") == "#cluster"


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_every_view_is_accessible(opened: WatchedPage, look: str) -> None:
    """axe finds no violation: contrast, names, roles, order. What is wider than a phone scrolls and shows it."""
    page = opened.page
    page.emulate_media(color_scheme="dark" if look == "dark" else "light")
    page.set_viewport_size(PHONE if look == "phone" else DESK)
    page.evaluate(AXE)
    for view in VIEWS:
        opened.show(view)
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        violations = [(one["id"], one["nodes"][:3]) for one in found["violations"]]
        assert violations == [], view
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        assert page.evaluate(UNMARKED) == [], view
        if view == "chat":
            assert page.evaluate(SEND_IS_INSIDE)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(DESK)


def events_of(page: Page) -> list[str]:
    """Return the texts of the events, the newest first."""
    return page.locator(".events li span:first-of-type").all_inner_texts()


@pytest.mark.slow
def test_a_kill_and_a_join_show_while_the_page_is_open(opened: WatchedPage, cluster: Cluster, tmp_path: Path) -> None:
    """The answer goes on after a kill, the recovery is an event, and a new worker is used."""
    page = opened.page
    opened.show("chat")
    page.click(".settings")
    page.fill("input[name=max_tokens]", "300")
    with changed_requests(page, ignore_eos=True):
        page.fill("#chat-input", "Write a class with three methods and explain each of them.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.streaming .markdown > *", state="attached")
    victim = cluster.workers[0]
    victim.kill()
    host, _, port = victim.address.rpartition(":")
    with ExitStack() as stack:
        stack.enter_context(reserved_port(host, int(port)))
        page.wait_for_selector(".message.streaming", state="detached")
        assert "tokens/s" in page.locator(".answer-figures").last.inner_text()
        opened.show("cluster")
        page.wait_for_selector("text=Recovered from the loss of")
        assert any("was lost" in text for text in events_of(page))
        assert page.locator(".machine").count() == 1
        assert page.locator(".other .dot[data-health=lost]").count() == 1
        arguments = ("--model", "builtin", "--listen", victim.address)
        process = launch_worker(tmp_path, "w9", *arguments)
        stack.enter_context(ending(process))
        as_worker(process)
        page.wait_for_selector(".other:has-text('w9')")
        expect(page.locator(".machine")).to_have_count(2, timeout=PATIENCE_MS)
        assert any("w9 joined" in text for text in events_of(page))
        page.wait_for_selector("#now:has-text('Ready')")


def test_a_stopped_coordinator_shows_and_ends_quickly(opened: WatchedPage, cluster: Cluster) -> None:
    """An open page does not delay the end of the coordinator, and reports the lost connection."""
    opened.expected += ("ERR_",)  # the browser itself reports the refused connections
    coordinator = psutil.Process(cluster.coordinator.popen.pid)
    for _ in range(60):  # its predictions for the page take seconds of a busy machine
        if coordinator.cpu_percent(0.5) < 30:
            break
    began = time.monotonic()
    cluster.coordinator.stop()
    assert time.monotonic() - began < 8
    opened.page.wait_for_selector("#now:has-text('does not answer')")
    opened.page.goto("about:blank")  # ends the attempts to connect again
