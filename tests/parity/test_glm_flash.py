"""GLM-5.3-Flash against transformers, its head, and its shares in a group."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from coordinator.planning.capacity import model_costs
from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.convert.convert import Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.checkpoint.hub.missing_head import add_head_from
from mtp.checkpoint.hub.repo import HubRepo
from mtp.glm_flash.layers import DeltaNet
from mtp.layers.layer import KVFormat
from proto.errors import SpanError, UsageError
from proto.span import Span
from tests.parity.test_own_families import answers, different
from tests.support.checkpoints.checkpoints import read_tensors
from tests.support.checkpoints.glm_flash import EOS, TEXT, reference_model, write_glm_flash
from tests.support.checkpoints.hub import Hub
from worker.model.loader import StageModules, load_stage

torch = pytest.importorskip("torch", reason="transformers needs torch")


@pytest.fixture(scope="module")
def reference() -> Any:
    """Return transformers' model."""
    return reference_model(TEXT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> Path:
    """Write the same model as a checkpoint with a head."""
    return write_glm_flash(tmp_path_factory.mktemp("glm-flash") / "model", reference, TEXT)


@pytest.fixture(scope="module")
def stage(model: Path) -> StageModules:
    """Load all layers, with the head."""
    return load_stage(Checkpoint.open(model), Span(0, 8), first=True, last=True, dtype=mx.float32)


TOKENS = [random.Random(1).randrange(EOS) for _ in range(300)]


def hidden_of(stage: StageModules, widths: Sequence[int]) -> mx.array:
    """Return the states after the final norm of TOKENS, which are read in segments of `widths`."""
    caches = [layer.new_cache(KVFormat()) for layer in stage.layers]
    outputs, start = [], 0
    for width in widths:
        x = mx.tile(stage.embed_tokens(mx.array(TOKENS[start : start + width])), (1, 4))
        for layer, cache in zip(stage.layers, caches, strict=True):
            x = layer.forward(x, [cache], [width], [False])
        outputs.append(stage.norm(x))
        start += width
    return mx.concatenate(outputs)


def far(found: Any, expected: Any) -> float:
    """Return the largest difference as a share of the range."""
    found, expected = np.array(found), np.array(expected)
    return float(np.abs(found - expected).max() / (expected.max() - expected.min()))


@pytest.mark.parametrize("widths", [(300,), (37, 1, 63, 2, 5, 1, 100, 91)])
def test_logits_are_those_of_transformers(stage: StageModules, reference: Any, widths: tuple[int, ...]) -> None:
    """300 tokens over the borders of blocks and beyond the budget of a query, in segments of all widths."""
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    found = np.array(stage.lm_head(hidden_of(stage, widths)))
    assert far(found, expected) <= 2e-5
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


def test_the_head_is_that_of_other_engines(stage: StageModules, reference: Any, model: Path) -> None:
    """A first draft for each token and a second one after it, against transformers' own attention and experts."""
    from transformers.models.glm5_next import modeling_glm5_next as theirs

    stored = {n: w for n, w in read_tensors(model).items() if ".layers.8." in n}
    own = {name.partition(".layers.8.")[2]: torch.tensor(np.array(weight)) for name, weight in stored.items()}
    config = reference.config.text_config
    config.layer_types, config.indexer_types = [*config.layer_types, "indexed_attention"], ["full"] * 9
    attention, experts = theirs.Glm5NextTextAttention(config, 8).eval(), theirs.Glm5NextTextMoE(config).eval()
    stacked = [
        torch.stack([torch.cat([own[f"mlp.experts.{e}.{n}_proj.weight"] for n in names]) for e in range(8)])
        for names in (("gate", "up"), ("down",))
    ]
    attention.load_state_dict({n.removeprefix("self_attn."): w for n, w in own.items() if n.startswith("self_attn.")})
    rest = {n.removeprefix("mlp."): w for n, w in own.items() if n.startswith("mlp.") and ".experts." not in n}
    experts.load_state_dict({**rest, "experts.gate_up_proj": stacked[0], "experts.down_proj": stacked[1]})

    def norm(x: Any, name: str) -> Any:
        return torch.nn.functional.rms_norm(x, (64,), own[f"{name}.weight"], 1e-5)

    def run(tokens: Sequence[int], hidden: Any) -> Any:
        embedded = torch.tensor(np.array(stage.embed_tokens(mx.array(list(tokens)))))[None]
        joined = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], dim=-1)
        x = joined @ own["eh_proj.weight"].T
        x = x + attention(norm(x, "input_layernorm"), attention_mask=torch.ones(x.shape[:2], dtype=torch.bool))[0]
        return norm(x + experts(norm(x, "post_attention_layernorm")), "shared_head.norm")

    assert stage.head is not None
    following, hidden = [*TOKENS[1:], 7], hidden_of(stage, (300,))
    cache = stage.head.block.new_cache(KVFormat())
    first = stage.head.advance(stage.embed_tokens(mx.array(following)), hidden, [cache], [300])
    second = stage.head.advance(stage.embed_tokens(mx.array([9])), first[-1:], [cache], [1])
    with torch.no_grad():
        rows = torch.tensor(np.array(hidden))[None]
        expected = run(following, rows)
        chained = run([*following, 9], torch.cat([rows, expected[:, -1:]], dim=1))
    assert far(first, expected[0].numpy()) <= 2e-5
    assert far(second, chained[0, -1:].numpy()) <= 2e-5


def test_a_lost_head_is_fetched_as_one_more_layer(
    model: Path, tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub sends the tensors of layer 8 alone. One that a file already has as a layer is not replaced beside it."""
    convert(
        Checkpoint.open(write_glm_flash(tmp_path / "bare", reference, TEXT, mtp=False)), tmp_path / "mlx", Settings()
    )
    with Hub() as hub, HubRepo("zai-org/GLM") as repo:
        hub.add("zai-org/GLM", model)
        hub.install(monkeypatch, tmp_path / "home")
        add_head_from(repo, Checkpoint.open(tmp_path / "mlx"), lambda done, total: None)
        assert hub.weights_sent < Checkpoint.open(model).part_bytes()["mtp"] * 1.1 + 100_000
    assert different(answers(tmp_path / "mlx", "2", 1, 64), answers(model, "off", 1, 512, one_by_one=True)) == 0
    with pytest.raises(UsageError, match="its MTP head is one of its layers"):
        plan_head_addition(Checkpoint.open(model), Checkpoint.open(model), replace=True)


def test_the_bytes_of_a_token_and_a_sequence_are_those_of_the_config(model: Path, stage: StageModules) -> None:
    """The plan counts what the caches hold."""
    costs = model_costs(Checkpoint.open(model), dtype="float32")
    caches = [layer.new_cache(KVFormat()) for layer in stage.layers]
    x = mx.tile(stage.embed_tokens(mx.array(TOKENS[:256])), (1, 4))
    for layer, cache in zip(stage.layers, caches, strict=True):
        x = layer.forward(x, [cache], [256], [False])
    # Keys of blocks are fp32 in any type, and count as two values of bfloat16.
    surplus = 256 // 4 * TEXT["index_head_dim"] * 4
    for cost, cache in zip(costs.layers, caches, strict=True):
        assert cache.nbytes == 256 * cost.kv_bytes + cost.state_bytes - (surplus if cost.kv_bytes else 0)
    assert isinstance(caches[0].mixer.net, DeltaNet)


def test_what_cannot_be_served_is_refused(model: Path, tmp_path: Path, reference: Any) -> None:
    """A group of five names what is wrong, and a head that was left out is missing."""
    with pytest.raises(SpanError, match="num_attention_heads is 4"):
        Checkpoint.open(model).cut_for(Cut(0, 5))
    bare = Checkpoint.open(write_glm_flash(tmp_path / "bare", reference, TEXT, mtp=False))
    assert bare.mtp.announced and not bare.mtp.present
