"""Images in a prompt: the tokens that stand for their rows, and the positions of all tokens beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from proto.errors import ProtocolError
from proto.wire import check_ints

FIRST_IMAGE_TOKEN = 2**31
"""Token ids from here on stand for rows of images. No vocabulary has as many tokens."""

MAX_IMAGES = 64
"""Images of one prompt."""

_WORDS_PER_DIGEST = 8


class VisionMode(StrEnum):
    """The value of `--vision`: read the tower when the first image comes, at the start, or never."""

    auto = "auto"
    always = "always"
    off = "off"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image in a prompt: the tokens from `start` on, `columns` for each of its `rows` on the merged grid."""

    start: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_ints((self.start, self.rows, self.columns), ("start", "rows", "columns"))
        if not (self.rows and self.columns):
            raise ProtocolError(f"an image of {self.rows} x {self.columns} tokens")

    @property
    def end(self) -> int:
        """The first token after the image."""
        return self.start + self.rows * self.columns


def image_tokens(digest: bytes, count: int) -> tuple[int, ...]:
    """Return the `count` token ids that name the image with `digest`. Each id has 31 bits of a hash."""
    found: list[int] = []
    for block in range(-(-count // _WORDS_PER_DIGEST)):
        words = memoryview(hashlib.sha256(digest + block.to_bytes(4, "little")).digest()).cast("I")
        found += (FIRST_IMAGE_TOKEN | word for word in words)
    return tuple(found[:count])


def without_images(tokens: Sequence[int], instead: int) -> Sequence[int]:
    """Return `tokens` with `instead` in the place of every token of an image."""
    if max(tokens, default=0) < FIRST_IMAGE_TOKEN:
        return tokens
    return tuple(token if token < FIRST_IMAGE_TOKEN else instead for token in tokens)


def next_border(images: Iterable[ImageSpan], position: int) -> int | None:
    """Return the first place after `position` where an image begins or ends, or None."""
    ends = (place for image in images for place in (image.start, image.end))
    return min((place for place in ends if place > position), default=None)


def check_images(images: Sequence[ImageSpan], tokens: int) -> None:
    """Raise ProtocolError unless `images` follow each other within `tokens` tokens."""
    if len(images) > MAX_IMAGES:
        raise ProtocolError(f"{len(images)} images in a prompt, limit {MAX_IMAGES}")
    end = 0
    for image in images:
        if image.start < end or image.end > tokens:
            raise ProtocolError(f"image at {image.start} to {image.end} of a prompt of {tokens}")
        end = image.end


@dataclass(frozen=True)
class ImageLayout:
    """The positions of a prompt with images, as Qwen's M-RoPE counts them.

    Text advances all three axes by one. An image has one position in time, the rows and columns of its grid in height
    and width, and the text after it continues after the longer side. `sections` are the pairs of a head that rotate by
    time, height and width (transformers, `Qwen3_5TextRotaryEmbedding`).
    """

    images: tuple[ImageSpan, ...]
    sections: tuple[int, int, int]

    def shift(self, index: int) -> int:
        """Return the position of the text token `index` less its index. Images take fewer positions than tokens."""
        ended = (image for image in self.images if image.end <= index)
        return sum(max(i.rows, i.columns) - i.rows * i.columns for i in ended)

    def axes(self, start: int, width: int) -> list[tuple[int, int, int]] | None:
        """Return time, height and width of `width` tokens from `start` on, or None if all of them are text."""
        if not any(i.start < start + width and start < i.end for i in self.images):
            return None
        return [self._axes_of(index) for index in range(start, start + width)]

    def _axes_of(self, index: int) -> tuple[int, int, int]:
        for image in self.images:
            if image.start <= index < image.end:
                first = image.start + self.shift(image.start)
                row, column = divmod(index - image.start, image.columns)
                return first, first + row, first + column
        return (index + self.shift(index),) * 3
