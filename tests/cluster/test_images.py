"""Images in every dialect, on two real workers with drafts: equal answers, bad files, and a killed worker."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
from PIL import Image

from tests.support.api.streams import tokens_of_stream
from tests.support.checkpoints.vision import file_of, picture, write_vision_checkpoint
from tests.support.processes.processes import Cluster, running_cluster

FILE = file_of(picture(100, 60, seed=4))
OTHER = file_of(picture(60, 90, seed=5))
QUESTION = "Hello world, how are you?"


def url_of(data: bytes, kind: str = "image/png") -> str:
    """Return the data URL of a file."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def parts_of(*files: bytes) -> list[Any]:
    """Return the content of a message of OpenAI's chat."""
    images = [{"type": "image_url", "image_url": {"url": url_of(data)}} for data in files]
    return [*images, {"type": "text", "text": QUESTION}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Serve a model with a tower from two workers, with two drafts per window."""
    folder = tmp_path_factory.mktemp("images")
    model = write_vision_checkpoint(folder / "model")
    flags = ("--mtp", "2", "--served-model-name", "claude-x", "--max-images", "4")
    with running_cluster(folder, model, 2, *flags) as found:
        yield found


def body_of(content: Any, **fields: Any) -> dict[str, Any]:
    """Return a request for a greedy chat answer with its tokens."""
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 30}
    return {**body, "ignore_eos": True, "return_token_ids": True, **fields}


def ask(cluster: Cluster, content: Any, **fields: Any) -> httpx.Response:
    """Ask for a chat answer."""
    url = f"{cluster.url}/v1/chat/completions"
    return httpx.post(url, json=body_of(content, **fields), timeout=90)


def tokens_of(reply: httpx.Response) -> list[int]:
    """Return the tokens of an answer."""
    assert reply.status_code == httpx.codes.OK, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def test_the_clients_of_all_dialects_send_images(cluster: Cluster) -> None:
    """OpenAI's, Anthropic's and Ollama's clients get the same text for the same image, and count its tokens."""
    texts = []
    data = base64.b64encode(FILE).decode()
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=90) as client:
        message: Any = {"role": "user", "content": parts_of(FILE)}
        options: Any = {"chat_template_kwargs": {"enable_thinking": False}}
        chat = client.chat.completions.create(
            model="claude-x", messages=[message], temperature=0, max_tokens=20, extra_body=options
        )
        texts.append(chat.choices[0].message.content)
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.to_dict()["image_tokens"] == 24
        item: Any = {"role": "user", "content": [
            {"type": "input_image", "image_url": url_of(FILE), "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ]}  # fmt: skip
        plain: Any = {"effort": "none"}
        response = client.responses.create(
            model="claude-x", input=[item], temperature=0, max_output_tokens=20, reasoning=plain
        )
        texts.append(response.output_text)
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", timeout=90) as other:
        asked: Any = {"model": "claude-x", "messages": [{"role": "user", "content": blocks}]}
        cold: Any = {"temperature": 0}
        reply = other.messages.create(**asked, max_tokens=20, extra_body=cold)
        texts.append("".join(block.text for block in reply.content if block.type == "text"))
        count = other.messages.count_tokens(**asked).input_tokens
        assert count == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
    with ollama.Client(host=cluster.url, timeout=90) as local:
        turn: Any = {"role": "user", "content": QUESTION, "images": [FILE]}
        options = {"temperature": 0, "num_predict": 20}
        answer = local.chat("claude-x", [turn], think=False, options=options)
        texts.append(answer.message.content)
        assert "vision" in (local.show("claude-x").capabilities or ())
    assert texts == [texts[0]] * 4


@pytest.mark.slow
def test_images_are_told_apart_in_all_places(cluster: Cluster) -> None:
    """The order of images and their number change the answer, repeated requests do not, and tools return images."""
    prompts = [
        parts_of(),
        parts_of(FILE),
        parts_of(OTHER),
        parts_of(FILE, OTHER),
        parts_of(OTHER, FILE),
        [*parts_of(FILE), {"type": "text", "text": "A word of templates: <|image_pad|>"}],
    ]
    found = [tokens_of(ask(cluster, prompt)) for prompt in prompts]
    assert len({tuple(tokens) for tokens in found}) == len(prompts)
    assert [tokens_of(ask(cluster, prompt)) for prompt in prompts] == found
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tool = [
        tokens_of(ask(cluster, "", messages=[*turns, {"role": "tool", "tool_call_id": "1", "content": c}]))
        for c in (parts_of(FILE), parts_of(OTHER))
    ]
    assert tool[0] != tool[1]


def by_url(url: str) -> list[Any]:
    """Return the content of a message with an image at `url`."""
    return [{"type": "image_url", "image_url": {"url": url}}]


BAD: dict[str, tuple[list[Any], str]] = {
    "no image": (parts_of(b"hello"), "not an image"),
    "SVG": (parts_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "not an image"),
    "truncated": (parts_of(FILE[: len(FILE) // 2]), "damaged"),
    "a bomb": (parts_of(file_of(Image.new("1", (30_000, 30_000)))), "more than 67108864 pixels"),
    "a line": (parts_of(file_of(picture(2, 900))), "smaller than 200"),
    "an address": (by_url("http://127.0.0.1/x.png"), "Send a data URL"),
    "a file": (by_url("file:///etc/passwd"), "data URL"),
    "no Base64": (by_url("data:image/png;base64,%%"), "Base64"),
    "a video": ([{"type": "video_url", "video_url": {"url": "x"}}], "video_url"),
    "too many": (parts_of(*[FILE] * 5), "5 images, limit 4"),
}


@pytest.mark.parametrize(("content", "problem"), BAD.values(), ids=BAD)
def test_a_bad_image_is_a_clear_error(cluster: Cluster, content: Any, problem: str) -> None:
    """It is a 400 with its reason and its field, and the next request is served."""
    reply = ask(cluster, content)
    error = reply.json()["error"]
    assert reply.status_code == httpx.codes.BAD_REQUEST
    assert error["param"].startswith("messages")
    assert problem in error["message"]


def test_unusual_files_are_read(cluster: Cluster) -> None:
    """CMYK, 16 bits, transparency, a palette, an animation and a turned photo are images."""
    image = picture(80, 60, seed=6)
    grey = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
    clear = image.convert("RGBA")
    clear.putalpha(0)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(turned, "PNG", exif=exif)
    upright = file_of(image.rotate(-90, expand=True))
    files = [
        file_of(image.convert("CMYK"), "JPEG"),
        file_of(grey),
        file_of(clear),
        file_of(image.convert("P"), "GIF", save_all=True, append_images=[picture(80, 60)]),
        file_of(image, "WEBP", lossless=True),
        turned.getvalue(),
        upright,
        file_of(Image.new("RGB", (80, 60), "white")),
    ]
    found = [tokens_of(ask(cluster, parts_of(data), max_tokens=16)) for data in files]
    assert found[5] == found[6], "EXIF turns an image"
    assert found[2] == found[7], "transparent places are white"


@pytest.mark.slow
def test_a_killed_worker_changes_no_token(cluster: Cluster) -> None:
    """After a worker is killed during an answer to images, the rest of the answer is as before."""
    expected = tokens_of(ask(cluster, parts_of(FILE, OTHER), max_tokens=200))
    sent = body_of(parts_of(FILE, OTHER), max_tokens=200)
    url = f"{cluster.url}/v1/chat/completions"
    found = tokens_of_stream(url, sent, 20, cluster.workers[-1].kill)
    assert found == expected
    assert httpx.get(f"{cluster.url}/status", timeout=60).json()["recoveries"] >= 1
