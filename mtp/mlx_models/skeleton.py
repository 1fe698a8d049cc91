"""A model of mlx-lm as it is, whose decoder layers are called one by one.

The class keeps its own masks, factors, caps and positions. Each decoder layer is a tap: called by the model, it records
its arguments and returns its input. One call of the model gives the input of the first layer and the arguments of every
layer. Another call, whose last layer returns the rows of a stage, gives the logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from mtp.checkpoint.families.fields import Text
from proto.errors import CheckpointError

HELPERS = frozenset(
    ("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm")
) | {"switch_layers"}
"""Modules of `mlx_lm.models` that are no model."""


def _utils() -> Any:
    """Return `mlx_lm.utils`. It imports transformers, which takes seconds that other families do not need."""
    return import_module("mlx_lm.utils")


def module_name(model_type: str) -> str:
    """Return the name that the module of `model_type` has in mlx-lm, if it has one."""
    return str(_utils().MODEL_REMAPPING.get(model_type, model_type))


def module_of(model_type: str) -> str | None:
    """Return the module of mlx-lm with the class of `model_type`, None if it has none."""
    name = module_name(model_type)
    if re.fullmatch(r"[\w-]+", name) is None or name in HELPERS:
        return None
    return f"mlx_lm.models.{name}" if find_spec(f"mlx_lm.models.{name}") else None


@dataclass(frozen=True)
class Call:
    """The arguments of a layer after its input, as the model calls it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def values(self) -> Iterator[Any]:
        """Yield each argument, those in tuples and lists one by one."""
        waiting = [*self.args, *self.kwargs.values()]
        while waiting:
            value = waiting.pop(0)
            if type(value) in (tuple, list):
                waiting = [*value, *waiting]
            else:
                yield value


@dataclass(frozen=True)
class Entry:
    """The input `[n, w, hidden]` of the first layer, and the call of each layer."""

    hidden: mx.array
    calls: list[Call]


class _EntryEndsError(Exception):
    """The last layer is reached, and the rest of the model is not wanted."""


class Skeleton:
    """The class of a model with lazy random weights, and its decoder layers as taps.

    `layers` have their own class again when they run through `run`. Raises CheckpointError for a config whose class
    cannot be made.
    """

    def __init__(self, config: Text) -> None:
        self.model = make_model(config)
        try:
            layers: Sequence[nn.Module] = list(self.model.layers)
        except AttributeError as error:
            raise CheckpointError(f"mlx-lm's class of {config['model_type']} has no layers: {error}") from error
        paths = {id(module): path for path, module in self.model.named_modules()}
        self.paths = [paths.get(id(layer), "") for layer in layers]
        self._bases: list[Callable[..., Any]] = []
        self._calls: list[Call] = []
        self._hidden: mx.array | None = None
        self._rows: mx.array | None = None
        self._order: list[int] = []
        self._runs = False
        self.layers = list(layers)
        for index, layer in enumerate(layers):
            self._tap(index, layer)
        # Each random weight adds a lazy split to the generator's key.
        mx.eval(mx.random.state)

    def _tap(self, index: int, layer: nn.Module) -> None:
        base = type(layer)
        base = getattr(base, "tapped", base)

        def record(_: Any, *args: Any, **kwargs: Any) -> mx.array:
            x = args[0] if args else kwargs.pop(next(iter(kwargs)))
            return self._record(index, x, Call(args[1:], kwargs))

        layer.__class__ = type(base.__name__, (base,), {"__call__": record, "tapped": base})
        self._bases[index:] = [base.__call__, *self._bases[index + 1 :]]
        self.layers[index] = layer

    def _record(self, index: int, x: mx.array, call: Call) -> mx.array:
        self._order.append(index)
        if self._runs:
            self._check(index, x, call)
            return self._bases[index](self.layers[index], x, *call.args, **call.kwargs)  # type: ignore[no-any-return]
        self._calls.append(call)
        if self._hidden is None:
            self._hidden = x
        if index == len(self.layers) - 1:
            if self._rows is None:
                raise _EntryEndsError
            return self._rows
        return x

    def module(self, path: str) -> Any:
        """Return the module at `path`."""
        return dict(self.model.named_modules())[path]

    def replace_module(self, path: str, module: nn.Module) -> None:
        """Put `module` in the place `path`, where it becomes a tap if it is a layer."""
        parent: Any = self.model
        *above, last = path.split(".")
        for name in above:
            parent = parent[int(name)] if isinstance(parent, list) else getattr(parent, name)
        if isinstance(parent, list):
            parent[int(last)] = module
        else:
            setattr(parent, last, module)
        if path in self.paths:
            self._tap(self.paths.index(path), module)

    def new_caches(self) -> list[Any]:
        """Return the caches of a new sequence, as the model orders them."""
        return list(make_prompt_cache(self.model))

    def enter(self, tokens: mx.array, caches: Sequence[Any]) -> Entry:
        """Return the input of the first layer for `tokens [n, w]`, and the arguments of all layers, with `caches`."""
        self._calls, self._order, self._hidden, self._rows = [], [], None, None
        with suppress(_EntryEndsError):
            self.model(tokens, cache=list(caches))
        assert self._hidden is not None, "the model called no layer"
        return Entry(self._hidden, self._calls)

    def run_whole(self, tokens: mx.array, caches: Sequence[Any]) -> None:
        """Run the model with its layers, lazily. Raises CheckpointError for what does not fit a cut between layers."""
        self._order, self._runs = [], True
        try:
            self.model(tokens, cache=list(caches))
        finally:
            self._runs = False
        if self._order != list(range(len(self.layers))):
            raise CheckpointError(f"it runs its layers in another order, or more than once: {self._order[:8]}")

    def _check(self, index: int, x: Any, call: Call) -> None:
        if not isinstance(x, mx.array) or x.ndim != 3:
            raise CheckpointError("it hands more than one array from layer to layer")
        for value in call.values():
            is_float = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
            if is_float and (value.ndim == 3 or value.shape[-1] > x.shape[1] + 1):
                raise CheckpointError("its layers take more than the rows of the layer before, such as its keys")

    def run(self, index: int, x: mx.array, call: Call) -> Any:
        """Return the output of a layer for `x [n, w, hidden]` with the arguments of its call."""
        return self._bases[index](self.layers[index], x, *call.args, **call.kwargs)

    def leave(self, rows: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the logits `[1, rows, vocabulary]` of `rows [1, rows, hidden]`, which follow the last layer.

        `caches` are those of an empty sequence.
        """
        self._calls, self._order, self._hidden, self._rows = [], [], rows, rows
        logits: mx.array = self.model(mx.zeros(rows.shape[:2], mx.int32), cache=list(caches))
        return logits


def make_model(config: Text) -> nn.Module:
    """Return mlx-lm's class of `config` with lazy random weights. Raises CheckpointError."""
    name = config.get("model_type")
    if config.get("model_file"):
        raise CheckpointError(
            f"model_file is {config['model_file']!r:.60}: the checkpoint brings code of its own, which is not run. "
            "Use a model that mlx-lm has."
        )
    try:
        kind, args = _utils()._get_classes(config)
        model: nn.Module = kind(args.from_dict(_utils()._decode_tagged_floats(config)))
    except (Exception, SystemExit) as error:  # whatever a class and its constructor do
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
        raise CheckpointError(f"mlx-lm cannot make a {name!r:.60} of this config.json: {cause}") from error
    return model


def without_weights(model: nn.Module) -> None:
    """Replace all weights by views of one number, so that even a computed one takes no memory of its own."""
    one = mx.array(0.0)
    model.update(tree_map(lambda weight: mx.broadcast_to(one.astype(weight.dtype), weight.shape), model.parameters()))


def attention_modules(model: nn.Module) -> list[Any]:
    """Return the modules of mlx-lm that have the classes of `model`. They may call `scaled_dot_product_attention`."""
    names = {each.__module__ for module in model.modules() for each in type(module).__mro__}
    found = {name for name in names if name.startswith("mlx_lm.models.")}
    return [import_module(name) for name in sorted(found | {"mlx_lm.models.base"})]
