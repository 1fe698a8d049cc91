"""The state of a group's members as one, and its shares for another group, with the shapes of real caches."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import LayerKind
from mtp.checkpoint.format.cut import Cut
from proto.errors import ProtocolError
from tests.parity.test_group import checkpoint_for
from worker.engine.stage_backups import Arrays, StateCut

TOKENS = 5


def state_of(checkpoint: Checkpoint, kind: LayerKind) -> Arrays:
    """Return a random state of a whole layer."""
    config = checkpoint.config
    mx.random.seed(3)
    if kind == "attention":
        shape = (1, config.num_kv_heads, TOKENS, config.head_dim)
        return [mx.random.normal(shape), mx.random.normal(shape)]
    channels = (
        2 * config.gdn_key_heads * config.gdn_key_dim
        + config.gdn_value_heads * config.gdn_value_dim
    )
    state = (1, config.gdn_value_heads, config.gdn_value_dim, config.gdn_key_dim)
    return [mx.random.normal((1, 3, channels)), mx.random.normal(state)]


def cut_of(checkpoint: Checkpoint, rank: int, size: int) -> StateCut:
    return StateCut(checkpoint.cut_for(Cut(rank, size)).config)


def same(a: Arrays, b: Arrays) -> bool:
    return len(a) == len(b) and all(map(mx.array_equal, a, b))


@pytest.mark.parametrize("kind", ["attention", "gdn"])
@pytest.mark.parametrize(
    ("size", "other", "kv_heads"), [(2, 4, 2), (4, 2, 2), (3, 6, 6), (2, 3, 6)]
)
def test_shares_of_any_group_fit_together(
    tmp_path: Path, kind: LayerKind, size: int, other: int, kv_heads: int
) -> None:
    """Shares become the whole, and those of another group are cut from them. Four members hold two heads twice."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, "dense", kv_heads=kv_heads))
    whole = state_of(checkpoint, kind)
    shares = [cut_of(checkpoint, r, size).own_share([whole], kind) for r in range(size)]
    config = checkpoint.cut_for(Cut(0, size)).config
    heads = config.num_kv_heads if kind == "attention" else config.gdn_value_heads
    assert all(share[1].shape[1] == heads for share in shares)
    assert same(StateCut(checkpoint.config).own_share(shares, kind), whole)
    for rank in range(other):
        cut = cut_of(checkpoint, rank, other)
        assert same(cut.own_share(shares, kind), cut.own_share([whole], kind))
    assert cut_of(checkpoint, 1, size).own_share(shares, kind) is shares[1]


def test_shares_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Other shapes or numbers of arrays are a malformed backup."""
    checkpoint = Checkpoint.open(checkpoint_for(tmp_path, "dense"))
    whole = StateCut(checkpoint.config)
    wrong = [[mx.ones((1, 3, 4)), mx.ones((1, 2, 3, 4))], [mx.ones((1, 3, 4))]]
    for kind in ("attention", "gdn"):
        with pytest.raises(ProtocolError, match="do not fit together"):
            whole.own_share(wrong, kind)
