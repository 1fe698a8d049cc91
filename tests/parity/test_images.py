"""Images: the tower and whole answers agree with transformers, and no cut, draft or failure changes a token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_model

from coordinator.images.encoder import EncodedImage, ImageEncoder, PatchReader
from coordinator.prompts.image_parts import IMAGE_WORD, placed
from coordinator.schedule.request import GenerationRequest
from coordinator.text.tokenizer import ChatPrompt, Tokenizer
from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.vision.tower import load_tower, tower_weights
from proto.errors import RequestError
from proto.images import without_images
from proto.params import SamplingParams
from tests.support.checkpoints.flash_next import reference_model, text_config, write_flash_next
from tests.support.checkpoints.vision import (
    VOCAB,
    file_of,
    picture,
    with_tower,
    write_vision_checkpoint,
)
from tests.support.stages.local_run import run

COUNT = 12
"""Tokens of an answer."""

Array = np.ndarray[Any, Any]

SIZES = [(40, 40), (100, 60), (16, 200), (300, 250)]
"""Width and height of the images."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with a tower."""
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


FILES = [file_of(picture(*size, seed=i)) for i, size in enumerate(SIZES)]


def encoded(path: Path, files: list[bytes]) -> list[EncodedImage]:
    """Return the rows of image files."""

    async def encode() -> list[EncodedImage]:
        encoder = ImageEncoder(Checkpoint.open(path), None)
        try:
            return [await encoder.encode(data, "messages") for data in files]
        finally:
            await encoder.close()

    return asyncio.run(encode())


def request_of(path: Path, images: list[EncodedImage], text: str = "Hello world") -> GenerationRequest:
    """Return a request with all images between words."""
    tokenizer = Tokenizer.load(path)
    tokens = tokenizer.encode(
        "".join(f"{text}<|vision_start|>{IMAGE_WORD}<|vision_end|>" for _ in images) + f"{text}, how are you?"
    )
    prompt = ChatPrompt(tokens, thinking=False, turn=0, continued=True)
    prompt, placed_images = placed(prompt, images, tokenizer.control_id(IMAGE_WORD), "messages")
    return GenerationRequest(prompt.tokens, COUNT, SamplingParams(temperature=0.0), images=placed_images)


def answers(
    path: Path, requests: list[GenerationRequest], stages: int = 1, mtp: str = "off", **options: Any
) -> list[list[int]]:
    """Return the tokens of the answers, all asked at once."""
    return [list(one.tokens) for one in run(path, requests, stages=stages, mtp=mtp, **options)]


def theirs(path: Path, files: list[bytes], prompt: Sequence[int], answer: list[int]) -> Array:
    """Return transformers' logits `[len(answer), vocab]` for the places of an answer."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    reader = PatchReader(path, 8, 2, 2)
    patches = [reader.read(data, "image") for data in files]
    word = model.config.image_token_id
    ids = torch.tensor([[*without_images(prompt, word), *answer]])
    with torch.no_grad():
        found = model(
            input_ids=ids,
            pixel_values=torch.tensor(np.concatenate([p.values for p in patches])),
            image_grid_thw=torch.tensor([[1, p.height, p.width] for p in patches]),
            mm_token_type_ids=(ids == word).int(),
        )
    return np.asarray(found.logits[0, len(prompt) - 1 : -1].numpy())


def test_answers_are_those_of_transformers(path: Path) -> None:
    """The tokens of an answer to text with images equal those of transformers, for any cut and any drafts."""
    files = FILES[1:]
    request = request_of(path, encoded(path, files))
    answer = answers(path, [request])[0]
    logits = theirs(path, files, request.prompt, answer)
    assert logits.argmax(-1).tolist() == answer
    shifted = logits - logits.max(-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    params = replace(request.params, logprobs=5)
    found = run(path, [replace(request, params=params)], stages=4)[0].logprobs
    for row, one in zip(expected, found, strict=True):
        for token, logprob in ((one.token, one.logprob), *one.top):
            assert abs(row[token] - logprob) <= 1e-4 * np.ptp(row)
    for stages, mtp in ((2, "2"), (4, "filled")):
        assert answers(path, [request], stages, mtp) == [answer]


@pytest.mark.slow
def test_flash_next_reads_images(tmp_path: Path) -> None:
    """Its answers to images are equal over stages and drafts, and a restart finds their prefixes."""
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    text = text_config(vocab_size=VOCAB, eos_token_id=VOCAB - 1)
    path = with_tower(write_flash_next(tmp_path / "model", reference_model(text), text))
    requests = [request_of(path, encoded(path, FILES[:n]), "Hello world " * 20) for n in (1, 2)]
    expected = answers(path, requests, prefix_cache=False)
    assert expected[0] != expected[1]
    disk: dict[str, Any] = {"state": tmp_path, "prefix_disk": 2**28}
    for stages, mtp in ((1, "2"), (4, "filled")):
        found = run(path, requests, stages=stages, mtp=mtp, **disk)
        assert [list(one.tokens) for one in found] == expected
    assert found[1].stats.cached_tokens > 0


@pytest.mark.parametrize("size", [(2, 2), (4, 6), (10, 8), (2, 20), (30, 34)], ids=str)
@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen4Exp"])
def test_the_tower_is_that_of_transformers(path: Path, size: tuple[int, int], name: str) -> None:
    """The rows of an image of any shape differ by rounding only."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    family = {"Qwen3_5": "qwen3_5", "Qwen4Exp": "qwen4_exp"}[name]
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    checkpoint = Checkpoint.open(path)
    assert checkpoint.config.vision is not None
    fields = {n: v for n, v in checkpoint.config.vision.items() if n != "model_type"}
    theirs = getattr(modeling, f"{name}VisionModel")
    theirs = theirs(getattr(modeling, f"{name}VisionConfig")(**fields)).eval()
    weights = {n: torch.tensor(np.array(w)) for n, w in tower_weights(checkpoint).items()}
    theirs.load_state_dict(weights)
    tower = load_tower(checkpoint, None)
    count = size[0] * size[1]
    values = tower.config.patch_values // tower.config.temporal_patch_size
    once = np.random.default_rng(1).normal(size=(count, tower.config.in_channels, 1, values // 3))
    times = np.repeat(once, tower.config.temporal_patch_size, axis=2)  # an image stands still
    patches = times.reshape(count, -1)
    with torch.no_grad():
        grid = torch.tensor([[1, *size]])
        expected = theirs(torch.tensor(patches, dtype=torch.float32), grid).pooler_output.numpy()
    found = np.array(tower.rows(patches.astype(np.float32), *size))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_later_turn_reads_no_image_again(path: Path) -> None:
    """The same images have the same rows and tokens without the tower, and another image shares no token."""

    async def encode() -> tuple[list[EncodedImage], int]:
        encoder = ImageEncoder(Checkpoint.open(path), None)
        found = [await encoder.encode(data, "m") for data in FILES[:2] * 2]
        await encoder.close()
        return found, encoder.towers_run

    (first, other, again, _), count = asyncio.run(encode())
    assert count == 2
    assert first is again
    assert not set(first.tokens) & set(other.tokens)


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(o, marks=pytest.mark.slow) for o in ({"kv_bits": 8}, {"exact": True}))],
    ids=str,
)
def test_prefixes_keep_images(path: Path, options: dict[str, Any]) -> None:
    """A prompt that begins with a known image gives the tokens of a cold one, beside another image and text."""
    images = encoded(path, [*FILES[1:3], file_of(picture(*SIZES[1], seed=99))])
    long = "The capital of France is Paris. " * 12
    first = request_of(path, images[:2], long)
    second = replace(first, prompt=(*first.prompt, *first.prompt[:40]))
    other = request_of(path, [images[2], images[1]], long)
    cold = [answers(path, [r], prefix_cache=False, **options)[0] for r in (first, second, other)]
    asked = (first, second, other, first)
    found = run(path, asked, stages=2, mtp="2", one_by_one=True, **options)
    assert [list(one.tokens) for one in found] == [*cold, cold[0]]
    known = [one.stats.cached_tokens for one in found]
    assert known[0] == 0
    assert known[2] < known[3]
    assert known[3] > 100


def test_a_conversion_keeps_the_tower(path: Path, tmp_path: Path) -> None:
    """A conversion in 4 bits reads images with the same rows, and one without the vision part refuses them."""
    four, text = tmp_path / "four", tmp_path / "text"
    convert(Checkpoint.open(path), four, Settings(Quantization.of(4, None)))
    convert(Checkpoint.open(path), text, Settings(vision=False))
    pairs = zip(encoded(four, FILES[:2]), encoded(path, FILES[:2]), strict=True)
    assert all(a.data == b.data and a.tokens == b.tokens for a, b in pairs)
    assert load_model(four)[0].layers, "mlx-lm leaves the vision part out"
    with pytest.raises(RequestError, match="no vision part"):
        encoded(text, FILES[:1])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_answers(path: Path) -> None:
    """20,000 tokens of answers to images and text, greedy and sampled, eight at once, for every cut and draft."""
    chance = random.Random(5)
    images = encoded(path, [file_of(picture(w, h, seed=w + h)) for w, h in SIZES * 2])
    requests = []
    for number in range(40):
        chosen = chance.sample(images, chance.randint(1, 3))
        text = chance.choice(["Hello world", "The capital of France is Paris. " * 9])
        params = SamplingParams(temperature=chance.choice([0.0, 0.8]), seed=number, top_p=0.9)
        requests.append(replace(request_of(path, chosen, text), params=params, max_tokens=42))
    expected = [answers(path, [request], prefix_cache=False)[0] for request in requests]
    compared = 0
    for stages, mtp in product((1, 2, 4), ("off", "2", "filled", "auto")):
        if (stages, mtp) == (1, "filled"):
            continue
        for first in range(0, len(requests), 8):
            some = slice(first, first + 8)
            assert answers(path, requests[some], stages, mtp) == expected[some]
            compared += sum(map(len, expected[some]))
    assert compared >= 18_000
