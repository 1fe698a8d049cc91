"""The state of every family is cut for the members of a group, joined, and restored in another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.cut import Cut
from mtp.layers.cuda.row_attention import InPlaceKV
from mtp.layers.gdn_windows import GatedDeltaShape, Point, Recurrence, SnapshotGDNCache, Snapshots
from mtp.layers.kv_cache import KVRows, PairKV
from mtp.layers.layer import KVFormat, LayerCache, Member
from proto.backup import by_layer
from proto.errors import ProtocolError, SpanError
from proto.frame import BackUp, RestoreBackup
from tests.parity.test_backup import read_states
from tests.parity.test_group import checkpoint_for, small
from tests.support.stages.chain import Chain, Script, modules, random_tokens, same
from tests.support.stages.group_run import Work, answer, answer_in_group
from worker.engine.stage_backups import ReceivedBackup, SequenceBackup, member_of

SAVED, LONG = 70, 90
"""Tokens of the backup, and of the prompt. The sparse layers of the small models read 64."""

FAMILIES = ("dense", "moe", "next", "flash-next", "glm")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the checkpoints by family, those that are written already."""
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a family."""
    kind = request.param
    if kind not in models:
        models[kind] = checkpoint_for(tmp_path_factory.mktemp(kind), kind, kv_heads=2)
    return models[kind]


every_family = pytest.mark.parametrize("model", FAMILIES, indirect=True)


def prompt() -> list[int]:
    """Return tokens of every vocabulary."""
    return [*small((tuple(random_tokens(LONG)),))[0]]


def shares_of(layers: Sequence[LayerCache], backup: SequenceBackup, size: int, kv_heads: int) -> list[SequenceBackup]:
    """Return the backup as the members of a group of `size` would have made it."""
    made = []
    for rank in range(size):
        own = []
        for one, cache in zip(backup.layers, layers, strict=False):
            share = cache.own_share([one.read_arrays()], Member(rank, size, kv_heads))
            own.append(replace(one, read_arrays=partial(list, share)))
        made.append(replace(backup, layers=own, cut=Cut(rank, size)))
    return made


@every_family
@pytest.mark.parametrize("bits", [None, 4])
def test_the_shares_of_a_group_of_two_go_on_in_one_process(model: Path, bits: int | None) -> None:
    """The states and the next tokens are those of a sequence that was never cut."""
    checkpoint = Checkpoint.open(model)
    try:
        checkpoint.config.kv_format(bits)
    except Exception:
        pytest.skip("this family has no keys and values of few bits")
    form = KVFormat(bits, 32)
    text, layers = prompt(), checkpoint.config.num_layers
    source, script = Chain(model, (), form), Script(0, text)
    script.run(source, script.chunk(SAVED, sample=False))
    source.send(ops=[BackUp(0, 0)])
    backup = source.engines[0].backups.take_backup(0)
    caches = [layer.new_cache(form) for layer in modules(model, 0, layers, True, True).layers]
    states = read_states(shares_of(caches, backup, 2, checkpoint.config.num_kv_heads))
    states = [state for state in states if state.layer < layers]  # the head computes its pairs again

    target, restored = Chain(model, (layers // 2,), form), Script(7, text)
    for engine in target.engines:
        in_order = sorted(states, key=lambda state: (state.layer, state.rank))
        engine.receive_backup(7, ReceivedBackup(tuple(text[:SAVED]), by_layer(in_order)))
    restored.scheduled, restored.number = SAVED, script.number
    restored.ops.append(RestoreBackup(7, SAVED))
    for sequence, chain in ((script, source), (restored, target)):
        sequence.run(chain, sequence.chunk(LONG))
        for _ in range(3):
            sequence.run(chain, sequence.next_window())
    assert restored.known == script.known
    assert same(target.state(7), source.state(0))


def filled(layers: Sequence[LayerCache]) -> list[list[mx.array]]:
    """Return a random state of each cache of a whole layer after five tokens, by the shapes that it keeps."""
    found = []
    for cache in layers:
        if isinstance(cache, KVRows):
            assert cache.row is not None
            shapes = cache._row_shapes(*cache.row)
            found.append([mx.random.normal((1, heads, 5, dim or 1)) for heads, dim in shapes])
        else:
            found.append([mx.random.normal(a.shape).astype(a.dtype) for a in cache.backup_arrays(0)])
    return found


def windows(key_heads: int, value_heads: int) -> SnapshotGDNCache:
    """Return the cache of a kernel."""
    shape = GatedDeltaShape(key_heads, value_heads)
    conv, state = mx.zeros((1, 3, shape.channels)), mx.zeros((1, value_heads, 128, 128))
    return SnapshotGDNCache(Recurrence(cast(Any, None), shape, ()), Point(Snapshots(conv, state), 0))


def check_cuts(whole: LayerCache, state: list[mx.array], members: Sequence[Sequence[LayerCache]], heads: int) -> None:
    """Cut `state` for each group, join it, and cut it again for every other one. `members` are the caches by group."""
    groups = {len(own): own for own in members}
    shares = {
        n: [own[rank].own_share([state], Member(rank, n, heads)) for rank in range(n)] for n, own in groups.items()
    }
    for size, cut in shares.items():
        assert same(whole.own_share(cut, Member(0, 1, heads)), state)
        for other, own in groups.items():
            for rank in range(other):
                found = own[rank].own_share(cut, Member(rank, other, heads))
                assert same(found, shares[other][rank])
                own[rank].with_backups([found], 5)  # of the shapes that the member's layer has
        with pytest.raises(ProtocolError):
            groups[size][0].with_backups([state], 5)


@every_family
@pytest.mark.parametrize("bits", [None, 8])
def test_every_cache_is_cut_for_groups_of_two_and_four(model: Path, bits: int | None) -> None:
    """Shares have the shapes of the members' own layers, and other shapes are refused."""
    checkpoint = Checkpoint.open(model)
    form = KVFormat(bits, 32)
    layers = checkpoint.config.num_layers

    def caches(cut: Cut) -> list[LayerCache]:
        member = checkpoint.cut_for(cut)
        built = [member.config.family.stage_layer(engine_layer(member, n)) for n in range(layers)]
        return [layer.new_cache(form) for layer in built]

    whole = caches(Cut())
    try:
        groups = [[caches(Cut(rank, size)) for rank in range(size)] for size in (2, 4)]
    except SpanError as error:
        assert "cannot be shared" in str(error) and not checkpoint.config.shape.can_cut
        return
    for n, state in enumerate(filled(whole)):
        if any(axis is not None for axis in whole[n].cut_axes):
            own = [[member[n] for member in group] for group in groups]
            check_cuts(whole[n], state, own, checkpoint.config.num_kv_heads)
        else:
            assert same(groups[0][1][n].own_share([state] * 4, Member(1, 2, 4)), state)
    assert member_of(checkpoint.cut_for(Cut(1, 2)).config).kv_heads == checkpoint.config.num_kv_heads


def engine_layer(checkpoint: Checkpoint, number: int) -> Any:
    """Return layer `number` without weights, as the engine runs it."""
    config = checkpoint.config
    return config.family.engine_layer(config.text_config, config.family.layer(config.text_config, number))


def test_the_caches_of_kernels_are_cut_too() -> None:
    """Keys and values in one array, and the states of the window kernel."""
    mx.random.seed(3)
    rows = [mx.random.normal((1, 4, 5, 128)) for _ in range(2)]
    for kind in (PairKV, InPlaceKV):
        members = [[kind().with_rows(4 // n, 128) for _ in range(n)] for n in (2, 4)]
        check_cuts(kind().with_rows(4, 128), rows, members, 4)
    whole = windows(4, 8)
    state = [mx.random.normal(a.shape) for a in whole.arrays()]
    check_cuts(whole, state, [[windows(4 // n, 8 // n) for _ in range(n)] for n in (2, 4)], 1)


@pytest.mark.parametrize("axis", range(4))
def test_a_backup_of_another_shape_is_refused(axis: int) -> None:
    """Each axis of keys and values is compared, and so is the number of arrays."""
    cache = PairKV().with_rows(4, 128)
    shape = [1, 4, 5, 128]
    cache.with_backups([[mx.zeros(shape)] * 2], 5)
    shape[axis] *= 2
    for wrong in ([mx.zeros(shape)] * 2, [mx.zeros((1, 4, 5, 128))], [mx.zeros((4, 5, 128))] * 2):
        with pytest.raises(ProtocolError):
            cache.with_backups([wrong], 5)
    with pytest.raises(ProtocolError):
        cache.with_backups([[mx.zeros((1, 4, 3, 128))] * 2, [mx.zeros((1, 2, 2, 128))] * 2], 5)


@pytest.mark.parametrize("model", [pytest.param("dense", marks=pytest.mark.thorough), "glm"], indirect=True)
def test_a_backup_of_a_group_of_processes_goes_on_elsewhere(model: Path) -> None:
    """Two processes over a ring make it. From it one process and another group have the same tokens."""
    work = Work(str(model), (tuple(prompt()),), count=8, temperature=0.8, saved=SAVED)
    made = answer_in_group(work, 2)
    assert made.tokens == answer(replace(work, saved=0)).tokens
    given = replace(work, given=sorted(made.backup, key=lambda state: (state[0], state[3])))
    assert answer(given).tokens == made.tokens
    assert answer_in_group(given, 2).tokens == made.tokens


def test_shares_that_do_not_fit_are_refused() -> None:
    """Other shapes or numbers of arrays are a malformed backup."""
    wrong = [[mx.ones((1, 3, 4)), mx.ones((1, 2, 3, 4))], [mx.ones((1, 3, 4))]]
    for cache in (PairKV(), windows(2, 2)):
        with pytest.raises(ProtocolError, match="do not fit together"):
            cache.own_share(wrong, Member(0, 1, 2))
