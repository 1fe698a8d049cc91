"""A group of processes computes what one process computes: the shares of the layers, and the sums over the members."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.checkpoint.format.parts import read_part
from mtp.layers.communicator import ALONE, GroupCommunicator
from mtp.layers.kv_cache import new_kv
from mtp.layers.layer import KVFormat
from proto.errors import SpanError
from proto.frame import Admit, Segment
from proto.span import Span
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.own_families import OWN_FAMILIES
from tests.support.stages.chain import random_tokens
from tests.support.stages.doubled import Doubled
from tests.support.stages.group_run import Work, answer, answer_in_group
from worker.model.loader import load_stage
from worker.model.stage import StageForward, halves

HEADS = (
    ("num_attention_heads", 12),
    ("num_key_value_heads", 6),
    ("linear_num_value_heads", 24),
    ("linear_num_key_heads", 12),
    ("intermediate_size", 384),
    ("moe_intermediate_size", 96),
    ("shared_expert_intermediate_size", 48),
)
"""Fields that groups of 2, 3 and 4 can cut. Four members share the six heads of keys and values unevenly, so two
numbers of them are tried."""


def checkpoint_for(path: Path, kind: str, *, kv_heads: int = 6, **options: Any) -> Path:
    """Write a checkpoint of `kind`: dense, moe, next or glm, which has sizes of its own."""
    if kind in OWN_FAMILIES:
        pytest.importorskip("torch", reason="transformers needs torch")
        return OWN_FAMILIES[kind].write(path / "model")
    unused = {"dense": ("moe_", "shared_"), "moe": ("intermediate",), "next": ("intermediate",)}
    fields = [
        (name, kv_heads if name == "num_key_value_heads" else value)
        for name, value in HEADS
        if not name.startswith(unused[kind])
    ]
    return write_checkpoint(
        path,
        moe=kind != "dense",
        qwen3_next=kind == "next",
        fields=tuple(fields),
        layers=4,
        tie=False,
        vocab=240,
        **options,
    )


PROMPTS = tuple(tuple(random_tokens(90, seed)) for seed in range(2))


def small(prompts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(token % 239 for token in prompt) for prompt in prompts)


@pytest.mark.parametrize(
    ("kind", "size", "kv_heads", "temperature"),
    [
        pytest.param("dense", 2, 6, 0.0, marks=pytest.mark.slow),
        pytest.param("moe", 2, 2, 0.8, marks=pytest.mark.thorough),
        pytest.param("dense", 3, 3, 0.8, marks=pytest.mark.slow),
        pytest.param("moe", 4, 2, 0.0, marks=pytest.mark.slow),
        pytest.param("next", 2, 6, 0.8, marks=pytest.mark.thorough),
        pytest.param("dense", 4, 4, 0.0, marks=pytest.mark.slow),
        ("glm", 2, 0, 0.8),
        pytest.param("glm", 4, 0, 0.8, marks=pytest.mark.slow),
    ],
)
def test_a_group_gives_the_tokens_of_one_process(
    tmp_path: Path, kind: str, size: int, kv_heads: int, temperature: float
) -> None:
    """Greedy and sampled, with drafts, rejections and chunked prompts, and with fewer K/V heads than members."""
    path = checkpoint_for(tmp_path, kind, kv_heads=kv_heads)
    bits = 8 if size == 3 else None
    work = Work(str(path), small(PROMPTS), count=10, temperature=temperature, kv_bits=bits)
    expected, found = answer(work), answer_in_group(work, size)
    assert found.tokens == expected.tokens
    assert found.accepted == expected.accepted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_group_whose_halves_overlap_gives_the_tokens_of_one_process(tmp_path: Path, kind: str) -> None:
    """Chunks of 300 tokens over MLX's ring, whose sums have a stream of their own."""
    path = checkpoint_for(tmp_path, kind)
    prompts = tuple(tuple(random_tokens(400, seed)) for seed in range(2))
    work = Work(str(path), small(prompts), count=10, temperature=0.8, chunk=300)
    assert answer_in_group(work, 2).tokens == answer(work).tokens


class Recorded(Doubled):
    """A communicator of two equal members that records sums."""

    can_overlap = True

    def sum(self, x: mx.array) -> mx.array:
        total = super().sum(x)
        if self.recorded is not None:
            self.recorded.append((x, total))
        return total


FRAMES = (((0, 150, False),), ((0, 3, True), (1, 131, False), (2, 2, True)), ((1, 64, False), (3, 70, False)))
"""The sequence, the rows and the openness of each segment of some frames. Sequence 0 is cut after its window."""


@pytest.mark.parametrize("kind", ["dense", *(pytest.param(k, marks=pytest.mark.slow) for k in ("moe", "next", "glm"))])
def test_halves_give_the_bits_of_whole_chunks(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and states are equal on a CPU, where a row has its bits beside any others, and halves take turns."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, kind, kv_heads=2))
    span = Span(0, checkpoint.config.num_layers)
    seen, run, found = list[int](), mx.async_eval, list[list[mx.array]]()

    def record_rows(*arrays: mx.array) -> None:
        seen.extend(array.shape[0] for array in arrays)
        run(*arrays)

    monkeypatch.setattr(mx, "async_eval", record_rows)
    for least in (None, 64):
        modules = load_stage(checkpoint, span, first=True, last=True, dtype=None, communicator=Recorded())
        stage = StageForward(modules, KVFormat())
        assert stage.least_half is not None
        stage.least_half = least
        sequences = [stage.new_sequence(Admit(i, 512, 300)) for i in range(4)]
        rows = list[mx.array]()
        for number, frame in enumerate(FRAMES):
            seen.clear()
            runs = []
            for i, width, is_open in frame:
                tokens = tuple(token % 239 for token in random_tokens(width, i))
                position = sequences[i].stack.length
                runs.append((sequences[i], Segment(i, number, position, tokens, open=is_open)))
            words = mx.array([token for _, segment in runs for token in segment.tokens])
            rows.append(stage.forward(stage.embed(words), runs))
            if least:
                a = sum(width for _, width, _ in frame) // 2 // 64 * 64
                b = sum(width for _, width, _ in frame) - a
                assert seen == [a, a, b, b] * 2 * len(span) + [a + b]
        sequences[0].commit_window(1, 1, in_header=True)
        found.append([*rows, *(array for one in sequences for c in one.layers for array in c.copy().arrays())])
    assert len(found[0]) == len(found[1])
    assert all(mx.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_no_window_is_divided() -> None:
    """The halves have all rows in their order. The first one is shorter where its border is in a window."""
    runs: Any = [(str(i), Segment(i, 0, 0, (1,) * n, open=n < 100)) for i, n in enumerate((60, 10, 58, 300, 9))]
    first, second = halves(runs[:3], 64)
    assert (first.widths, second.widths) == ([60], [10, 58])
    first, second = halves(runs, 128)
    assert (first.widths, first.stay_open) == ([60, 10, 58, 64], [True, True, True, False])
    assert (second.widths, second.stay_open) == ([236, 9], [False, True])
    assert [*first.sequences, *second.sequences] == [*"01233", "4"]
    assert [rows.widths for rows in halves(runs, 193)] == [rows.widths for rows in halves(runs, None)]


def test_exact_mode_and_one_machine_keep_chunks_whole() -> None:
    """Kernels of GPUs may round a row by the rows beside it."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    assert GroupCommunicator(group).can_overlap
    assert not GroupCommunicator(group, exact=True).can_overlap
    assert not ALONE.can_overlap


def test_members_run_ahead_of_each_other(tmp_path: Path) -> None:
    """The first member is a frame ahead, and the head catches up at another moment on each: the tokens are the same."""
    path = checkpoint_for(tmp_path, "dense")
    work = Work(str(path), small(PROMPTS), count=80, drafts=0, temperature=0.8, ahead=True)
    expected = answer(replace(work, ahead=False))
    assert answer_in_group(work, 2).tokens == expected.tokens


@pytest.mark.parametrize("kind", ["dense", "glm"])
def test_a_member_holds_its_share(tmp_path: Path, kind: str) -> None:
    """The memory of a member of two is half of the layers and of lm_head, and all of the embedding and latents."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, kind))
    whole, share = checkpoint.part_bytes(), checkpoint.cut_for(Cut(0, 2)).part_bytes()
    assert share["embed"] == whole["embed"]
    assert share["lm_head"] * 2 == whole["lm_head"]
    for part in ("layers.0", "layers.3") if kind == "dense" else ("mtp",):
        assert 0.5 <= share[part] / whole[part] < (0.54 if kind == "dense" else 0.8)
    for at_once in (False, True):
        loaded = [
            weight.nbytes
            for part in checkpoint.plans
            for weight in read_part(checkpoint.cut_for(Cut(1, 2)), part, None, shares=at_once).values()
        ]
        assert sum(loaded) == sum(share.values())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {}),
        ("moe", {"fused_experts": False, "fused_mtp_experts": True}),
        ("next", {}),
        ("dense", {"layout": "mlx", "quantize": 4, "dtype": mx.bfloat16}),
    ],
)
def test_the_shares_are_the_whole(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Every row and column of a weight belongs to one member, in all layouts of a checkpoint."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, kind, hidden=128, **options))
    for part in checkpoint.plans:
        whole = read_part(checkpoint, part, None)
        cuts = [checkpoint.cut_for(Cut(rank, 2)) for rank in range(2)]
        shares = [read_part(cut, part, None) for cut in cuts]
        for lazy, cut in zip(shares, cuts, strict=True):
            at_once = read_part(cut, part, None, shares=True)
            assert all(mx.array_equal(at_once[name], weight) for name, weight in lazy.items())
        for name, weight in whole.items():
            parts = [share[name] for share in shares]
            if parts[0].shape == weight.shape:
                assert mx.array_equal(parts[0], weight)
                assert "norm" in name or name in WHOLE or part in ("embed", "norm"), name
                continue
            ours = mx.sort(mx.concatenate([p.reshape(-1).astype(mx.float32) for p in parts]))
            assert mx.array_equal(ours, mx.sort(weight.reshape(-1).astype(mx.float32))), name


WHOLE = {
    "fc.weight",
    "mlp.gate.weight",
    "mlp.shared_expert_gate.weight",
    "layers.0.mlp.gate.weight",
    "layers.0.mlp.shared_expert_gate.weight",
}
"""The parameters besides norms and the embedding that every member holds."""


def test_members_that_share_a_head_hold_all_of_it(tmp_path: Path) -> None:
    """With two heads of keys and values each of four members counts and holds one of them."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, "dense", kv_heads=2)).cut_for(Cut(3, 4))
    read = sum(weight.nbytes for weight in read_part(checkpoint, "layers.3", None).values())
    assert checkpoint.part_bytes()["layers.3"] == read


def test_heads_that_cannot_be_cut_are_named(tmp_path: Path) -> None:
    """The error has the field, its value and the number of machines."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, "dense"))
    with pytest.raises(SpanError, match="5 machines: num_attention_heads is 12"):
        checkpoint.cut_for(Cut(0, 5))
    with pytest.raises(SpanError, match="4 machines: num_key_value_heads is 6"):
        checkpoint.cut_for(Cut(0, 4))


@pytest.mark.parametrize(
    ("kind", "slices", "kv_heads", "options"),
    [
        ("dense", 2, 6, {"dtype": mx.bfloat16, "hidden": 128}),
        pytest.param("moe", 4, 2, {}, marks=pytest.mark.slow),
        pytest.param("next", 4, 2, {}, marks=pytest.mark.slow),
        pytest.param(
            "dense",
            2,
            2,
            {"layout": "mlx", "quantize": 4, "dtype": mx.bfloat16, "hidden": 256},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exact_slices_have_the_bits_of_any_group(
    tmp_path: Path, kind: str, slices: int, kv_heads: int, options: dict[str, Any]
) -> None:
    """The logits of one process and of every group are equal bit for bit. Those of whole layers are not."""
    path = checkpoint_for(tmp_path, kind, kv_heads=kv_heads, **options)
    work = Work(str(path), small(PROMPTS[:1]), count=6, drafts=0, exact=True, slices=slices)
    alone = answer(work)
    assert alone.digest != answer(replace(work, slices=1)).digest
    for size in (2, slices) if slices > 2 else (2,):
        assert answer_in_group(work, size).digest == alone.digest


def test_slices_that_are_impossible_are_named(tmp_path: Path) -> None:
    """The error has the number of slices, and that of the machines, the heads or the tokens."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, "dense", kv_heads=1))
    load = partial(load_stage, checkpoint, Span(0, 4), first=True, last=True, dtype=None)
    with pytest.raises(SpanError, match="3 slices cannot be shared by 2 machines"):
        load(communicator=Doubled(), slices=3)
    with pytest.raises(SpanError, match=r"--slices 7: .* num_attention_heads is 12"):
        load(slices=7)
    config = replace(checkpoint.config, vocab_size=239)
    with pytest.raises(SpanError, match="--slices 2: the vocabulary of 239 tokens"):
        replace(checkpoint, config=config).check_slices(2)
    replace(checkpoint, config=replace(config, tie_word_embeddings=True)).check_slices(2)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_head_of_a_member_adds_the_parts_of_all(tmp_path: Path, slices: int) -> None:
    """The layer of the MTP head is cut into the members' shares, not into slices, and is shared like the others."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, "dense", kv_heads=2))
    group = Doubled()
    modules = load_stage(checkpoint, Span(0, 4), first=True, last=True, dtype=None, communicator=group, slices=slices)
    modules.share()
    assert modules.head is not None
    assert modules.head.block.communicator is group
    assert modules.head.block.mlp.communicator is group
    assert (modules.layers[0].communicator is group) == (slices < 4)


@pytest.mark.parametrize("bits", [None, 8])
def test_attention_is_called_for_each_slice(bits: int | None) -> None:
    """A call has the heads of one slice, as that of a member, also where slices share a head of keys and values."""
    mx.random.seed(3)
    q, k, v = (mx.random.normal((1, heads, 5, 64)) for heads in (8, 2, 2))
    whole = new_kv(KVFormat.of(64, bits)).attend(q, k, v, 0.125, None)
    for slices in (2, 4):
        sliced = new_kv(KVFormat.of(64, bits)).attend(q, k, v, 0.125, None, slices)
        assert mx.allclose(sliced, whole, atol=1e-5)
        for i in range(slices):
            held = i * 2 // slices
            one = slice(held, held + 1)
            own = slice(i * 8 // slices, (i + 1) * 8 // slices)
            member = new_kv(KVFormat.of(64, bits)).attend(q[:, own], k[:, one], v[:, one], 0.125, None)
            assert mx.array_equal(sliced[:, own], member)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("length", [4_000, 16_000, 52_000])
def test_long_prompts_are_read_as_by_one_process(tmp_path: Path, length: int) -> None:
    """Users of other programs report texts that are corrupt after long prompts in groups. Here all bits are equal."""
    path = checkpoint_for(tmp_path, "dense", kv_heads=2)
    prompt = tuple(token % 239 for token in random_tokens(length, 5))
    work = Work(str(path), (prompt,), count=8, drafts=0, chunk=512, exact=True, slices=2)
    assert answer_in_group(work, 2).digest == answer(work).digest
