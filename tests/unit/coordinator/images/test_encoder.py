"""The images of a server: one computation for each, also when clients leave, and an end that ends all that wait."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path

import pytest

from coordinator.images import encoder as module
from coordinator.images.encoder import ImageEncoder
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.vision.tower import VisionTower
from proto.errors import CapacityError, NotReadyError, RequestError
from tests.support.checkpoints.vision import file_of, picture, write_vision_checkpoint

FILES = [file_of(picture(60, 40, seed=i)) for i in range(3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with a tower."""
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


async def test_a_client_that_leaves_loses_no_work(path: Path) -> None:
    """Two requests for one image share its computation, and it ends although both have gone."""
    encoder = ImageEncoder(Checkpoint.open(path))
    asked = [asyncio.create_task(encoder.encode(FILES[0], "m")) for _ in range(2)]
    await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert (await encoder.encode(FILES[0], "m")).tokens
    assert encoder.towers_run == 1
    await encoder.close()


async def test_the_end_of_a_server_ends_images_that_wait(path: Path) -> None:
    """They fail with a clear error, and so do later ones."""
    encoder = ImageEncoder(Checkpoint.open(path))
    asked = [asyncio.create_task(encoder.encode(data, "m")) for data in FILES]
    await asyncio.sleep(0)
    await encoder.close()
    found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    assert all(isinstance(one, NotReadyError) for one in found)
    with pytest.raises(NotReadyError, match="ending"):
        await encoder.encode(FILES[0], "m")


async def test_memory_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in use count, also those that are not kept; known ones are served on."""
    encoder = ImageEncoder(Checkpoint.open(path))
    first = await encoder.encode(FILES[0], "m")
    monkeypatch.setattr(module, "KEPT_BYTES", 1)
    second = await encoder.encode(FILES[1], "m")
    monkeypatch.setattr(module, "MOST_BYTES", len(first.data) + len(second.data))
    with pytest.raises(CapacityError, match="too many images"):
        await encoder.encode(FILES[2], "m")
    assert await encoder.encode(FILES[0], "m") is first
    del first, second
    await encoder.load()  # the thread refers to its newest result until it has other work
    gc.collect()
    await encoder.encode(FILES[2], "m")
    await encoder.close()


async def test_requests_that_wait_for_one_image_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them holds its own copy of the file, so they count although the tower computes one image."""
    monkeypatch.setattr(module, "MOST_WAITING", 4)
    encoder = ImageEncoder(Checkpoint.open(path))
    asked = [asyncio.create_task(encoder.encode(FILES[0], "m")) for _ in range(5)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(one, CapacityError) for one in found) == 1, "files are hashed in threads, in any order"
    assert encoder.towers_run == 1
    assert await encoder.encode(FILES[0], "m") is found[0]
    await encoder.close()


async def test_a_model_that_is_served_again_reads_images(path: Path) -> None:
    """After a failed change of models the former one is served by the same encoder."""
    encoder = ImageEncoder(Checkpoint.open(path))
    await encoder.encode(FILES[0], "m")
    for data in FILES[:2]:
        await encoder.close()
        encoder.closed = False
        await asyncio.wait_for(encoder.load(), 20)
        assert (await asyncio.wait_for(encoder.encode(data, "m"), 20)).tokens
    assert encoder.towers_run == 3
    await encoder.close()


async def test_the_tower_runs_at_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its CUDA kernels are compiled before the first stream."""
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(VisionTower, "rows", lambda _, _patches, *size: sizes.append(size))
    encoder = ImageEncoder(Checkpoint.open(path))
    await encoder.load()
    await encoder.close()
    assert sizes == [(2, 2)]


@pytest.mark.parametrize("part", ["rope", "tower"])
async def test_a_model_that_is_not_supported_serves_text(tmp_path: Path, part: str) -> None:
    """YaRN and a tower with deepstack refuse images, and the server starts."""
    path = write_vision_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    if part == "rope":
        config["text_config"]["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}
    else:
        config["vision_config"]["deepstack_visual_indexes"] = [1]
    (path / "config.json").write_text(json.dumps(config))
    encoder = ImageEncoder(Checkpoint.open(path))
    assert not encoder.reads_images
    with pytest.raises(RequestError, match="reads text only") as refused:
        await encoder.encode(FILES[0], "m")
    assert str(path) not in str(refused.value)
