"""Images to rows: their patches, the vision tower in a thread of the coordinator, and the rows of recent images.

Pillow decodes an image, and transformers' own image processor cuts it into patches. The tower is read when the first
image comes. One image is computed at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import time
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import read_json_object
from mtp.vision.tower import VisionConfig, VisionTower, has_tower, load_tower
from proto.errors import CapacityError, CheckpointError, NotReadyError, RequestError
from proto.images import image_tokens
from worker.engine.engine_thread import EngineThread
from worker.engine.frame_engine import to_bytes

log = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

MAX_PIXELS = 64 * 2**20
"""Pixels. Decoded, a larger image would take more than 200 MB."""

_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Qwen3.5's preprocessor_config.json, for conversions that dropped the file."""

_FIELDS = frozenset(
    {
        "size", "image_mean", "image_std", "do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample",
        "min_pixels", "max_pixels",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Patches:
    """The patches of one image `[height x width, values]`, in the order of the tower."""

    values: np.ndarray[Any, Any]
    height: int
    width: int


class PatchReader:
    """The preparation of images for one checkpoint. Safe to call from several threads."""

    def __init__(self, checkpoint: Path, patch: int, temporal: int, merge: int) -> None:
        """Read preprocessor_config.json in the folder `checkpoint`. Raises CheckpointError for invalid values."""
        # Servers of text start without it: importing it takes more than a second.
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

        file = checkpoint / "preprocessor_config.json"
        stored = read_json_object(file) if file.is_file() else {}
        fields = _DEFAULTS | {name: value for name, value in stored.items() if name in _FIELDS}
        sizes: dict[str, Any] = {"patch_size": patch, "temporal_patch_size": temporal, "merge_size": merge}
        self.settings = json.dumps([fields, sizes], sort_keys=True).encode()
        """The settings on which the patches depend."""
        try:
            self._processor = pil.Qwen2VLImageProcessorPil(**fields, **sizes)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: not readable: {error!s:.200}. Download it again.") from error

    def read(self, data: bytes, name: str) -> Patches:
        """Return the patches of an image file. Raises RequestError, naming `name`, for one that is not readable."""
        image = _decoded(data, name)
        try:
            found = self._processor.preprocess([image], return_tensors="np")
        except Exception as error:
            raise RequestError(f"{name}: cannot be prepared: {error!s:.100}") from error
        _, height, width = (int(n) for n in found["image_grid_thw"][0])
        return Patches(found["pixel_values"], height, width)


def _decoded(data: bytes, name: str) -> Image.Image:
    """Return the upright first frame of an image file in RGB, on white where it is transparent."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            upright = ImageOps.exif_transpose(image)
            return _rgb(upright)
    except Image.DecompressionBombError as error:
        raise RequestError(f"{name}: more than {MAX_PIXELS} pixels. Send a smaller image.") from error
    except UnidentifiedImageError as error:
        raise RequestError(f"{name}: not an image. Send one of {', '.join(FORMATS)}.") from error
    except Exception as error:  # a damaged file raises errors of many kinds
        raise RequestError(f"{name}: damaged ({type(error).__name__}). Send it again.") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA"):
        layers = image.convert("RGBA")
        white = Image.new("RGBA", layers.size, "white")
        return Image.alpha_composite(white, layers).convert("RGB")
    return image.convert("RGB")


KEPT_BYTES = 512 * 2**20
"""Bytes. Bound of the rows of recent images, so that the next turn of a chat needs no tower."""

MOST_BYTES = 2**32
"""Bytes of rows in use from which on no image is computed. One of 16 million pixels has 170 MB in a 27B."""

ENCODE_SECONDS = 300.0
"""Seconds. Deadline of a request for one image. The image is computed on, for the next try."""

MOST_WAITING = 64
"""Images that wait for the tower or are in it, and requests that wait for one. A request waits for one at a time."""

RETRY_SECONDS = 10.0
"""Seconds after which a client may send images again."""

PLAIN_ROPE = ("default", "linear")
"""Types of RoPE whose angles `mtp.layers.rope` computes."""

NO_IMAGES = "this server reads text only: the checkpoint has no vision part, or --vision is off. Send text."


@dataclass(frozen=True, eq=False)
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
        """Prepare the tower of `checkpoint`, in the type `dtype` or as stored. Without one there are no images."""
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.towers_run = 0
        """Images that the tower has computed."""
        self._held: weakref.WeakValueDictionary[bytes, EncodedImage] = weakref.WeakValueDictionary()
        """The images that requests or `_kept` refer to."""
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._tasks: dict[bytes, asyncio.Task[EncodedImage]] = {}
        """The images that are computed or wait for it. A client that leaves, or a deadline, does not end them."""
        self._waiting = 0
        """The number of requests that wait for an image. Each holds its image in memory."""
        self._lock = asyncio.Lock()
        self.closed = False
        """True from `close` on, until the checkpoint is served again."""
        self._thread: EngineThread | None = None
        self._tower: VisionTower | None = None
        self._reader: PatchReader | None = None
        self._refusal = NO_IMAGES
        if checkpoint is not None and has_tower(checkpoint):
            try:
                self._reader = _reader_of(checkpoint)
            except CheckpointError as error:  # text is served all the same
                log.warning("images are refused", extra={"error": str(error)})
                self._refusal = f"this server reads text only: {_without_path(error, checkpoint)}"

    @property
    def reads_images(self) -> bool:
        """True if the checkpoint has a tower that is used."""
        return self._reader is not None

    def check(self, name: str) -> None:
        """Raise RequestError, about the field or the image `name`, unless images are read."""
        if self._reader is None:
            raise RequestError(f"{name}: {self._refusal}")

    async def encode(self, data: bytes, name: str) -> EncodedImage:
        """Return the rows of an image file. Raises RequestError, about the image `name`, for one that is not readable.

        Raises CapacityError if too many images wait or are in use, and NotReadyError after ENCODE_SECONDS.
        """
        self.check(name)
        reader = self._reader
        assert reader is not None
        # In a thread, because an image may have tens of megabytes.
        digest = (await asyncio.to_thread(hashlib.sha256, reader.settings + data)).digest()
        if (held := self._held.get(digest)) is not None:
            self._keep(digest, held)
            return held
        self._check_room()
        task = self._tasks.get(digest)
        if task is None:
            task = asyncio.create_task(self._run(reader, digest, data, name))
            self._tasks[digest] = task
            task.add_done_callback(partial(self._forget_task, digest))
        self._waiting += 1
        try:
            async with asyncio.timeout(ENCODE_SECONDS):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise NotReadyError(f"{name}: an image was not read in time.") from error
        except asyncio.CancelledError:
            if task.cancelled():
                raise NotReadyError(f"{name}: the server is ending.") from None
            raise
        finally:
            self._waiting -= 1

    def _check_room(self) -> None:
        in_use = sum(len(image.data) for image in self._held.values())
        if max(len(self._tasks), self._waiting) >= MOST_WAITING or in_use >= MOST_BYTES:
            raise CapacityError("too many images wait for the model.", retry_after=RETRY_SECONDS)
        if self.closed:
            raise NotReadyError("the server is ending.")

    def _forget_task(self, digest: bytes, task: asyncio.Task[EncodedImage]) -> None:
        del self._tasks[digest]
        if not task.cancelled():
            task.exception()  # its requests may have gone

    async def load(self) -> None:
        """Read the tower now, if there is one, and run it once."""
        if self._reader is not None:
            await self._own_thread().call(self._warm_up)

    async def close(self) -> None:
        """End the thread and free the memory. Images that wait end with NotReadyError."""
        self.closed = True
        for task in self._tasks.values():
            task.cancel()
        if self._thread is not None:
            await self._thread.close()
        self._thread = self._tower = None
        self._kept.clear()

    async def _run(self, reader: PatchReader, digest: bytes, data: bytes, name: str) -> EncodedImage:
        async with self._lock:
            patches = await asyncio.to_thread(reader.read, data, name)
            started = time.monotonic()
            encoded = await self._own_thread().call(partial(self._compute, patches, digest))
        seconds = round(time.monotonic() - started, 3)
        log.info("image read", extra={"tokens": len(encoded.tokens), "seconds": seconds})
        self._held[digest] = encoded
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
            try:
                self._tower = load_tower(self.checkpoint, chosen)
            except CheckpointError as error:
                public = _without_path(error, self.checkpoint)
                raise CheckpointError(str(error), public=public) from error
        return self._tower

    def _warm_up(self) -> None:
        """Compute an image of one token. MLX compiles CUDA kernels when they first run, which holds the streams up."""
        tower = self._loaded_tower()
        side = tower.config.spatial_merge_size
        tower.rows(np.zeros((side**2, tower.config.patch_values), np.float32), side, side)

    def _compute(self, patches: Patches, digest: bytes) -> EncodedImage:
        """Return the rows of an image. Runs on the thread."""
        tower = self._loaded_tower()
        rows = tower.rows(patches.values, patches.height, patches.width)
        self.towers_run += 1
        dtype, _, data = to_bytes(rows)
        merge = tower.config.spatial_merge_size
        tokens = image_tokens(digest, rows.shape[0])
        height, width = patches.height // merge, patches.width // merge
        # numpy copies without Python's lock.
        held = np.array(np.frombuffer(data, np.uint8)).data
        return EncodedImage(tokens, height, width, dtype, held)

    def _keep(self, digest: bytes, encoded: EncodedImage) -> None:
        self._kept[digest] = encoded
        self._kept.move_to_end(digest)
        while len(self._kept) > 1 and sum(len(e.data) for e in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)


def _without_path(error: CheckpointError, checkpoint: Checkpoint) -> str:
    """Return the text of an error for clients, to whom paths of the server are not disclosed."""
    return error.public.replace(f"{checkpoint.path}/", "")


def _reader_of(checkpoint: Checkpoint) -> PatchReader:
    """Return the reader of the checkpoint's images. Raises CheckpointError for a config that is not supported."""
    config = checkpoint.config
    assert config.vision is not None, "the checkpoint has a tower"
    source = checkpoint.path / "config.json"
    vision = VisionConfig.parse(source, config.vision, config.hidden_size)
    rope = config.text_config["rope_parameters"].get("rope_type", "default")
    if rope not in PLAIN_ROPE:
        raise CheckpointError(
            f"{source}: images with rope_type {rope!r:.40} are not supported. Use {' or '.join(PLAIN_ROPE)}.",
            public=f"images with RoPE of the type {rope!r:.40} are not supported",
        )
    sizes = vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size
    return PatchReader(checkpoint.path, *sizes)
