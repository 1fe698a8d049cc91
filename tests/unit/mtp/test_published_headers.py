"""The headers that others publish: every tensor is used, or ignored by a rule with a name, and the commands read them.

No weight is real: the files are sparse. `tests/published` names the sources of each.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from mtp.checkpoint.convert.foreign import open_source
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.parts import check_types, missing_from_backbone
from mtp.flash_next.family import FlashNext
from mtp.flash_next.ngrams import check_derived
from proto.errors import CheckpointError
from tests.support.checkpoints.published_headers import PublishedHeaders, read_published

KINDS = read_published()
SERVED = [kind for kind, found in KINDS.items() if not found.is_packed]


def opened(found: PublishedHeaders, folder: Path) -> Checkpoint:
    """Return the checkpoint of `found`, packed or not."""
    path = found.write(folder)
    return open_source(path) if found.is_packed else Checkpoint.open(path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_has_its_place(kind: str, tmp_path: Path) -> None:
    """No tensor is unknown and none is missing, in the model and in its head."""
    found = KINDS[kind]
    checkpoint = opened(found, tmp_path)
    assert checkpoint.unknown == ()
    assert missing_from_backbone(checkpoint) == ()
    assert checkpoint.mtp.complete == found.has_head, checkpoint.mtp.missing[:3]


@pytest.mark.parametrize("kind", [k for k, found in KINDS.items() if found.tensor_count])
def test_the_files_have_as_many_tensors_as_published(kind: str) -> None:
    """The patterns with all layers give the published number."""
    found = KINDS[kind]
    layers = ModelConfig.parse(Path("config.json"), found.config).num_layers
    assert sum(1 for _ in found.names(layers)) == found.tensor_count


@pytest.mark.parametrize("kind", SERVED)
def test_a_stage_would_load_every_part(kind: str, tmp_path: Path) -> None:
    """The types of all parts are those that the engine reads."""
    checkpoint = opened(KINDS[kind], tmp_path)
    for part in checkpoint.plans:
        check_types(checkpoint, part)


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_read_the_headers(kind: str, tmp_path: Path) -> None:
    """`inspect` and `plan` describe it. A packed one is refused with the command that converts it."""
    found, runner = KINDS[kind], CliRunner()
    path = found.write(tmp_path)
    inspect = ["inspect", "--model", str(path), "--json"]
    plan = ["plan", "--model", str(path), "--nodes", "2", "--memory", "512GB", "--json"]
    if found.is_packed:
        for command in (inspect, plan):
            with pytest.raises(CheckpointError, match=r"Convert it once: mtp-coord convert"):
                runner.invoke(app, command, catch_exceptions=False)
        return
    shown = json.loads(runner.invoke(app, inspect, catch_exceptions=False).stdout)
    assert shown["mtp"]["complete"] == found.has_head and not shown["unknown_tensors"]
    planned = json.loads(runner.invoke(app, plan, catch_exceptions=False).stdout)
    assert len(planned["stages"]) == 2


def test_the_numbers_of_flash_nexts_hash_are_the_published_ones(tmp_path: Path) -> None:
    """They follow from config.json. A file with others is refused, and one with the same or without them is read."""
    path = KINDS["qwen3.8-flash-next-bf16"].write(tmp_path)
    checkpoint = Checkpoint.open(path)
    derived = {name.rpartition(".")[2]: name for name in checkpoint.ignored}
    assert set(derived) == {"layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"}
    text, family = checkpoint.config.text_config, checkpoint.config.family
    assert isinstance(family, FlashNext)
    base = "layers.1.ple.ple_embedding."
    multipliers = family.derived_values(text, f"{base}layer_multipliers")
    sizes = family.derived_values(text, f"{base}ngram_heads_vocab_sizes")
    assert multipliers == [23703573157769, 20109073645365, 8052911324071]
    assert sizes is not None and sizes[0] == 20_000_003
    assert sum(sizes) <= 320_001_536 < sum(sizes) + 128
    with pytest.raises(CheckpointError, match=r"hashed in another way"):
        check_derived(checkpoint, "layers.1")
    for leaf, name in derived.items():
        info = checkpoint.tensors[name]
        values = np.array(family.derived_values(text, base + leaf), np.int64)
        with info.file.open("r+b") as file:
            file.seek(info.start)
            file.write(values.tobytes())
    check_derived(Checkpoint.open(path), "layers.1")
