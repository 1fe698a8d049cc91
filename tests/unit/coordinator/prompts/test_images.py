"""Images of histories: one that cannot be read never locks a session, in any dialect."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.images.encoder import ImageEncoder
from coordinator.text.tokenizer import Tokenizer
from coordinator.web.context import ApiOptions
from mtp.checkpoint.format.checkpoint import Checkpoint
from tests.support.api.api_client import ApiClient
from tests.support.api.fake_generator import FakeGenerator
from tests.support.checkpoints.vision import file_of, picture, write_vision_checkpoint

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
PATHS = (CHAT, MESSAGES, RESPONSES, OLLAMA)
GOOD = base64.b64encode(file_of(picture(40, 40))).decode()
BAD = {
    "damaged Base64": ("%%", "Base64"),
    "cut off": (base64.b64encode(file_of(picture(90, 90))[:400]).decode(), "damaged"),
    "SVG": (base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(), "not an image"),
    "a line": (base64.b64encode(file_of(picture(1, 300))).decode(), "cannot be prepared"),
    "an address": ("https://example.org/a.png", "example.org"),
    "a file": ("file:///etc/hosts", "no image"),
    "empty": ("", "not an image"),
}


def part(path: str, data: str) -> Any:
    """Return an image in a dialect. `data` is Base64 or an address."""
    is_url = "://" in data
    url = data if is_url else f"data:image/png;base64,{data}"
    if path == MESSAGES:
        source = {"type": "url", "url": data} if is_url else {"type": "base64", "media_type": "image/png", "data": data}
        return {"type": "image", "source": source}
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url}
    return {"type": "image_url", "image_url": {"url": url}}


def user(path: str, *images: str, text: str = "Look") -> Any:
    """Return a message of the user with images before its text."""
    if path == OLLAMA:
        return {"role": "user", "content": text, "images": list(images)}
    kind = "input_text" if path == RESPONSES else "text"
    return {"role": "user", "content": [*(part(path, one) for one in images), {"type": kind, "text": text}]}


def tool(path: str, image: str) -> list[Any]:
    """Return a call of a tool and its result with an image."""
    content = [part(path, image), {"type": "input_text" if path == RESPONSES else "text", "text": "seen"}]
    if path == MESSAGES:
        call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": content}
        return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        return [call, {"type": "function_call_output", "call_id": "c", "output": content}]
    function = {"name": "look", "arguments": {} if path == OLLAMA else "{}"}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    if path == OLLAMA:
        return [asked, {"role": "tool", "content": "seen", "images": [image]}]
    return [asked, {"role": "tool", "tool_call_id": "c", "content": content}]


def body(path: str, turns: list[Any]) -> dict[str, Any]:
    """Return the body of a request."""
    fields: dict[str, Any] = {MESSAGES: {"max_tokens": 5}, OLLAMA: {"model": "tiny", "stream": False}}
    return {**fields.get(path, {}), "input" if path == RESPONSES else "messages": turns}


Serve = Callable[[bool], ApiClient]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture
async def serve(checkpoint: Path) -> AsyncIterator[Serve]:
    """Yield a function that serves a model with or without a tower, with at most four images."""
    encoders = []

    def start(tower: bool) -> ApiClient:
        encoders.append(ImageEncoder(Checkpoint.open(checkpoint) if tower else None))
        generator = FakeGenerator(Tokenizer.load(checkpoint), "Yes.")
        options = ApiOptions(max_images=4)
        return ApiClient(generator, images=encoders[-1], options=options, context_length=4000)

    yield start
    for encoder in encoders:
        await encoder.close()


def prompt_of(api: ApiClient) -> str:
    """Return the text of the last prompt, with `#` for each image."""
    request = api.generator.requests[-1]
    tokens, places = list(request.prompt), {image.span.start: image.span.end for image in request.images}
    for start, end in sorted(places.items(), reverse=True):
        tokens[start:end] = api.generator.tokenizer.encode("#")
    return b"".join(map(api.generator.tokenizer.token_bytes, tokens)).decode()


@pytest.mark.parametrize("path", PATHS)
async def test_an_image_that_is_not_readable_is_a_line_in_the_history(path: str, serve: Serve) -> None:
    """In an earlier message and in the result of a tool. In the newest message of the user it is a 400."""
    answer = {"role": "assistant", "content": "Yes."}
    for tower in (True, False):
        api = serve(tower)
        for data, reason in BAD.values() if tower else [(GOOD, "reads text only")]:
            turns = [user(path, data), answer, user(path)]
            histories = [
                turns,
                [user(path, data), user(path, text="And?")],  # the first was refused, and the client kept it
                [user(path), *tool(path, data)],
                [user(path, data), *tool(path, data), user(path)],
            ]
            for history in histories:
                reply = await api.post(path, body(path, history))
                assert reply.status_code == 200, (data[:30], reply.text)
                prompt = prompt_of(api)
                assert "[image left out: " in prompt
                assert reason in prompt
                assert "Look" in prompt
                assert "Send" not in prompt, "the model gets no advice for clients"
            for sent in ([user(path, data)], [*turns, user(path, data)]):
                refused = await api.post(path, body(path, sent))
                assert refused.status_code == 400, data[:30]
                assert reason in refused.text or data == "file:///etc/hosts"


@pytest.mark.parametrize("path", PATHS)
async def test_the_oldest_of_too_many_images_become_lines(path: str, serve: Serve) -> None:
    """As many as the server reads remain. More in one message are refused."""
    api = serve(True)
    answer = {"role": "assistant", "content": "Yes."}
    turns = [user(path, GOOD, GOOD, text="One"), answer, user(path, GOOD, text="Two"), *tool(path, GOOD)]
    reply = await api.post(path, body(path, [*turns, user(path, GOOD, text="Three")]))
    assert reply.status_code == 200, reply.text
    prompt = prompt_of(api)
    assert prompt.count("#") == 4
    assert prompt.count("[image left out: only the newest 4 are read]") == 1
    assert prompt.index("left out") < prompt.index("#") < prompt.index("One")
    refused = await api.post(path, body(path, [*turns, user(path, *[GOOD] * 5)]))
    assert (refused.status_code, "5 images, limit 4" in refused.text) == (400, True)


async def test_a_stored_conversation_goes_on_after_a_bad_image(serve: Serve) -> None:
    """The items of `previous_response_id` are earlier messages, and the prefix does not change."""
    api = serve(True)
    first = await api.post(RESPONSES, {"input": [user(RESPONSES, GOOD), user(RESPONSES, text="So?")]})
    prompt = prompt_of(api)
    api.app.state.api.images._reader = None
    again = await api.post(RESPONSES, {"input": "And?", "previous_response_id": first.json()["id"]})
    assert again.status_code == 200, again.text
    assert "[image left out: " in prompt_of(api)
    assert "[image left out: " not in prompt


async def test_images_are_read_in_the_forms_of_other_dialects(serve: Serve) -> None:
    """An address in an object or a text, and the images of MCP."""
    api = serve(True)
    url = f"data:image/png;base64,{GOOD}"
    forms: list[tuple[str, Any]] = [
        (RESPONSES, {"type": "input_image", "image_url": {"url": url, "detail": "auto"}}),
        (RESPONSES, {"type": "image_url", "image_url": url}),
        (CHAT, {"type": "image_url", "image_url": url}),
        (CHAT, {"type": "input_image", "image_url": url}),
        (CHAT, {"type": "image", "data": GOOD, "mimeType": "image/png"}),
        (MESSAGES, {"type": "image_url", "image_url": {"url": url}}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "data": url}}),
    ]
    for path, image in forms:
        reply = await api.post(path, body(path, [{"role": "user", "content": [image]}]))
        assert reply.status_code == 200, (image, reply.text)
        assert prompt_of(api).count("#") == 1
