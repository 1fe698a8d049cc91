"""Images in the messages of all dialects, and their place in the prompt."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, AliasPath, BeforeValidator, Discriminator, Field, Tag

from coordinator.images.encoder import EncodedImage
from coordinator.prompts.conversation import IMAGE_PLACE, Turn, newest_of_user, note_of
from coordinator.prompts.message_fields import AS_WORDS, HistoryObject, Many
from coordinator.prompts.request_settings import ChatRequest, render_chat
from coordinator.schedule.request import PromptImage
from coordinator.text.schemas import Json
from coordinator.text.tokenizer import ChatPrompt, ContextLengthError
from coordinator.web.context import Api
from coordinator.web.error_responses import refused_field
from proto.errors import RequestError
from proto.images import ImageSpan

IMAGE_WORD = "<|image_pad|>"

_NAME = re.compile(r"^\w+: image \d+: ")
"""The name of an image in an error. It may be that of another request, since requests share an image's computation."""

_AS_TEMPLATES_WRITE_IT = f"<|vision_start|>{IMAGE_WORD}<|vision_end|>"


class TextPart(HistoryObject):
    """Text of a message, of reasoning or of a tool's output."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class _Image(HistoryObject):
    """A part of a message that is an image."""

    url: str
    text: ClassVar[str] = IMAGE_PLACE


_IMAGE_URL = AliasChoices(AliasPath("image_url", "url"), "image_url", "url")


class ImageUrlPart(_Image):
    """An image in a message of OpenAI's chat."""

    type: Literal["image_url"]
    url: str = Field(validation_alias=_IMAGE_URL)


class InputImagePart(_Image):
    """An image in a message of OpenAI's Responses."""

    type: Literal["input_image"]
    url: str = Field(validation_alias=_IMAGE_URL, serialization_alias="image_url")


def data_url(content: str) -> str:
    """Return the URL of an image in Base64, which may be one already. Its type is read from its bytes."""
    is_url = content.startswith("data:") or "://" in content[:20]
    return content if is_url else f"data:;base64,{content}"


class ImageBlock(_Image):
    """An image in a message or in the result of a tool, of Anthropic or MCP."""

    type: Literal["image"]
    url: Annotated[str, AfterValidator(data_url)] = Field(
        validation_alias=AliasChoices(AliasPath("source", "data"), AliasPath("source", "url"), "data", "image", "url")
    )


_PARTS = {"image_url", "input_image", "image"}
_TEXTS = {"text", "input_text", "output_text", "reasoning_text", "summary_text"}


def _tag(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    if kind in _TEXTS:
        text = part.get("text") if isinstance(part, dict) else part.text
        return "text" if isinstance(text, str) else "other"
    return str(kind) if kind in _PARTS else "other"


ContentPart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ImageUrlPart, Tag("image_url")]
    | Annotated[InputImagePart, Tag("input_image")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[Json, Tag("other")],
    Discriminator(_tag),
]
"""A part of a message in any dialect. One that this server does not know is a line of text, or nothing."""


def listed(content: Any) -> Any:
    """Return a message's content as a list of parts, if it is one part, or has texts among its parts."""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]


Contents = Annotated[str | Many[ContentPart] | None, BeforeValidator(listed)]


ResultContents = Annotated[Contents, AS_WORDS]


def text_of(content: Any) -> str:
    """Return the text of a message's content, the places of images included."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(note_of(part) if isinstance(part, dict) else part.text for part in content)


def images_of(content: Any) -> tuple[str, ...]:
    """Return the URLs of the images in a message's content."""
    parts = () if isinstance(content, str) or content is None else content
    return tuple(part.url for part in parts if isinstance(part, _Image))


async def prompt_of(api: Api, chat: ChatRequest) -> tuple[ChatPrompt, tuple[PromptImage, ...]]:
    """Render the conversation, and put the tokens of its images in their places.

    A line replaces an image of an earlier message or of a tool that is not readable, and the oldest of too many.
    Raises RequestError, naming the field, for an unreadable image in the newest message of the user, or if the template
    rejects the messages.
    """
    param = chat.settings.client_name("prompt")
    turns, encoded = await _encoded_images(api, chat.turns, param, continued=chat.continue_final)
    chat = replace(chat, turns=turns)
    if not encoded:
        return await render_chat(api, chat), ()
    prompt = await render_chat(api, chat, {IMAGE_PLACE: _AS_TEMPLATES_WRITE_IT})
    return placed(prompt, encoded, api.tokenizer.control_id(IMAGE_WORD), param)


async def _encoded_images(
    api: Api, turns: Sequence[Turn], param: str, *, continued: bool
) -> tuple[list[Turn], list[EncodedImage]]:
    """Return the turns with lines in the places of the images that are left out, and the other images."""
    most, limit, found = api.options.max_images, api.model.context_length, [*turns]
    newest = newest_of_user([turn.role for turn in (turns[:-1] if continued else turns)])
    if newest >= 0 and (sent := len(turns[newest].images)) > most:
        raise refused_field(param, f"{sent} images, limit {most}. Send fewer, or raise --max-images.")
    encoded, number, tokens = list[EncodedImage](), 0, 0
    surplus = sum(len(turn.images) for turn in turns) - most
    for index, turn in enumerate(turns):
        text, *rest = turn.text.split(IMAGE_PLACE) if turn.images else [turn.text]
        for url, after in zip(turn.images, rest, strict=True):
            number += 1
            name, place = f"{param}: image {number}", IMAGE_PLACE
            try:
                if number <= surplus:
                    raise RequestError(f"{name}: only the newest {most} are read")
                api.images.check(name)
                encoded.append(await api.images.encode(await asyncio.to_thread(_decoded, url, name), name))
                tokens += len(encoded[-1].tokens)
            except RequestError as error:
                error.param = param
                if index == newest:
                    raise
                place = f"[image left out: {_NAME.sub('', str(error)).partition('. ')[0]}]"
            text += place + after
            if tokens >= limit:
                raise ContextLengthError(
                    f"{param}: the first {number} images have {tokens} tokens, and the model's context {limit}. Send "
                    "fewer or smaller ones.",
                    tokens,
                    limit,
                    param=param,
                )
        found[index] = replace(turn, text=text)
    return found, encoded


def placed(
    prompt: ChatPrompt, encoded: Sequence[EncodedImage], word: int | None, param: str
) -> tuple[ChatPrompt, tuple[PromptImage, ...]]:
    """Return `prompt` with the tokens of an image in the place of each token `word`, and the images."""
    places = [index for index, token in enumerate(prompt.tokens) if token == word]
    if len(places) != len(encoded):
        problem = f"the text contains {IMAGE_WORD}, which stands for an image. Remove it."
        if len(places) < len(encoded):
            problem = "the model's chat template leaves out images. Send them in messages of the user."
        raise refused_field(param, problem)
    tokens: list[int] = []
    images: list[PromptImage] = []
    turn, done = prompt.turn, 0
    for place, image in zip(places, encoded, strict=True):
        tokens += prompt.tokens[done:place]
        span = ImageSpan(len(tokens), image.rows, image.columns)
        images.append(PromptImage(span, image.dtype, image.data, image))
        tokens += image.tokens
        turn += len(image.tokens) - 1 if place < prompt.turn else 0
        done = place + 1
    tokens += prompt.tokens[done:]
    return replace(prompt, tokens=tuple(tokens), turn=turn), tuple(images)


def _decoded(url: str, name: str) -> bytes:
    """Return the bytes of an image. Raises RequestError for another URL than a data URL in Base64."""
    head, comma, content = url.partition(",")
    if not comma or not head.lower().startswith("data:") or not head.endswith(";base64"):
        raise RequestError(f"{name}: {url!r:.40} is no image in Base64. Send a data URL, data:image/png;base64,…")
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name}: its Base64 is invalid. Send it again.") from error
