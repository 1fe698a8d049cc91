"""An image file as patches for the vision tower. Pillow decodes it, transformers' own image processor prepares it."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mtp.checkpoint.format.config import read_json_object
from proto.errors import CheckpointError, RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

MAX_PIXELS = 64 * 2**20
"""Pixels. Decoded, a larger image would take more than 200 MB."""

LONGEST_RATIO = 200
"""Bound of the sides' ratio in Qwen's image processor."""

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
        sizes: dict[str, Any] = {
            "patch_size": patch,
            "temporal_patch_size": temporal,
            "merge_size": merge,
        }
        self.settings = json.dumps([fields, sizes], sort_keys=True).encode()
        """The settings on which the patches depend."""
        try:
            self._processor = pil.Qwen2VLImageProcessorPil(**fields, **sizes)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: not readable: {error!s:.200}. Download it again."
            ) from error

    def read(self, data: bytes, name: str) -> Patches:
        """Return the patches of an image file. Raises RequestError, naming `name`, for one that is not readable."""
        image = _decoded(data, name)
        if max(image.size) > LONGEST_RATIO * min(image.size):
            raise RequestError(f"{name}: one side is more than {LONGEST_RATIO} times the other.")
        try:
            found = self._processor.preprocess([image], return_tensors="np")
        except Exception as error:
            raise RequestError(f"{name}: cannot be prepared ({type(error).__name__})") from error
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
        raise RequestError(
            f"{name}: more than {MAX_PIXELS} pixels. Send a smaller image."
        ) from error
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
