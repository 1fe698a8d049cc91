"""Images in the page's chat: by file, drop and paste, kept over a reload."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ViewportSize, expect

from tests.support.browser.chromium import WatchedPage
from tests.support.checkpoints.vision import file_of, picture, write_vision_checkpoint
from tests.support.processes.processes import Coordinator, serving

DESK = ViewportSize(width=1280, height=860)

GIVE = """([type, content]) => {
    const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "image.png", { type: "image/png" }));
    const target = document.querySelector("#chat-input");
    const event = type === "drop"
        ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
        : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    target.dispatchEvent(event);
}"""

FILL = """() => {
    const name = "mtp-conversations", stored = localStorage.getItem(name);
    const text = JSON.stringify(JSON.parse(stored), (key, value) => (key === "images" ? undefined : value));
    localStorage.removeItem(name);
    const used = Object.entries(localStorage).reduce((sum, [key, value]) => sum + key.length + value.length, 0);
    const room = name.length + text.length + 0.6 * (stored.length - text.length);
    localStorage.setItem("filler", "x".repeat(5 * 2 ** 20 - used - "filler".length - room));
}"""
"""Leaves room in the storage of the page for its conversations, but not for their images."""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Serve a model with a tower alone."""
    folder = tmp_path_factory.mktemp("images")
    model = write_vision_checkpoint(folder / "model")
    with serving(folder, model, (), "--max-images", "4") as found:
        yield found


def test_the_chat_takes_and_shows_images(browser: Browser, coordinator: Coordinator) -> None:
    """A file, a drop and a paste become images of the question, which the answer and a reload keep."""
    watched = WatchedPage.open(browser, coordinator.url, viewport=DESK)
    page = watched.page
    watched.show("chat")
    expect(page.get_by_role("button", name="Add image")).to_be_visible()
    files = [file_of(picture(300 + i, 200, seed=i)) for i in range(4)]
    buffer = {"name": "a.png", "mimeType": "image/png", "buffer": files[0]}
    page.set_input_files(".composer input[type=file]", buffer)  # type: ignore[arg-type]
    waiting = page.locator(".composer .attachments img")
    expect(waiting).to_have_count(1)
    for i, kind in enumerate(("drop", "paste"), 1):
        page.evaluate(GIVE, [kind, base64.b64encode(files[i]).decode()])
        expect(waiting).to_have_count(1 + i)
    page.get_by_role("button", name="Remove image 3").click()
    expect(waiting).to_have_count(2)
    text = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"}
    page.set_input_files(".composer input[type=file]", text)  # type: ignore[arg-type]
    expect(page.locator(".composer .hint").first).to_contain_text("no image")
    watched.ask("Hello world")
    assert "error" not in (page.locator(".answer-figures").last.inner_html())
    expect(page.locator(".message.user .attachments img")).to_have_count(2)
    expect(waiting).to_have_count(0)
    page.reload()
    watched.show("chat")
    expect(page.locator(".message.user .attachments img")).to_have_count(2)
    for kind in ("drop", "paste", "drop"):
        page.evaluate(GIVE, [kind, base64.b64encode(files[3]).decode()])
    expect(page.locator(".composer .hint").first).to_contain_text("4 images in a conversation")
    expect(waiting).to_have_count(2)
    page.evaluate(FILL)
    watched.ask("Hello again")
    page.reload()
    watched.show("chat")
    expect(page.locator(".message.user")).to_have_count(2)
    expect(page.locator(".message.user .attachments img")).to_have_count(0)
    errors = watched.errors
    watched.close()
    assert errors == []
