"""GLM-5.3-Flash against transformers, and against itself over stages, drafts, prefixes and conversions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from coordinator.drafts.controller import MtpMode
from coordinator.planning.capacity import model_costs
from coordinator.schedule.admission import Limits
from mtp.checkpoint.convert.add_head import plan_head_addition
from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.checkpoint.format.parts import read_part
from mtp.checkpoint.hub.missing_head import add_head_from
from mtp.checkpoint.hub.repo import HubRepo
from mtp.glm_flash.layers import DeltaNet
from mtp.layers.kv_cache import PlainKV
from mtp.layers.layer import KVFormat
from mtp.layers.reference.gdn import GDNCache
from mtp.layers.sparse_attention import IndexedKV, LatentKV
from proto.errors import CheckpointError, SpanError, UsageError
from proto.span import Span
from tests.bench.exactness import answers_together
from tests.parity.test_flash_next import answers, different, requests
from tests.support.checkpoints.checkpoints import edit_config, read_tensors
from tests.support.checkpoints.glm_flash import EOS, TEXT, reference_model, write_glm_flash
from tests.support.checkpoints.hub import Hub
from tests.support.stages.group_run import Work, answer, answer_in_group
from tests.support.stages.local_run import Answered
from tests.support.stages.local_stages import local_stages
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


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answered]:
    """Return the answers of one stage without drafts, one after another."""
    return answers(model, "off", 1, 512, one_by_one=True)


@pytest.mark.parametrize(
    ("mtp", "stages", "chunk"),
    [
        ("3", 2, 33),
        pytest.param("filled", 4, 7, marks=pytest.mark.thorough),
        pytest.param("2", 1, 64, marks=pytest.mark.slow),
        pytest.param("auto", 4, 16, marks=pytest.mark.slow),
        pytest.param("off", 2, 32, marks=pytest.mark.slow),
        pytest.param("1", 4, 50, marks=pytest.mark.thorough),
    ],
)
def test_stages_and_drafts_change_nothing(
    model: Path, expected: list[Answered], mtp: str, stages: int, chunk: int
) -> None:
    """Tokens and log-probabilities have the same bits, and drafts are rejected."""
    found = answers(model, mtp, stages, chunk, one_by_one=mtp == "filled")
    assert different(found, expected) == 0
    if mtp not in ("off", "auto"):
        accepted, drafted = (sum(getattr(a.stats, n) for a in found) for n in ("accepted", "drafted"))
        assert 0 <= accepted < drafted


@pytest.fixture(scope="module")
def long_answers(model: Path) -> list[Answered]:
    """Return 30 answers of 140 tokens of one stage without drafts."""
    return answers(model, "off", 1, 512, LONG, one_by_one=True)


LONG = requests(140, [20 + 7 * i for i in range(15)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mtp", ["1", "3", "filled", "auto"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_fifty_thousand_tokens(model: Path, long_answers: list[Answered], stages: int, mtp: str) -> None:
    """Each of twelve runs of 4,200 tokens has those of one stage without drafts, while the pipeline fails twice."""
    limits = Limits(context=1024, prefill_chunk=40 + stages)
    options: dict[str, Any] = {"dtype": "float32", "limits": limits, "stages": stages, "mtp": MtpMode.parse(mtp)}

    async def main() -> list[Answered]:
        async with local_stages(Checkpoint.open(model), **options) as loop:
            found = await answers_together(loop, LONG, 1 if mtp == "filled" else 8, kills=2)
            assert loop.recoveries == 2
            return found

    found = asyncio.run(main())
    assert different(found, long_answers) == 0
    assert sum(len(a.tokens) for a in found) == 4200


def _commit_but_for(name: str) -> Callable[..., None]:
    """Return a commit that leaves a field of the state as it is."""

    def commit(self: GDNCache, whole: int, cut: int | None, trim: int) -> None:
        kept = getattr(self, name)
        COMMIT(self, whole, cut, trim)
        setattr(self, name, kept)

    return commit


COMMIT = GDNCache.apply_commit

FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "state of KDA": (GDNCache, "apply_commit", _commit_but_for("state")),
    "rows of the convolutions": (GDNCache, "apply_commit", _commit_but_for("conv")),
    "keys of blocks": (IndexedKV, "trim", PlainKV.trim),
    "latents": (LatentKV, "trim", lambda cache, count: count),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_commit_of_a_state_is_seen(
    model: Path, expected: list[Answered], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that keeps what was rejected changes an answer, or is out of order."""
    owner, name, replacement = FAULTS[fault]
    monkeypatch.setattr(owner, name, replacement)
    try:
        found = answers(model, "2", 1, 64)
    except AssertionError:  # the engine refuses rows that do not follow the end of a state
        return
    assert different(found, expected) > 0


@pytest.mark.thorough
def test_a_prefix_and_a_disk_change_nothing(
    model: Path, expected: list[Answered], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are asked again, in memory and after a restart over another cut, have the same answers."""
    monkeypatch.setattr("worker.engine.prefix_disk.CLOSE_SECONDS", 30.0)
    for stages in (1, 1, 2):
        options: dict[str, Any] = {"state": tmp_path, "prefix_disk": 2**28, "one_by_one": True}
        found = answers(model, "2", stages, 64, **options)
        assert different(found, expected) == 0
    assert sum(answer.stats.cached_tokens for answer in found) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_conversion_keeps_the_answers(model: Path, tmp_path: Path, bits: int | None) -> None:
    """A plain conversion has the answers of its source. A quantized one has the same over stages."""
    quantization = None if bits is None else Quantization(bits, 32)
    convert(Checkpoint.open(model), tmp_path / "mlx", Settings(quantization=quantization))
    converted = Checkpoint.open(tmp_path / "mlx")
    assert converted.unknown == ()
    assert converted.mtp.complete
    alone = answers(model if bits is None else tmp_path / "mlx", "off", 1, 512, one_by_one=True)
    assert different(answers(tmp_path / "mlx", "2", 2, 64), alone) == 0


def test_a_lost_head_is_fetched_as_one_more_layer(
    model: Path, expected: list[Answered], tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
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
    assert different(answers(tmp_path / "mlx", "2", 1, 64), expected) == 0
    with pytest.raises(UsageError, match="its MTP head is one of its layers"):
        plan_head_addition(Checkpoint.open(model), Checkpoint.open(model), replace=True)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_group_gives_the_tokens_of_one_process(model: Path, size: int) -> None:
    """Members share heads and columns, and each holds all latents: with drafts, rejections and chunked prompts."""
    prompts = tuple(tuple(random.Random(seed).choices(range(EOS), k=90)) for seed in range(2))
    work = Work(str(model), prompts, count=10, temperature=0.8)
    expected, found = answer(work), answer_in_group(work, size)
    assert found.tokens == expected.tokens
    assert found.accepted == expected.accepted


def test_a_member_holds_its_share(model: Path) -> None:
    """The files' bytes of a member are those that it reads, about half of the large matrices."""
    whole, share = Checkpoint.open(model), Checkpoint.open(model).cut_for(Cut(1, 2))
    sizes = share.part_bytes()
    read = sum(w.nbytes for part in share.plans for w in read_part(share, part, None, shares=True).values())
    assert read == sum(sizes.values())
    assert 0.5 <= sizes["mtp"] / whole.part_bytes()["mtp"] < 0.8


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
    """--kv-bits, --exact, groups and odd configs name what is wrong, and a head that was left out is missing."""
    with pytest.raises(UsageError, match=r"--kv-bits is not supported for GLM-5\.3-Flash"):
        answers(model, "off", 1, 64, kv_bits=8)
    with pytest.raises(UsageError, match="--exact is not supported"):
        answers(model, "off", 1, 64, exact=True)
    with pytest.raises(SpanError, match="num_attention_heads is 4"):
        Checkpoint.open(model).cut_for(Cut(0, 5))
    delta = TEXT["linear_attn_config"]
    for field, value in {
        "indexer_types": ["full"] * 7 + ["shared"],
        "gate_lower_bound": delta | {"gate_lower_bound": 0},
        "num_heads": delta | {"num_heads": 0},
        "index_topk": 63,
        "qk_rope_head_dim": 64,
        "scoring_func": "softmax",
        "hc_mult": None,
        "n_group": 4,
        "swiglu_limit": 0,
        "layer_types": ["linear_attention"] * 8,
    }.items():
        path = write_glm_flash(tmp_path / field, reference, TEXT)
        name = field if field in TEXT or not isinstance(value, dict) else "linear_attn_config"
        edit_config(path, partial(_set_field, name, value))
        with pytest.raises(CheckpointError, match=field):
            Checkpoint.open(path)
    bare = Checkpoint.open(write_glm_flash(tmp_path / "bare", reference, TEXT, mtp=False))
    assert bare.mtp.announced and not bare.mtp.present


def _set_field(name: str, value: Any, config: dict[str, Any]) -> None:
    config["text_config"][name] = value
