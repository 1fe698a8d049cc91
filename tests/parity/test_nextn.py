"""Heads of the NextN form: against transformers' layers, over stages and drafts, with a known accuracy."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.utils import load_model

from coordinator.drafts.controller import MtpMode
from coordinator.schedule.admission import Limits
from coordinator.schedule.request import GenerationRequest
from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.convert.foreign import open_source
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.missing_head import add_head_from
from mtp.checkpoint.hub.repo import HubRepo
from mtp.head.drafter import HeadState
from mtp.layers.layer import KVFormat, Member
from mtp.mlx_models.head import USUAL
from mtp.mlx_models.skeleton import make_model
from proto.errors import CheckpointError
from proto.params import SamplingParams
from proto.span import Span
from tests.bench.exactness import answers_together
from tests.support.checkpoints.foreign import save_tensors
from tests.support.checkpoints.hub import Hub
from tests.support.checkpoints.nextn import HEAD_NAMES, OWN_OUTPUT, WORDS, NextN, dialled
from tests.support.stages.local_run import Answered, run
from tests.support.stages.local_stages import local_stages
from worker.engine.state_codec import decode_state, encode_arrays, head_arrays, head_from
from worker.model.loader import StageModules, load_stage
from worker.model.verifier import Verifier

TOKENS = [random.Random(1).randrange(128) for _ in range(40)]


@cache
def small(model_type: str) -> NextN:
    """Return the tiny model of a type."""
    return NextN(model_type)


def written(path: Path, model: NextN) -> Path:
    """Write a model as its publisher does."""
    return model.write(path / "model", model.published())


def requests(count: int, lengths: Sequence[int], words: int = 128) -> list[GenerationRequest]:
    """Return a greedy and a sampled request of `count` tokens for each length of a prompt."""
    found = []
    for seed, length in enumerate(lengths):
        prompt = tuple((7 * i + seed) % words for i in range(length))
        found += [GenerationRequest(prompt, count, SamplingParams(temperature=t, seed=seed)) for t in (0.0, 0.6)]
    return found


def answers(path: Path, mtp: str, stages: int, asked: Sequence[GenerationRequest], **options: Any) -> list[Answered]:
    """Return the answers of `stages` stages."""
    return run(path, asked, mtp=mtp, stages=stages, dtype="float32", limits=LIMITS, **options)


LIMITS = Limits(context=512, prefill_chunk=64)


# ---- the head alone


REFERENCES = {
    "bailing_hybrid": ("deepseek_v3", "DeepseekV3"),
    "bailing_moe": ("glm4_moe", "Glm4Moe"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
    "glm4_moe": ("glm4_moe", "Glm4Moe"),
    "step3p5": ("step3p7", "Step3p7"),
}
"""The module of transformers with a layer of the same form, and the beginning of its classes."""

LING = {
    "attention.": "self_attn.",
    ".dense.": ".o_proj.",
    ".query_layernorm.": ".q_norm.",
    ".key_layernorm.": ".k_norm.",
    ".expert_bias": ".e_score_correction_bias",
    "final_layernorm.": "shared_head.norm.",
}
"""From the names of Ling to those of DeepSeek and GLM."""


def transformers_layer(model: NextN) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Return the published weights of the head, and transformers' own decoder layer with them, as a function."""
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    module, kind = REFERENCES[model.config["model_type"]]
    theirs: Any = import_module(f"transformers.models.{module}.modeling_{module}")
    fields = {name: value for name, value in model.config.items() if name != "model_type"}
    is_step = kind == "Step3p7"
    if is_step:
        # Its first layer is of the kind of the head, but for the bound of the MLP.
        bounds = fields["swiglu_limits_shared"]
        config = theirs.Step3p7TextConfig(**{**fields, "swiglu_limits_shared": [bounds[model.layers], *bounds[1:]]})
    else:
        if "qk_rope_head_dim" in fields:  # which is what transformers calls head_dim
            fields["head_dim"] = fields["qk_rope_head_dim"]
        elif model.config["model_type"] == "bailing_moe":
            fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
        if "num_experts" in fields:
            fields |= {"n_routed_experts": fields["num_experts"], "n_shared_experts": fields["num_shared_experts"]}
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        rope["partial_rotary_factor"] = fields.get("partial_rotary_factor", 1.0)
        config = getattr(theirs, f"{kind}Config")(**{**fields, "rope_parameters": rope})
    config._attn_implementation = "eager"
    layer = getattr(theirs, f"{kind}DecoderLayer")(config, 0 if is_step else model.layers).float().eval()
    tensors = {name: torch.tensor(np.array(weight)) for name, weight in model.published().items()}
    own = {n.removeprefix(model.prefix): w for n, w in tensors.items() if n.startswith(model.prefix)}
    for ling, usual in LING.items():
        own = {name.replace(ling, usual): weight for name, weight in own.items()}
    if (fused := own.get("self_attn.query_key_value.weight")) is not None:
        heads, keys, width = (fields[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        for projection, part in zip("qkv", fused.split([heads * width, keys * width, keys * width]), strict=True):
            own[f"self_attn.{projection}_proj.weight"] = part
    if not is_step:
        for name, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            count = fields["n_routed_experts"]
            each = [torch.cat([own[f"mlp.experts.{e}.{p}.weight"] for p in projections]) for e in range(count)]
            own[f"mlp.experts.{name}"] = torch.stack(each)
    missing = layer.load_state_dict(own, strict=False).missing_keys
    assert not missing, missing
    turns = getattr(theirs, f"{kind}RotaryEmbedding")(config)

    def computed(rows: Any) -> Any:
        length = rows.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        if is_step:
            mask += torch.full((length, length), float("-inf")).tril(-fields["sliding_window"])[None, None]
        places = torch.arange(length)[None]
        angles = turns(rows, places, *(["sliding_attention"] if is_step else []))
        found = layer(rows, attention_mask=mask, position_ids=places, position_embeddings=angles)
        return found[0] if isinstance(found, tuple) else found

    return own, computed


def loaded(path: Path, *, with_head: bool = True) -> StageModules:
    """Load all layers, with the head if it is complete."""
    whole = Span(0, 4)
    return load_stage(Checkpoint.open(path), whole, first=True, last=True, dtype=mx.float32, with_head=with_head)


@pytest.mark.parametrize("model_type", sorted(REFERENCES))
def test_a_head_is_that_of_other_engines(model_type: str, tmp_path: Path) -> None:
    """A first draft for each token and a second one after it, against transformers' layer with the published names."""
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    model = small(model_type)
    own, layer = transformers_layer(model)
    stage = loaded(written(tmp_path, model))
    assert stage.head is not None
    mx.random.seed(3)
    hidden, following = mx.random.normal((len(TOKENS), 64)), [*TOKENS[1:], 7]
    is_step = model_type == "step3p5"  # whose chain continues before the last norm
    words = torch.tensor(np.array(next(weight for name, weight in model.weights.items() if "embed" in name)))

    def norm(x: Any, name: str) -> Any:
        weight = own[f"{name}.weight"] + (1 if is_step else 0)
        return torch.nn.functional.rms_norm(x, (64,), weight, model.config["rms_norm_eps"])

    def reference(tokens: Sequence[int], rows: Any) -> Any:
        joined = torch.cat([norm(words[list(tokens)][None], "enorm"), norm(rows, "hnorm")], dim=-1)
        found = layer(joined @ own["eh_proj.weight"].T)
        return found if is_step else norm(found, "shared_head.norm")

    cache = stage.head.block.new_cache(KVFormat())
    first, start = [], 0
    for width in (17, 1, 22):
        tokens = stage.embed_tokens(mx.array(following[start : start + width]))
        first.append(stage.head.advance(tokens, hidden[start : start + width], [cache], [width]))
        start += width
    second = stage.head.advance(stage.embed_tokens(mx.array([9])), first[-1][-1:], [cache], [1])
    with torch.no_grad():
        given = torch.tensor(np.array(hidden))[None]
        expected = reference(following, given)
        chained = reference([*following, 9], torch.cat([given, expected[:, -1:]], dim=1))
    assert np.abs(np.array(mx.concatenate(first)) - expected[0].numpy()).max() <= 1e-4
    assert np.abs(np.array(second) - chained[0, -1:].numpy()).max() <= 1e-4
    if is_step:
        logits = norm(expected, "transformer.shared_head.norm") @ own["transformer.shared_head.output.weight"].T
        drafter = Verifier(stage, KVFormat()).drafter
        assert drafter is not None
        assert np.abs(np.array(drafter.unembed(mx.concatenate(first))) - logits[0].numpy()).max() <= 1e-4


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("mimo_v2_flash", "sliding_attention"),
        ("exaone_moe", "sliding_attention"),
        ("exaone_moe", "full_attention"),
        ("step3p5", "sliding_attention"),
    ],
)
def test_a_head_with_a_window_is_the_last_layer_of_a_longer_model(model_type: str, kind: str, tmp_path: Path) -> None:
    """A cache that keeps all tokens gives the same window as one of mlx-lm that drops them."""
    model = NextN(model_type, mtp_layer_types=[kind]) if model_type == "exaone_moe" else NextN(model_type)
    longer = model.longer_config()
    if model_type == "exaone_moe":
        longer["layer_types"][-1] = kind
    whole: Any = make_model(longer)
    beside = {*HEAD_NAMES, OWN_OUTPUT}
    own = {name: weight for name, weight in model.weights.items() if name.removeprefix(model.prefix) not in beside}
    whole.load_weights([*own.items()])
    layer, cache = whole.layers[model.layers], whole.make_cache()[model.layers]
    mx.random.seed(3)
    embedded, hidden = mx.random.normal((2, len(TOKENS), 64))
    stage = loaded(written(tmp_path, model))
    assert stage.head is not None
    is_window = kind == "sliding_attention"
    assert (type(cache) is RotatingKVCache) == is_window
    rows = mx.concatenate([stage.head.pre_fc_norm_embedding(embedded), stage.head.pre_fc_norm_hidden(hidden)], axis=-1)
    x, window = stage.head.fc(rows)[None], 8 if is_window else None
    expected = stage.head.norm(layer(x, create_attention_mask(x, cache, window_size=window), cache))[0]
    state, found = stage.head.block.new_cache(KVFormat()), []
    stage.head.connect(model.config, lambda tokens: embedded[tokens], mx.float32)
    for start, end in ((0, 17), (17, 21), (17, 18), (18, 40)):
        if start < state.offset:
            state.trim(state.offset - start)
        tokens = mx.arange(start, end)[:, None]
        rows = stage.head.advance(tokens, hidden[start:end], [state], [end - start])
        found.append(stage.head.output(rows) if model_type == "step3p5" else rows)
    del found[1]
    assert np.abs(np.array(mx.concatenate(found) - expected)).max() <= 1e-4


def test_the_logits_of_the_model_keep_their_bits(tmp_path: Path) -> None:
    """A stage with a head computes norm and lm_head apart."""
    path = written(tmp_path, small("glm4_moe"))
    with_head, without = (loaded(path, with_head=one) for one in (True, False))
    assert with_head.head is not None and without.head is None
    for rows in (1, 2, 7, 40):
        x = mx.random.normal((rows, 64))
        assert mx.array_equal(with_head.lm_head(with_head.norm(x)), without.lm_head(without.norm(x))).item()


@pytest.mark.parametrize("model_type", sorted(USUAL))
def test_a_state_of_a_head_survives_a_backup_and_a_copy(model_type: str, tmp_path: Path) -> None:
    """A copy, and a state from the bytes of a backup, go on as the state that they were made of."""
    stage = loaded(written(tmp_path, small(model_type)))
    head = stage.head
    assert head is not None
    block, mixed = head.block, mx.random.normal((30, 64))

    def step(state: HeadState, rows: slice) -> mx.array:
        embedded = stage.embed_tokens(mx.array(TOKENS[rows]))
        return head.advance(embedded, mixed[rows], [state.cache], [rows.stop - rows.start])

    state = HeadState(block.new_cache(KVFormat()))
    step(state, slice(0, 20))
    state.cache.trim(2)
    stored = decode_state([b"".join(encode_arrays(head_arrays(state)))], Member())
    others = [state.copy(), head_from(stored, HeadState(block.new_cache(KVFormat())), Member())]
    expected = step(state, slice(18, 24))
    for other in others:
        assert other.length == 18
        assert mx.array_equal(step(other, slice(18, 24)), expected).item()


# ---- whole answers


@pytest.mark.parametrize(("model_type", "mtp", "stages"), [
    ("deepseek_v3", "1", 1),
    ("glm4_moe", "3", 2),
    *(pytest.param(name, mtp, stages, marks=pytest.mark.slow)
      for name in sorted(USUAL) for mtp in ("1", "3", "auto") for stages in (1, 2, 4)),
])  # fmt: skip
@pytest.mark.parametrize("form", ["published", pytest.param("converted", marks=pytest.mark.thorough)])
def test_a_head_changes_no_answer(model_type: str, mtp: str, stages: int, form: str, tmp_path: Path) -> None:
    """Greedy tokens are those of mlx-lm, with a head whose drafts are seldom right."""
    model = small(model_type)
    path = model.write(tmp_path / "model", getattr(model, form)())
    asked = GenerationRequest(tuple(TOKENS), 30, SamplingParams(temperature=0.0, seed=0))
    (found,) = answers(path, mtp, stages, [asked])
    assert list(found.tokens) == model.greedy(TOKENS, 30)
    assert found.stats.drafted > 0 or mtp == "auto"


RIGHT = [random.Random(word).random() < 0.7 for word in range(WORDS)]


def expected_counts(first: int, count: int, depth: int) -> tuple[int, int]:
    """Return the accepted and the verified drafts of `count` tokens after `first`, by RIGHT alone."""
    word, left, accepted, drafted = first, count - 1, 0, 0
    while left > 0:
        width = min(depth, left - 1)
        good = next((i for i in range(width) if not RIGHT[(word + i) % WORDS]), width)
        accepted, drafted = accepted + good, drafted + width
        word, left = word + good + 1, left - good - 1
    return accepted, drafted


@pytest.mark.parametrize(("model_type", "depth"), [
    ("deepseek_v3", 1),
    ("step3p5", 3),
    *(pytest.param(name, depth, marks=pytest.mark.thorough)
      for name, depth in (("deepseek_v3", 3), ("glm4_moe", 3), ("bailing_moe", 3), ("bailing_hybrid", 3))),
])  # fmt: skip
def test_the_acceptance_is_that_of_the_head(model_type: str, depth: int, tmp_path: Path) -> None:
    """A head that is right after some words is right there, and nowhere else."""
    path = written(tmp_path, dialled(model_type, RIGHT))
    prompt = tuple(range(5, 25))
    asked = GenerationRequest(prompt, 150, SamplingParams(temperature=0.0, seed=0))
    (found,) = answers(path, str(depth), 2, [asked])
    assert list(found.tokens) == [(25 + i) % WORDS for i in range(150)]
    accepted, drafted = expected_counts(25, 150, depth)
    assert abs(found.stats.accepted - accepted) <= depth
    assert abs(found.stats.drafted - drafted) <= depth


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dialled model."""
    return written(tmp_path_factory.mktemp("counting"), dialled("deepseek_v3", RIGHT))


def test_a_failure_and_a_prefix_keep_the_state_of_the_head(counting: Path, tmp_path: Path) -> None:
    """Four requests together, while the pipeline fails, and again from prefixes on disk over another cut."""
    asked = requests(30, (70, 151), WORDS)
    plain = [found.tokens for found in answers(counting, "off", 1, asked, one_by_one=True)]

    async def killed() -> list[Answered]:
        mode = MtpMode.parse("3")
        async with local_stages(Checkpoint.open(counting), dtype="float32", limits=LIMITS, stages=2, mtp=mode) as loop:
            found = await answers_together(loop, asked, 4, kills=1)
            assert loop.recoveries == 1
            return found

    assert [found.tokens for found in asyncio.run(killed())] == plain
    for stages in (1, 2):
        found = answers(counting, "2", stages, asked, one_by_one=True, state=tmp_path, prefix_disk=2**28)
        assert [one.tokens for one in found] == plain
    assert sum(one.stats.cached_tokens for one in found) > 0
    drafted, accepted = (sum(getattr(one.stats, name) for one in found) for name in ("drafted", "accepted"))
    assert 0.5 < accepted / drafted < 0.9


def test_drafts_come_from_a_part_of_the_vocabulary(counting: Path) -> None:
    """The rows of lm_head that drafts read are those of the chosen tokens."""
    chosen = np.packbits(np.arange(128) < 64, bitorder="little").tobytes()
    whole = Span(0, 4)
    stage = load_stage(Checkpoint.open(counting), whole, first=True, last=True, dtype=mx.float32, draft_vocab=chosen)
    rows = mx.random.normal((2, 64))
    assert stage.draft_rows is not None
    assert mx.allclose(stage.draft_rows(rows)[:, :64], stage.lm_head(rows)[:, :64]).item()


# ---- conversions


ASKED = [GenerationRequest(tuple(range(5, 25)), 60, SamplingParams(temperature=0.0, seed=0))]


def is_right(path: Path) -> bool:
    """Return whether a model counts, with a head whose drafts are mostly right."""
    (found,) = answers(path, "2", 2, ASKED)
    share = found.stats.accepted / found.stats.drafted
    return list(found.tokens) == [(25 + i) % WORDS for i in range(60)] and 0.5 < share < 0.9


@pytest.mark.parametrize("bits", [4, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "model_type",
    [
        "glm4_moe",
        pytest.param("step3p5", marks=pytest.mark.thorough),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bailing_moe", "deepseek_v32")),
    ],
)
def test_a_conversion_keeps_a_head_and_finds_a_lost_one(
    model_type: str, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion has the head in a file that mlx-lm does not read. One without gets it from the publisher's layer."""
    settings = Settings(quantization=None if bits is None else Quantization(bits, 32))
    model = dialled(model_type, RIGHT)
    published = Checkpoint.open(written(tmp_path, model))
    assert convert(published, tmp_path / "kept", settings).has_head
    kept = Checkpoint.open(tmp_path / "kept")
    assert kept.unknown == kept.ignored == () and kept.mtp.complete
    assert {info.file.name for name, info in kept.tensors.items() if name.startswith("mtp.")} == {"mtp.safetensors"}
    load_model(tmp_path / "kept")
    assert is_right(tmp_path / "kept")
    convert(Checkpoint.open(model.write(tmp_path / "bare", model.trunk())), tmp_path / "mlx", settings)
    with Hub() as hub, HubRepo("zai-org/GLM") as repo:
        hub.add("zai-org/GLM", published.path)
        hub.install(monkeypatch, tmp_path / "home")
        add_head_from(repo, Checkpoint.open(tmp_path / "mlx"), lambda done, total: None)
        assert hub.weights_sent < published.part_bytes()["mtp"] * 1.1 + 100_000
    found, wanted = Checkpoint.open(tmp_path / "mlx").plans["mtp"].keys(), kept.plans["mtp"].keys()
    # The last layer of Step, whose bits the head gets, has no MLP of its form.
    assert found == wanted or (model_type == "step3p5" and found < wanted)
    assert is_right(tmp_path / "mlx")


def test_a_head_in_blocks_of_fp8_is_added(tmp_path: Path) -> None:
    """DeepSeek publishes its layers, and so its head, in FP8."""
    model = dialled("deepseek_v3", RIGHT)
    tensors: dict[str, tuple[str, mx.array]] = {}
    for name, weight in model.published().items():
        if weight.ndim == 2 and "_proj" in name and "eh_proj" not in name:
            scale = mx.maximum(mx.abs(weight).max(), 1e-9).reshape(1, 1) / 448
            tensors[name], tensors[f"{name}_scale_inv"] = ("F8_E4M3", mx.to_fp8(weight / scale)), ("F32", scale)
        else:
            tensors[name] = ("F32", weight)
    path = model.write(tmp_path / "fp8", {})
    save_tensors(path / "model.safetensors", tensors)
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps({**model.config, "quantization_config": fields}))
    convert(Checkpoint.open(model.write(tmp_path / "bare", model.trunk())), tmp_path / "mlx", Settings())
    source = open_source(path)
    plan_head_addition(Checkpoint.open(tmp_path / "mlx"), source).write(source)
    assert is_right(tmp_path / "mlx")


# ---- what does not fit


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    """The error names the tensor and both shapes, before a weight is read."""
    model = NextN("deepseek_v3")
    model.weights[f"{model.prefix}eh_proj.weight"] = mx.zeros((64, 96))
    path = written(tmp_path, model)
    bare = NextN("deepseek_v3", hidden_size=96)
    other = Checkpoint.open(bare.write(tmp_path / "other", bare.trunk()))
    with pytest.raises(CheckpointError, match=r"does not fit .* hidden_size is 64 there and 96 here"):
        plan_head_addition(other, Checkpoint.open(path))
    with pytest.raises(CheckpointError, match=r"eh_proj.weight gives mtp.fc.weight the shape \(64, 96\)"):
        loaded(path)


def test_a_missing_part_of_a_head_is_named(tmp_path: Path) -> None:
    """A model without its head, and one whose head lacks a tensor, are served without drafts."""
    model = small("glm4_moe")
    bare = Checkpoint.open(model.write(tmp_path / "bare", model.trunk()))
    assert bare.mtp.announced and not bare.mtp.present
    parts = model.published()
    del parts[f"{model.prefix}self_attn.o_proj.weight"], parts[f"{model.prefix}mlp.experts.1.up_proj.weight"]
    broken = Checkpoint.open(model.write(tmp_path / "broken", parts))
    assert broken.mtp.present and "mtp.layers.0.self_attn.o_proj.weight" in broken.mtp.missing
    assert loaded(broken.path).head is None
