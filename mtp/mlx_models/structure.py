"""The structure of a model of mlx-lm, found by calling its class without weights: caches, sizes, problems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from mtp.checkpoint.families.fields import Text
from mtp.mlx_models.caches import arrays_of
from mtp.mlx_models.skeleton import Skeleton, without_weights
from proto.errors import CheckpointError


@dataclass(frozen=True)
class LayerStructure:
    """The caches of a layer by their places among those of the model, and the values that they hold.

    A token adds `token_values`. A sequence has `sequence_values` besides, whatever its length.
    """

    places: tuple[int, ...]
    token_values: int
    sequence_values: int


@dataclass(frozen=True)
class ModelStructure:
    """The layers of a model, and the kind of the cache at each place.

    `ends` are the modules beside the layers that have weights: from their path to their part. `shapes` are those of all
    parameters by their names in a converted checkpoint.
    """

    model_type: str
    layers: tuple[LayerStructure, ...]
    kinds: tuple[str, ...]
    paths: tuple[str, ...]
    ends: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    hidden: int
    vocabulary: int

    @property
    def is_tied(self) -> bool:
        """True if the embedding is the lm_head."""
        return "lm_head" not in dict(self.ends).values()


def structure_of(config: Text) -> ModelStructure:
    """Return the structure of the model of `config`. Raises CheckpointError with the reason why it cannot be cut."""
    return _planned(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=8)
def _planned(config: str) -> ModelStructure:
    text = json.loads(config)
    name = text["model_type"]
    skeleton = Skeleton(text)
    # Nothing is computed, but the code of a class may look at a value.
    without_weights(skeleton.model)
    try:
        layers = tuple(_layers(skeleton))
        logits = skeleton.leave(mx.zeros((1, 1, _hidden(skeleton))), skeleton.new_caches())
    except CheckpointError:
        raise
    except Exception as error:  # whatever a class does
        raise CheckpointError(f"its layers cannot be called one by one: {error!r:.120}") from error
    parameters: dict[str, mx.array] = dict(tree_flatten(skeleton.model.parameters()))
    return ModelStructure(
        model_type=name,
        layers=layers,
        kinds=tuple(kind_of(cache) for cache in skeleton.new_caches()),
        paths=tuple(skeleton.paths),
        ends=tuple(_ends(skeleton, logits.shape[-1])),
        shapes=tuple((name, weight.shape) for name, weight in parameters.items()),
        hidden=_hidden(skeleton),
        vocabulary=logits.shape[-1],
    )


def kind_of(cache: Any) -> str:
    """Return the kind of an empty cache: its class and its settings."""
    if type(cache) is CacheList:
        return f"list of {', '.join(kind_of(one) for one in cache.caches)}"
    settings = {name: value for name, value in sorted(vars(cache).items()) if type(value) in (int, str)}
    count = len(cache.cache) if hasattr(cache, "cache") else ""
    return f"{type(cache).__name__} {count}{settings or ''}"


def _hidden(skeleton: Skeleton) -> int:
    return int(skeleton.enter(mx.zeros((1, 1), mx.int32), skeleton.new_caches()).hidden.shape[-1])


def _layers(skeleton: Skeleton) -> list[LayerStructure]:
    """Return the plans of the layers, after two tokens and then one, which are computed lazily."""
    caches = skeleton.new_caches()
    skeleton.run_whole(mx.zeros((1, 2), mx.int32), caches)
    skeleton.run_whole(mx.zeros((1, 1), mx.int32), caches)
    plans: list[LayerStructure] = []
    for call in skeleton.enter(mx.zeros((1, 1), mx.int32), caches).calls:
        given = [i for i, cache in enumerate(caches) if any(value is cache for value in call.values())]
        places = tuple(place for place in given if arrays_of(caches[place]))  # some layers leave theirs empty
        token, sequence = map(sum, zip((0, 0), *(_values(caches[place]) for place in places), strict=True))
        plans.append(LayerStructure(places, token, sequence))
    held = [place for plan in plans for place in plan.places]
    if len(held) > len(set(held)):
        raise CheckpointError("its layers share keys and values")
    return plans


def _values(cache: Any) -> tuple[int, int]:
    """Return the values that a token adds to a cache in use, and those of a sequence besides."""
    if type(cache) is CacheList:
        pairs = [_values(one) for one in cache.caches]
        return sum(token for token, _ in pairs), sum(sequence for _, sequence in pairs)
    if isinstance(cache, KVCache | RotatingKVCache):
        one = sum(array.shape[1] * array.shape[3] for array in (cache.keys, cache.values) if array is not None)
        return (one, 0) if isinstance(cache, KVCache) else (0, one * cache.max_size)
    return 0, sum(array.size for array in arrays_of(cache))


def _ends(skeleton: Skeleton, vocabulary: int) -> list[tuple[str, str]]:
    """Return the modules beside the layers that have weights: the path of each, and its part."""
    found = []
    for path, module in skeleton.model.named_modules():
        is_inside = any(path == layer or path.startswith(f"{layer}.") for layer in skeleton.paths)
        own = [name for name, value in module.items() if isinstance(value, mx.array) and not name.startswith("_")]
        if is_inside or not own:
            continue
        part = "norm"
        if isinstance(module, nn.Embedding):
            part = "embed"
        elif isinstance(module, nn.Linear) and module.weight.shape[0] == vocabulary:
            part = "lm_head"
        found.append((path, part))
    return found


def kind_for_people(plan: LayerStructure, kinds: Sequence[str]) -> str:
    """Return the kind of a layer for people, by its caches."""
    names = [kinds[place].partition(" ")[0] for place in plan.places]
    usual = {"KVCache": "attention", "RotatingKVCache": "window", "ArraysCache": "recurrent", "list": "mixed"}
    return usual.get(names[0], names[0]) if names else "stateless"
