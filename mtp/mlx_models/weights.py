"""The tensors of a checkpoint as parameters of a model of mlx-lm, by the `sanitize` of its class.

`sanitize` runs once over zeros of the stored shapes. A tensor that comes out as it went in is read as it is.
Any other parameter is made when it is read, by the same function, from the tensors of its part that did not survive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import pairwise
from typing import Any

import mlx.core as mx

from mtp.checkpoint.families.family import Family, head_name
from mtp.checkpoint.families.fields import Text
from mtp.checkpoint.families.parameters import Source
from mtp.mlx_models.skeleton import make_model
from mtp.mlx_models.structure import ModelStructure
from proto.errors import CheckpointError

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""The safetensors type and the shape of each tensor by its stored name."""

_DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "I64": mx.int64,
    "I8": mx.int8,
    "BOOL": mx.bool_,
}
"""The types of MLX by their names in safetensors. MLX loads all types of one byte that it lacks as bytes."""

_MOST_NAMED = 1000
"""Arrays of one graph, because a function of MLX takes up to 1,024 names."""

_QUANTIZED = ("scales", "biases", "global_scale")
"""The tensors of a quantized weight besides its codes."""
_NEXTN = re.compile(
    r"(?:(?:language_model|model)\.)*(?:mtp_layers|nextn_layers|nextn|mtp)\.(?:layers\.)?(?:(\d+)\.)?(.+)"
)
"""The names of a head that stands beside the layers. Only the first layer of a head drafts."""

_REPEATED = re.compile(r"embed_tokens\.|shared_head\.head\.")
"""The modules of a head that repeat those of the model."""

_HEAD_NAMES = {
    "transformer.": "",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "final_layernorm.": "norm.",
    "shared_head.output.": "lm_head.",
}
"""From the names of MiMo-V2, Ling and Step within a head to those of the class, and of all heads."""

_NOT_TEXT = re.compile(r"(model\.|language_model\.)?(\w*(vision|visual|audio|image|multi_modal)\w*)\.")
"""The beginnings of names of other parts than that of text."""


@dataclass(frozen=True)
class TensorPlan:
    """The parameters of each part by their name within it, and the stored names that no parameter needs.

    `is_raw` is true for tensors of the publisher, from which parameters are made. `is_whole` is true if there are some
    of each part.
    """

    parts: dict[str, dict[str, Source]]
    unknown: tuple[str, ...]
    ignored: tuple[str, ...]
    is_raw: bool
    is_whole: bool


def stored_part(plan: ModelStructure, name: str) -> str | None:
    """Return the part of a stored tensor by its name alone, None for one of another part than text."""
    if _NOT_TEXT.match(name):
        return None
    if name_in_head(plan, name) is not None:
        return "mtp"
    words = name.split(".")
    within = plan.paths[0].split(".")[-2]
    for word, number in pairwise(words):
        if word in (within, "layers") and number.isdecimal():
            return f"layers.{int(number)}" if int(number) < len(plan.layers) else "mtp"
    ends = {path.rpartition(".")[2]: part for path, part in plan.ends}
    return next((ends[word] for word in words if word in ends), None)


def name_in_head(plan: ModelStructure, name: str) -> str | None:
    """Return the name of a stored tensor within the MTP head, empty for one without use, None for one elsewhere."""
    if beside := _NEXTN.fullmatch(name):
        number, within = int(beside[1] or 0), beside[2]
    elif after := re.fullmatch(rf"{re.escape(plan.paths[0].rpartition('.')[0])}\.(\d+)\.(.+)", name):
        number, within = int(after[1]) - len(plan.layers), after[2]
    else:
        return None
    if number < 0:
        return None
    if number or _REPEATED.match(within):
        return ""
    for theirs, ours in _HEAD_NAMES.items():
        within = ours + within.removeprefix(theirs) if within.startswith(theirs) else within
    return head_name(within, Family.head_modules)


def parameter_place(plan: ModelStructure, name: str) -> tuple[str, str] | None:
    """Return the part of a parameter by the name that the model has for it, and its name within the part."""
    above, _, _ = plan.paths[0].rpartition(".")
    found = re.match(rf"{re.escape(above)}\.(\d+)\.", name)
    if found and int(found[1]) < len(plan.paths):
        return f"layers.{int(found[1])}", name[len(plan.paths[int(found[1])]) + 1 :]
    for path, part in plan.ends:
        if name.startswith(f"{path}."):
            return part, name
    return None


def plan_tensors(config: Text, plan: ModelStructure, stored: Stored, *, alone: bool = False) -> TensorPlan:
    """Return the plan of all parameters that the tensors `stored` give. Raises CheckpointError.

    `alone` says that the class reads these without any other tensor.
    """
    zeros = {name: _zeros(*info) for name, info in stored.items()}
    names = {id(array): name for name, array in zeros.items()}
    # A class may look for layers that another machine holds.
    held = {stored_part(plan, name) for name in stored}
    missing = () if alone else plan.shapes
    absent = {n: mx.zeros(shape) for n, shape in missing if (parameter_place(plan, n) or (None,))[0] not in held}
    made = {name: array for name, array in _sanitized(config, absent | zeros).items() if name not in absent}
    survivors = [array for array in made.values() if id(array) in names]
    changed = _computed(survivors)
    parts: dict[str, dict[str, Source]] = {}
    later: list[tuple[str, str, str]] = []
    unknown, used = [], set[str]()
    for name, array in made.items():
        place = parameter_place(plan, name)
        own = None if id(array) in changed else names.get(id(array))
        if place is None:
            unknown.append(own or name)
        elif own is not None:
            parts.setdefault(place[0], {})[place[1]] = Source((own,))
            used.add(own)
        else:
            later.append((*place, name))
    read = {name: stored[name] for name in used}
    used |= set(unknown)
    rest: dict[str, list[str]] = {}
    for name in stored:
        if name not in used and (part := stored_part(plan, name)) is not None:
            rest.setdefault(part, []).append(name)
    is_raw = bool(later) and not _is_converted(plan, stored)
    is_raw = is_raw or (bool(absent) and not _is_converted(plan, read))
    text = json.dumps(config, sort_keys=True)
    for part, within, name in later:
        sources = tuple(sorted(rest.get(part, ())))
        together = tuple(name for other, _, name in later if other == part)
        make = Sanitized(text, sources, name, stored, together)
        parts.setdefault(part, {})[within] = Source(sources, make, decides_type=True)
        used |= set(sources)
    return TensorPlan(parts, tuple(sorted(unknown)), tuple(sorted(stored.keys() - used)), is_raw, is_whole=not absent)


def _is_converted(plan: ModelStructure, stored: Stored) -> bool:
    """Return whether all tensors have names and shapes of parameters. A class may still make them anew."""
    shapes = dict(plan.shapes)
    for name, (_, shape) in stored.items():
        module, _, leaf = name.rpartition(".")
        if stored_part(plan, name) is None or leaf in _QUANTIZED:
            continue
        if name not in shapes or (shapes[name] != shape and f"{module}.scales" not in stored):
            return False
    return True


def _zeros(dtype: str, shape: tuple[int, ...]) -> mx.array:
    """Return zeros that take no memory of their own, and are no result of a computation."""
    zeros = mx.broadcast_to(mx.array(0, _DTYPES.get(dtype, mx.uint8)), shape)
    mx.eval(zeros)
    return zeros


def _computed(arrays: Sequence[mx.array]) -> set[int]:
    """Return the ids of those `arrays` that a class has changed in place: they are no leaves of their graph."""
    found: set[int] = set()
    for start in range(0, len(arrays), _MOST_NAMED):
        graph, some = StringIO(), arrays[start : start + _MOST_NAMED]
        mx.export_to_dot(graph, **{f"t{number}": array for number, array in enumerate(some)})
        found |= {id(some[int(number)]) for number in re.findall(r'rank=sink; "t(\d+)"', graph.getvalue())}
    return found


def _sanitized(config: Text, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    model: Any = make_model(config)
    mx.eval(mx.random.state)
    if not hasattr(model, "sanitize"):
        return weights
    try:
        found: dict[str, mx.array] = model.sanitize(dict(weights))
    except Exception as error:  # whatever a class does with names that it does not know
        raise CheckpointError(
            f"mlx-lm's {config['model_type']} does not find its tensors in this checkpoint: {error!r:.120}. Download "
            "it again."
        ) from error
    return found


@dataclass(frozen=True)
class Sanitized:
    """The function from the `stored` tensors of a part to the parameter `name` of the model of `config`, as JSON."""

    config: str
    stored: tuple[str, ...]
    name: str
    every: Stored = field(repr=False, compare=False)
    """All tensors of the checkpoint, by which some classes decide whether it is converted."""
    names: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """The parameters that are made of the same tensors."""

    def __call__(self, *arrays: mx.array) -> mx.array:
        if not _made.is_of(self, arrays):
            others = {name: _zeros(*info) for name, info in self.every.items()}
            own = others | dict(zip(self.stored, arrays, strict=True))
            made = _sanitized(json.loads(self.config), own)
            _made.keep(self, arrays, {name: made[name] for name in self.names if name in made})
        return _made.take(self.name)


class _Made:
    """The parameters of the part that is being read, each until it is taken, with the tensors that they are made of."""

    def __init__(self) -> None:
        self._by: Sanitized | None = None
        self._from: tuple[mx.array, ...] = ()
        self._arrays: dict[str, mx.array] = {}

    def is_of(self, by: Sanitized, arrays: Sequence[mx.array]) -> bool:
        """Return whether the parameter of `by` is kept, made of the same `arrays`."""
        same = self._by is not None and (self._by.config, self._by.stored) == (by.config, by.stored)
        is_from = len(arrays) == len(self._from) and all(a is b for a, b in zip(arrays, self._from, strict=True))
        return same and is_from and by.name in self._arrays

    def keep(self, by: Sanitized, arrays: tuple[mx.array, ...], made: dict[str, mx.array]) -> None:
        """Keep what `by` made of `arrays`."""
        self._by, self._from, self._arrays = by, arrays, made

    def take(self, name: str) -> mx.array:
        """Return a parameter. The last one releases the tensors. Raises ValueError if it was not made."""
        if name not in self._arrays:
            raise ValueError(f"mlx-lm makes no {name} of it")
        found = self._arrays.pop(name)
        if not self._arrays:
            self.keep_nothing()
        return found

    def keep_nothing(self) -> None:
        """Release all arrays."""
        self._by, self._from, self._arrays = None, (), {}


_made = _Made()


def join_ends(paths: Sequence[str], modules: Sequence[Any], holder: Any) -> Any:
    """Put `modules` into `holder` at their paths in the model."""
    for path, module in zip(paths, modules, strict=True):
        parent = holder
        *above, last = path.split(".")
        for name in above:
            if name not in parent:
                setattr(parent, name, type(holder)())
            parent = getattr(parent, name)
        setattr(parent, last, module)
    return holder
