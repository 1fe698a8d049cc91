"""The pictures of docs/page.md: `python -m tests.browser.pictures` makes them from two real workers.

It needs Chromium and about a minute. Each picture has few colours, to keep the repository small.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from PIL import Image
from playwright.sync_api import Browser

from tests.support.browser.chromium import WatchedPage, running_browser
from tests.support.checkpoints.smollm2 import smollm2
from tests.support.checkpoints.vision import write_vision_checkpoint
from tests.support.processes.processes import running_cluster, serving

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
COLOURS = 200
"""Colours of a picture. Fewer would show steps in the shadows."""

QUESTIONS = (
    "Write a function that reads a JSON file and returns its keys.",
    "What does the function os.path.join do?",
)
ENGLISH_QUESTIONS = "What is the capital of France?", "Which river flows through it?"
STREAMS = 3
WARM_UP_MS = 30_000
"""Milliseconds under load before the first picture, so that the charts have a history."""


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep STREAMS requests running."""
    stop = threading.Event()

    def ask(seed: int) -> None:
        """Ask one question after another."""
        while not stop.is_set():
            body = {
                "messages": [{"role": "user", "content": QUESTIONS[seed % 2]}],
                "max_tokens": 200,
                "seed": seed,
            }
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            seed += STREAMS

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def take(browser: Browser, url: str, name: str, view: str, scheme: str, width: int) -> None:
    """Write one picture of `view`."""
    phone = width < 600
    watched = WatchedPage.open(
        browser,
        url,
        color_scheme=scheme,
        viewport={"width": width, "height": 844 if phone else 760},
        device_scale_factor=2,
    )
    page = watched.page
    page.wait_for_selector(".machine")
    if view == "chat":
        watched.show("chat")
        page.click(".settings")
        page.fill("input[name=temperature]", "0")
        page.fill("input[name=max_tokens]", "200")
        page.keyboard.press("Escape")
        for question in reversed(QUESTIONS):
            watched.ask(question)
        if phone:
            page.check("input[name=tint]")
    if view == "models":
        watched.show("models")
        page.wait_for_selector(".fitting .model-row")
    watched.show(view)
    page.wait_for_timeout(4000)
    save(watched, name)


def save(watched: WatchedPage, name: str) -> None:
    """Write what the page shows, and close it."""
    path = FOLDER / f"page-{name}.png"
    watched.page.screenshot(path=path)
    watched.close()
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size // 1000} kB")


def take_views(browser: Browser, folder: Path) -> None:
    """Write the pictures of a cluster under load, and of the models."""
    with running_cluster(folder, "builtin", 2) as cluster:
        with load(cluster.url):
            warm = WatchedPage.open(browser, cluster.url)
            warm.page.wait_for_timeout(WARM_UP_MS)
            take(browser, cluster.url, "cluster", "cluster", "light", 1180)
            take(browser, cluster.url, "inside", "inside", "dark", 1180)
            take(browser, cluster.url, "phone", "cluster", "light", 390)
        take(browser, cluster.url, "models", "models", "light", 1180)


def take_chats(browser: Browser, folder: Path) -> None:
    """Write the pictures of the chat. On a busy machine `--mtp auto` might choose no drafts to show."""
    with running_cluster(folder, "builtin", 2, "--mtp", "2") as cluster:
        take(browser, cluster.url, "chat", "chat", "light", 1180)
        take(browser, cluster.url, "phone-chat", "chat", "dark", 390)


def take_english(browser: Browser, folder: Path) -> None:
    """Write README's picture: two machines with a real model, which answers in English."""
    with running_cluster(folder, smollm2(), 2) as cluster:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)  # the first steps are slow
        size = {"width": 1180, "height": 600}
        watched = WatchedPage.open(browser, cluster.url, viewport=size, device_scale_factor=2)
        watched.show("chat")
        watched.page.click(".settings")
        watched.page.fill("input[name=temperature]", "0")
        watched.page.keyboard.press("Escape")
        for question in ENGLISH_QUESTIONS:
            watched.ask(question)
        watched.page.wait_for_timeout(2000)
        save(watched, "english")


def take_image_chat(browser: Browser, folder: Path) -> None:
    """Write the picture of a chat with an image. The model has random weights, so its answer is noise."""
    model = write_vision_checkpoint(folder / "model")
    size = {"width": 1180, "height": 620}
    with serving(folder, model, ()) as found:
        watched = WatchedPage.open(browser, found.url, viewport=size, device_scale_factor=2)
        watched.show("chat")
        watched.page.click(".settings")
        watched.page.fill("input[name=max_tokens]", "24")
        watched.page.keyboard.press("Escape")
        files = [FOLDER / "page-phone.png", FOLDER / "page-inside.png"]
        watched.page.set_input_files(".composer input[type=file]", files[:1])
        watched.ask("What does this page show?")
        watched.page.set_input_files(".composer input[type=file]", files[1:])
        watched.page.fill("#chat-input", "And this one?")
        watched.page.wait_for_timeout(1000)
        save(watched, "chat-image")


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with running_browser() as browser:
        for write in (take_views, take_chats, take_english, take_image_chat):
            with TemporaryDirectory() as folder:
                write(browser, Path(folder))


if __name__ == "__main__":
    main()
