"""An opened checkpoint: what it holds, known from config.json and the headers alone."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.header import Header, TensorInfo, read_header
from mtp.checkpoint.format.names import (
    Layout,
    Source,
    few,
    fused_name,
    is_head,
    local_name,
    module_path,
    mtp_parameters,
    part_names,
    plan_part,
    split_part,
)
from proto.errors import CheckpointError
from proto.span import Span

INDEX = "model.safetensors.index.json"
"""Says which file each tensor of a sharded checkpoint is in."""

_SAMPLED_TENSORS = 1024
_SAMPLED_BYTES = 64


@dataclass(frozen=True)
class MtpStatus:
    """Whether config.json announces an MTP head, and which of its tensors (local names) are not there."""

    announced: bool
    present: bool
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether a head can be loaded."""
        return self.present and not self.missing


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` by stored name; `plans` by part: each parameter's name and how it is made of them.

    `unknown` are stored names that belong to no part of this model; the vision part's are not among them.
    """

    path: Path
    config: ModelConfig
    layout: Layout
    tensors: dict[str, TensorInfo] = field(repr=False)
    plans: dict[str, dict[str, Source]] = field(repr=False)
    unknown: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read config.json and the headers of the safetensors files; no tensor is read.

        Raises CheckpointError for whatever is missing, truncated or contradictory, naming the file.
        """
        config = ModelConfig.load(path)
        headers = _read_headers(path)
        return cls.assemble(path, config, layout_of(path, headers), merge_headers(headers))

    @classmethod
    def assemble(
        cls, path: Path, config: ModelConfig, layout: Layout, tensors: dict[str, TensorInfo]
    ) -> Checkpoint:
        """From tensors whose whereabouts are known. Raises CheckpointError when two would be one parameter."""
        pairs: dict[str, list[tuple[str, str]]] = {
            part: [] for part in part_names(config.num_layers)
        }
        unknown = []
        for name in sorted(tensors):
            local = local_name(name)
            if local is None:
                continue
            where = split_part(local, config.num_layers)
            if where is None:
                unknown.append(name)
            else:
                pairs[where[0]].append((where[1], name))
        plans = {
            part: plan_part(part, stored, layout, config.num_experts)
            for part, stored in pairs.items()
        }
        return cls(path, config, layout, tensors, plans, tuple(unknown))

    @cached_property
    def mtp(self) -> MtpStatus:
        """What there is of the MTP head. An unfinished stack of experts counts as missing, by its experts."""
        plan = self.plans["mtp"]
        missing = [
            module_path("mtp", name)
            for name in mtp_parameters(self.config.num_experts)
            if name not in plan
        ]
        missing += self.missing_sources("mtp")
        return MtpStatus(self.config.mtp_layers > 0, bool(plan), tuple(missing))

    def missing_sources(self, part: str) -> tuple[str, ...]:
        """Stored names a part's plan needs and the checkpoint lacks."""
        needed = (name for source in self.plans[part].values() for name in source.stored)
        return tuple(name for name in needed if name not in self.tensors)

    def stored_name(self, local: str) -> str:
        """What this checkpoint would call a tensor it lacks, going by the names of those it has."""
        known = next((n for n in self.tensors if (local_name(n) or "").startswith("layers.")), "")
        prefix = known.removesuffix(local_name(known) or "")
        if local.startswith(("mtp.", "lm_head.")):
            prefix = "language_model." if prefix == "language_model.model." else ""
        return prefix + (fused_name(local) if self.layout == "raw" else local)

    def lacks(self, missing: Sequence[str]) -> CheckpointError:
        """The error that says that tensors are not there, by their stored names."""
        index, files = self.path / INDEX, {info.file for info in self.tensors.values()}
        place = index if index.exists() else files.pop() if len(files) == 1 else self.path
        what = f"tensors {few(missing)} are" if len(missing) > 1 else f"tensor {missing[0]} is"
        return CheckpointError(
            f"{place}: {what} missing; download the checkpoint again, or convert it again"
        )

    def part_bytes(self) -> dict[str, int]:
        """Bytes on disk by part: `embed`, `layers.0` …, `norm`, `lm_head`, `mtp`."""
        return {
            part: sum(self.tensors[n].nbytes for n in self._stored(part) if n in self.tensors)
            for part in self.plans
        }

    def _stored(self, part: str) -> set[str]:
        """Stored names a part is made of; both halves of a fused tensor name it, so a set."""
        return {name for source in self.plans[part].values() for name in source.stored}

    def stage_parts(
        self, span: Span, *, first: bool, last: bool, with_head: bool = True
    ) -> tuple[str, ...]:
        """The parts a stage holds: what a loader reads is what a planner counts.

        Raises SpanError when the model has no such layers.
        """
        span.check_within(self.config.num_layers)
        head = last and with_head and self.mtp.complete
        tied = self.config.tie_word_embeddings
        embed = first or head or (last and tied)
        ends = ("norm", *(() if tied else ("lm_head",)), *(("mtp",) if head else ()))
        layers = tuple(f"layers.{layer}" for layer in span)
        return (*(("embed",) if embed else ()), *layers, *(ends if last else ()))

    def fingerprint(self) -> str:
        """Hex digest that two copies of the same weights share, however they are cut into files.

        Covers the fields that decide the computation, every tensor's name, dtype and shape, and the first and
        last 64 bytes of up to 1,024 tensors spread over the sorted names: cheap, and different weights
        of one shape differ. It guards against mix-ups, not against someone who forges it.
        """
        digest = hashlib.sha256()
        config = [
            self.config.text_config,
            self.config.quantization,
            self.config.tie_word_embeddings,
        ]
        digest.update(json.dumps(config, sort_keys=True).encode())
        names = sorted(self.tensors)
        for name in names:
            info = self.tensors[name]
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
        by_file = defaultdict(list)
        for name in names[:: 1 + len(names) // _SAMPLED_TENSORS]:
            by_file[self.tensors[name].file].append(name)
        samples: dict[str, bytes] = {}
        for file, sampled in by_file.items():
            with file.open("rb") as stream:
                for name in sampled:
                    info = self.tensors[name]
                    stream.seek(info.start)
                    first = stream.read(min(_SAMPLED_BYTES, info.nbytes))
                    stream.seek(info.start + max(0, info.nbytes - _SAMPLED_BYTES))
                    samples[name] = first + stream.read(min(_SAMPLED_BYTES, info.nbytes))
        for name in sorted(samples):
            digest.update(samples[name])
        return digest.hexdigest()


def _read_headers(path: Path) -> dict[Path, Header]:
    """Headers of the files the index names, or of all safetensors files when there is no index.

    Where those have no `mtp.*` tensors, a file the index does not name may bring them: a head put beside a
    finished checkpoint, whose index nobody rewrote.
    """
    found = sorted(path.glob("*.safetensors"))
    index = path / INDEX
    if not index.exists():
        if not found:
            raise CheckpointError(f"{path}: no *.safetensors files; download the checkpoint again")
        return {file: read_header(file) for file in found}
    weight_map = weight_map_of(index)
    headers = {}
    for name in sorted(set(weight_map.values())):
        if not (path / name).exists():
            raise CheckpointError(
                f"{path}: {name} is missing, and {INDEX} needs it: download it again"
            )
        headers[path / name] = read_header(path / name)
    for tensor, name in weight_map.items():
        if tensor not in headers[path / name].tensors:
            raise CheckpointError(f"{path / name}: has no tensor {tensor}, though {INDEX} says so")
    drop_replaced(headers, weight_map)
    if not any(is_head(name) for header in headers.values() for name in header.tensors):
        for file in found:
            if file not in headers:
                beside = read_header(file)
                heads = {n: info for n, info in beside.tensors.items() if is_head(n)}
                headers[file] = Header(heads, beside.metadata)
    return headers


def drop_replaced(headers: dict[Path, Header], weight_map: dict[str, str]) -> None:
    """A tensor counts where the index says it is, and a head it names is the only one.

    So one that was replaced may stay in its file: nobody rewrites gigabytes to be rid of it.
    """
    head_named = any(is_head(name) for name in weight_map)
    for file, header in headers.items():
        for name in list(header.tensors):
            unnamed = None if head_named and is_head(name) else file.name
            if weight_map.get(name, unnamed) != file.name:
                del header.tensors[name]


def weight_map_of(index: Path) -> dict[str, str]:
    """Which file each tensor is in, by an index. Raises CheckpointError when it makes no sense."""
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: cannot be read: {error!r:.120}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is not an object with entries")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r:.120} is not the name of a file beside it")
    return weight_map


def merge_headers(headers: dict[Path, Header]) -> dict[str, TensorInfo]:
    """All files' tensors by name. Raises CheckpointError for one that is in two of them."""
    tensors: dict[str, TensorInfo] = {}
    for header in headers.values():
        for name, info in header.tensors.items():
            if (other := tensors.setdefault(name, info)) is not info:
                raise CheckpointError(
                    f"{other.file}: tensor {name} is in {info.file.name} as well; remove the stale file"
                )
    return tensors


def layout_of(path: Path, headers: dict[Path, Header]) -> Layout:
    """One decision for the whole checkpoint, so that a stage without GDN layers is right too.

    A convolution is `[C, 1, K]` raw and `[C, K, 1]` for mlx. Where no header has one (or K is 1), files
    say `format` `pt` or `mlx`, as transformers and mlx write it.
    """
    votes: dict[Layout, str] = {}
    for header in headers.values():
        for name, info in header.tensors.items():
            if name.endswith("linear_attn.conv1d.weight") and len(info.shape) == 3:
                _, middle, last = info.shape
                if middle != last:
                    votes["mlx" if last == 1 else "raw"] = f"{name} in {info.file.name}"
    if not votes:
        formats: dict[str, Layout] = {"pt": "raw", "mlx": "mlx"}
        for file, header in headers.items():
            if header.tensors and (layout := formats.get(header.metadata.get("format", ""))):
                votes[layout] = f"the metadata of {file.name}"
    if len(votes) > 1:
        raise CheckpointError(
            f"{path}: raw and converted files are mixed: {votes['raw']} is raw, {votes['mlx']} is converted"
        )
    if not votes:
        raise CheckpointError(
            f"{path}: cannot tell a raw checkpoint from a converted one: no conv1d tensor, no format "
            "metadata"
        )
    return next(iter(votes))
