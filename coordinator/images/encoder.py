"""Images to rows: the vision tower in a thread of the coordinator, and the rows of recent images.

The tower is read when the first image comes. One image is computed at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import mlx.core as mx

from coordinator.images.pixels import Patches, PatchReader
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.vision.tower import VisionConfig, VisionTower, has_tower, load_tower
from proto.errors import CapacityError, NotReadyError, RequestError
from proto.images import image_tokens
from worker.engine.engine_thread import EngineThread
from worker.engine.stage_engine import to_bytes

log = logging.getLogger(__name__)

KEPT_BYTES = 512 * 2**20
"""Bytes. Bound of the rows of recent images, so that the next turn of a chat needs no tower."""

MOST_BYTES = 2**32
"""Bytes. Bound of the rows of all images that requests hold. An image of 16 million pixels has 170 MB in a 27B."""

ENCODE_SECONDS = 300.0
"""Seconds. Deadline of one image with its place in the queue. 16 million pixels take minutes on a slow machine."""

MOST_WAITING = 64
"""Images that wait for the tower or are in it."""

RETRY_SECONDS = 10.0
"""Seconds after which a client may send images again."""

NO_IMAGES = "this model reads text only: its checkpoint has no vision part. Send text."


class VisionMode(StrEnum):
    """The value of `--vision`: read the tower when the first image comes, at the start, or never."""

    auto = "auto"
    always = "always"
    off = "off"


@dataclass(frozen=True)
class EncodedImage:
    """An image as its token ids, `rows` by `columns` of them, and their rows for the first stage as bytes."""

    tokens: tuple[int, ...]
    rows: int
    columns: int
    dtype: str
    data: memoryview


class ImageEncoder:
    """The images of one checkpoint. Its methods run on the event loop."""

    def __init__(self, checkpoint: Checkpoint | None = None, dtype: str | None = None) -> None:
        """Prepare the tower of `checkpoint`, in the type `dtype` or as stored. Without one there are no images.

        Raises CheckpointError for a config that is not supported.
        """
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.towers_run = 0
        """Images that the tower has computed."""
        self._held: weakref.WeakValueDictionary[bytes, memoryview] = weakref.WeakValueDictionary()
        """The rows that requests or `_kept` refer to."""
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._thread: EngineThread | None = None
        self._tower: VisionTower | None = None
        self._reader: PatchReader | None = None
        if checkpoint is not None and has_tower(checkpoint):
            fields = checkpoint.config.vision
            assert fields is not None
            source = checkpoint.path / "config.json"
            config = VisionConfig.parse(source, fields, checkpoint.config.hidden_size)
            sizes = config.patch_size, config.temporal_patch_size, config.spatial_merge_size
            self._reader = PatchReader(checkpoint.path, *sizes)

    @property
    def reads_images(self) -> bool:
        """True if the checkpoint has a tower."""
        return self._reader is not None

    async def encode(self, images: Sequence[bytes], param: str) -> list[EncodedImage]:
        """Return the rows of image files. Raises RequestError, with the field `param`, for one that is not readable.

        Raises CapacityError if too many images wait or are in use.
        """
        in_use = sum(len(data) for data in self._held.values())
        if self._waiting + len(images) > MOST_WAITING or in_use > MOST_BYTES:
            raise CapacityError("too many images wait for the model.", retry_after=RETRY_SECONDS)
        self._waiting += len(images)
        try:
            async with asyncio.timeout(ENCODE_SECONDS * max(1, len(images))):
                return [
                    await self._encode_one(data, f"{param}: image {number}")
                    for number, data in enumerate(images, 1)
                ]
        except TimeoutError as error:
            raise NotReadyError(f"{param}: the images were not read in time.") from error
        except RequestError as error:
            error.param = error.param or param
            raise
        finally:
            self._waiting -= len(images)

    async def load(self) -> None:
        """Read the tower now, if there is one."""
        if self._reader is not None:
            await self._own_thread().call(self._loaded_tower)

    async def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            await self._thread.close()

    async def _encode_one(self, data: bytes, name: str) -> EncodedImage:
        if self._reader is None:
            raise RequestError(f"{name}: {NO_IMAGES}")
        digest = hashlib.sha256(self._reader.settings + data).digest()
        if (kept := self._find(digest)) is not None:
            return kept
        async with self._lock:
            if (kept := self._find(digest)) is not None:
                return kept
            patches = await asyncio.to_thread(self._reader.read, data, name)
            started = time.monotonic()
            encoded = await self._own_thread().call(partial(self._compute, patches, digest))
            log.info(
                "image read",
                extra={
                    "tokens": len(encoded.tokens),
                    "seconds": round(time.monotonic() - started, 3),
                },
            )
        self._keep(digest, encoded)
        return encoded

    def _own_thread(self) -> EngineThread:
        if self._thread is None:
            self._thread = EngineThread()
        return self._thread

    def _loaded_tower(self) -> VisionTower:
        """Return the tower, which the first call reads. Runs on the thread."""
        if self._tower is None:
            assert self.checkpoint is not None, "there is a reader"
            chosen: mx.Dtype | None = getattr(mx, self.dtype) if self.dtype else None
            self._tower = load_tower(self.checkpoint, chosen)
        return self._tower

    def _compute(self, patches: Patches, digest: bytes) -> EncodedImage:
        """Return the rows of an image. Runs on the thread."""
        tower = self._loaded_tower()
        rows = tower.rows(patches.values, patches.height, patches.width)
        self.towers_run += 1
        dtype, _, data = to_bytes(rows)
        merge = tower.config.spatial_merge_size
        tokens = image_tokens(digest, rows.shape[0])
        height, width = patches.height // merge, patches.width // merge
        return EncodedImage(tokens, height, width, dtype, memoryview(bytes(data)))

    def _find(self, digest: bytes) -> EncodedImage | None:
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
        return found

    def _keep(self, digest: bytes, encoded: EncodedImage) -> None:
        self._kept[digest] = encoded
        self._held[digest] = encoded.data
        while len(self._kept) > 1 and sum(len(e.data) for e in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
