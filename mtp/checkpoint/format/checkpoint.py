"""The contents of a checkpoint, read from config.json and the headers of its safetensors files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mtp.checkpoint.families.parameters import Source
from mtp.checkpoint.format.config import ModelConfig, read_json_object
from mtp.checkpoint.format.cut import Cut
from mtp.checkpoint.format.names import (
    ADAPTER_FILES,
    IGNORED,
    Layout,
    holds_model,
    is_bare_head,
    is_head,
    join_names,
    local_name,
    part_names,
    plan_part,
    with_head_prefix,
)
from mtp.checkpoint.format.shard import Header, TensorInfo, read_header
from proto.errors import CheckpointError, SpanError
from proto.span import Span

CONFIG = "config.json"
"""The file with the fields of the model."""

INDEX = "model.safetensors.index.json"
"""The file that maps each tensor of a sharded checkpoint to its file."""

_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/[^/]+$")
"""The directory of a repo in the hub's cache."""

_SAMPLED_TENSORS = 1024
_SAMPLED_BYTES = 64


_UNREAD = ("F64", "F8_E5M2")
"""Types that MLX does not support. MLX reads no tensor of a file that contains one of them."""

Files = dict[Path, dict[str, mx.array]]
"""The lazy tensors of opened files."""

FileState = tuple[int, int, int]
"""The size, the time of the last change in nanoseconds and the inode of a file."""


def file_state(file: Path) -> FileState | None:
    """Return the state of `file`, None if it is missing."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


@dataclass(frozen=True)
class MtpStatus:
    """The state of the MTP head: announced by config.json, present, and the local names of its missing tensors."""

    announced: bool
    present: bool
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """True when the head can be loaded."""
        return self.present and not self.missing


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config, its tensors by stored name, and its plans by part.

    A plan maps each parameter's name to its Source. `unknown` are the stored names that belong to no part of this
    model; the names of the vision part are not included. `ignored` are stored names that do not change results.
    """

    path: Path
    config: ModelConfig
    layout: Layout
    tensors: dict[str, TensorInfo] = field(repr=False)
    plans: dict[str, dict[str, Source]] = field(repr=False)
    unknown: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    on_disk: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    """Tensors that stay on disk: by part the stored names by those within the part."""
    is_raw: bool = False
    """True if a class of mlx-lm makes parameters of the tensors, which are those of the publisher."""
    is_whole: bool = True
    """False if a class of mlx-lm finds no tensor of some part."""
    files: dict[Path, FileState | None] = field(default_factory=dict, repr=False, compare=False)
    """The files on this machine as they were when they were read. Their offsets hold for no other state."""

    @classmethod
    def open(cls, path: Path, *, to_convert: bool = False, allow_head_only: bool = False) -> Checkpoint:
        """Read config.json and the headers of the safetensors files, but no tensor. Raises CheckpointError.

        `to_convert` permits a checkpoint that another program packed, `allow_head_only` one that is only an MTP head.
        """
        named = (path / CONFIG, path / INDEX, *_weight_files(path))
        files = {file: file_state(file) for file in named}
        config = ModelConfig.load(path)
        if not to_convert:
            check_not_packed(path, config)
        headers = _read_headers(path)
        config, headers = settle_head(config, headers)
        if not allow_head_only:
            check_not_head_only(path, config)
        if not config.head_only:
            headers = _with_head(path, headers, config.head_file)
        layout = layout_of(path, config, headers)
        found = cls.assemble(path, config, layout, merge_headers(headers))
        return replace(found, files=files)

    def changed_file(self) -> Path | None:
        """Return a file that has changed since it was read, or None."""
        return next((file for file, was in self.files.items() if file_state(file) != was), None)

    def check_file(self, file: Path) -> None:
        """Raise CheckpointError if `file` has changed since its header was read."""
        if file in self.files and file_state(file) != self.files[file]:
            raise CheckpointError(
                f"{file} has changed since this program read its header. Load the model again, or start the program "
                "again."
            )

    def load_tensor(self, name: str, files: Files | None = None) -> mx.array:
        """Return the stored tensor `name`, lazily. `files` has the tensors of the files that were opened before."""
        file, files = self.tensors[name].file, {} if files is None else files
        if file not in files:
            self.check_file(file)
            try:
                loaded = mx.load(str(file))
            except (RuntimeError, ValueError) as error:
                others = [name for name, i in self.tensors.items() if i.file == file and i.dtype in _UNREAD]
                raise CheckpointError(
                    f"{file}: MLX cannot read {join_names(others) or 'it'}: {error}. Use the checkpoint of its "
                    "publisher, or convert it again."
                ) from error
            assert isinstance(loaded, dict)
            files[file] = loaded
        return files[file][self.tensors[name].stored or name]

    @classmethod
    def assemble(cls, path: Path, config: ModelConfig, layout: Layout, tensors: dict[str, TensorInfo]) -> Checkpoint:
        """Build a checkpoint from tensors whose places are known. Raises CheckpointError if two are one parameter."""
        stored = {name: (info.dtype, info.shape) for name, info in tensors.items()}
        if (planned := config.family.plan_tensors(config.text(), stored)) is not None:
            plans = {part: planned.parts.get(part, {}) for part in part_names(config.num_layers)}
            found = cls(path, config, layout, tensors, plans, planned.unknown, planned.ignored)
            return replace(found, is_raw=planned.is_raw, is_whole=planned.is_whole)
        pairs = {part: list[tuple[str, str]]() for part in part_names(config.num_layers)}
        unknown, ignored = [], []
        on_disk: dict[str, dict[str, str]] = {}
        for name in sorted(tensors):
            if IGNORED.fullmatch(name):
                ignored.append(name)
                continue
            local = local_name(name)
            if local is None:
                continue
            if config.head_only:
                local = with_head_prefix(local)
            match config.family.place(local, config.text_config):
                case None:
                    unknown.append(name)
                case _, _, "ignored":
                    ignored.append(name)
                case part, within, "on disk":
                    on_disk.setdefault(part, {})[within] = name
                case part, within, _:
                    pairs[part].append((within, name))
        plans = {
            part: plan_part(config.family, part, stored, layout, config.num_experts) for part, stored in pairs.items()
        }
        return cls(path, config, layout, tensors, plans, tuple(unknown), tuple(ignored), on_disk)

    @cached_property
    def mtp(self) -> MtpStatus:
        """The state of the MTP head. The missing experts of an incomplete stack are listed one by one."""
        plan, head = self.plans["mtp"], self.config.head()
        if head is None:
            return MtpStatus(announced=False, present=False, missing=())
        names = dict(tree_flatten(head.parameters()))
        missing = [f"mtp.{name}" for name in names if name not in plan]
        missing += self.missing_sources("mtp")
        return MtpStatus(self.config.mtp_layers > 0, bool(plan), tuple(missing))

    def file_name(self, info: TensorInfo) -> str:
        """Return the path of a tensor's file within the checkpoint, as a hub and an index name it."""
        return info.file.relative_to(self.path).as_posix()

    def tensors_of(self, part: str) -> set[str]:
        """Return the stored names of a part, those that stay on disk included."""
        names = {name for source in self.plans[part].values() for name in source.tensors}
        return names.union(self.on_disk.get(part, {}).values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of the tensors that stay on disk."""
        return sum(self.tensors[name].nbytes for names in self.on_disk.values() for name in names.values())

    @property
    def norm_type(self) -> str:
        """The stored type of the final norm, which is that of activations; empty if the norm is missing."""
        names = (name for source in self.plans["norm"].values() for name in source.stored)
        return next((self.tensors[name].dtype for name in names if name in self.tensors), "")

    def missing_sources(self, part: str) -> tuple[str, ...]:
        """Return the stored names that the plan of `part` needs and the checkpoint lacks."""
        needed = (name for source in self.plans[part].values() for name in source.tensors)
        return tuple(name for name in needed if name not in self.tensors)

    def check_names(self) -> None:
        """Raise CheckpointError for a tensor that belongs to no part of this model."""
        if self.unknown:
            raise CheckpointError(
                f"{self.tensors[self.unknown[0]].file}: tensor {self.unknown[0]} belongs to no part of this model "
                f"({len(self.unknown)} in total): config.json may belong to another checkpoint. Download both again."
            )

    def missing_tensors_error(self, missing: Sequence[str]) -> CheckpointError:
        """Return the error for missing tensors, given their names."""
        what = f"tensors {join_names(missing)} are" if missing[1:] else f"tensor {missing[0]} is"
        return CheckpointError(f"{self.path}: {what} missing. Download the checkpoint again, or convert it again.")

    def check_readable(self) -> None:
        """Raise CheckpointError for some tensors of a publisher's model, whose class needs all."""
        if self.is_raw and not self.is_whole:
            raise CheckpointError(
                f"{self.path}: the tensors are those of the publisher, and only some of them are here. Convert the "
                "model once: mtp-coord convert."
            )

    def part_bytes(self) -> dict[str, int]:
        """Return the bytes of each part, as stored: `embed`, `layers.0` …, `norm`, `lm_head`, `mtp`."""
        return {part: sum(self.stored_bytes(part).values()) for part in self.plans}

    def stored_bytes(self, part: str) -> dict[str, int]:
        """Return the bytes of each stored tensor of a part, or of the share that a member reads."""
        # A dict, because both halves of a fused tensor have the same name.
        return {
            name: self.tensors[name].nbytes // self._members_of(part, parameter, name)
            for parameter, source in self.plans[part].items()
            for name in source.tensors
            if name in self.tensors
        }

    def routed_tensors(self, part: str) -> set[str]:
        """Return the stored names of the experts of a part, of which a token reads its share."""
        rule, plan = self.config.family.rule, self.plans[part]
        return {name for parameter in plan if rule(part, parameter).routed for name in plan[parameter].tensors}

    def _members_of(self, part: str, parameter: str, name: str) -> int:
        """Return the number of shares of a stored tensor. Members may hold the same head of keys and values."""
        config, by = self.config, self.config.family.rule(part, parameter).cut
        if config.cut.size == 1 or by is None or (by == "vocabulary" and not config.cuts_vocabulary):
            return 1
        if by == "heads of keys":
            return self.tensors[name].shape[0] // config.head_dim // config.num_kv_heads
        return config.cut.size

    def check_slices(self, slices: int) -> None:
        """Raise SpanError if the layers or the vocabulary of the whole model cannot be cut into `slices`."""
        try:
            cut = self.config.cut_for(Cut(0, slices))
        except SpanError as error:
            raise SpanError(f"--slices {slices}: {error} --slices has to divide the same numbers.") from error
        if not (cut.cuts_vocabulary or cut.tie_word_embeddings):
            raise SpanError(
                f"--slices {slices}: the vocabulary of {cut.vocab_size} tokens cannot be cut so. Use another number."
            )

    def cut_for(self, cut: Cut) -> Checkpoint:
        """Return the checkpoint as one member of a group reads it. Raises SpanError if it cannot be cut."""
        return self if cut == self.config.cut else replace(self, config=self.config.cut_for(cut))

    def stage_parts(self, span: Span, *, first: bool, last: bool, with_head: bool = True) -> tuple[str, ...]:
        """Return the parts of a stage, for the loader and the planner. Raises SpanError for layers out of range."""
        span.check_within(self.config.num_layers)
        head = last and with_head and self.mtp.complete
        tied = self.config.tie_word_embeddings
        embed = first or head or (last and tied)
        ends = ("norm", *(() if tied else ("lm_head",)), *(("mtp",) if head else ()))
        layers = tuple(f"layers.{layer}" for layer in span)
        return (*(("embed",) if embed else ()), *layers, *(ends if last else ()))

    def fingerprint(self) -> str:
        """Return a hex digest that is equal for two copies of the same weights, however they are split into files.

        It covers the config, each tensor's name, type and shape, and the ends of up to 1,024 tensors. It detects
        mistakes, not forgery.
        """
        digest = hashlib.sha256()
        config = self.config
        decisive = [config.text_config, config.quantization, config.tie_word_embeddings]
        digest.update(json.dumps(decisive, sort_keys=True).encode())
        names = sorted(self.tensors)
        for name in names:
            info = self.tensors[name]
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
        for name in names[:: 1 + len(names) // _SAMPLED_TENSORS]:
            info = self.tensors[name]
            with info.file.open("rb") as stream:
                for start in (0, max(0, info.nbytes - _SAMPLED_BYTES)):
                    stream.seek(info.start + start)
                    digest.update(stream.read(min(_SAMPLED_BYTES, info.nbytes)))
        return digest.hexdigest()


def model_name(path: Path) -> str:
    """Return the name by which commands call the model in `path`: the repo for the hub's cache, or else the path."""
    found = _SNAPSHOT.search(path.as_posix())
    return found[1].replace("--", "/", 1) if found else str(path)


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files in `path`, then those in its folders, both by name."""
    found = [
        *sorted(path.glob("*.safetensors")),
        *sorted(f for f in path.glob("*/*.safetensors") if not f.parent.name.startswith(".")),
    ]
    return [file for file in found if not ADAPTER_FILES.fullmatch(file.name)]


def _holds_head(headers: dict[Path, Header]) -> bool:
    return any(is_head(name) for header in headers.values() for name in header.tensors)


def settle_head(config: ModelConfig, headers: dict[Path, Header]) -> tuple[ModelConfig, dict[Path, Header]]:
    """Decide by the tensors whether a repo is a head alone, and give the names of a head beside a model their `mtp.`.

    Some tools write the `model_type` of a head into the config of a whole model.
    """
    if config.head_only:
        if not holds_model(name for header in headers.values() for name in header.tensors):
            return config, headers
        config = replace(config, head_only=False)
    return config, {file: _with_prefix(header) for file, header in headers.items()}


def _with_prefix(header: Header) -> Header:
    """Return the header of a file of a head with the prefix `mtp.` in its names; others as they are."""
    if not is_bare_head(header.tensors):
        return header
    named = ((with_head_prefix(local_name(n) or n), n) for n in header.tensors)
    tensors = {local: replace(header.tensors[n], stored=n) for local, n in named if is_head(local)}
    return Header(tensors, header.metadata)


def head_alone(header: Header) -> Header:
    """Return the header with the tensors of a head only, all with the prefix `mtp.`."""
    header = _with_prefix(header)
    heads = {name: info for name, info in header.tensors.items() if is_head(name)}
    return Header(heads, header.metadata)


def _with_head(path: Path, known: dict[Path, Header], head_file: str) -> dict[Path, Header]:
    """Return the `known` headers of a model, with a head that lies beside its files. Its tensors tell it, not its name.

    The file that config.json names replaces any other head. If the model has none, the first file beside its own is
    taken, or the first folder.
    """
    files = [file for file in _weight_files(path) if file not in known]
    named = path / head_file
    if named in files or named in known:
        head = {named: head_alone(known.get(named) or read_header(named))}
        if _holds_head(head):
            others = {file: _without_head(h) for file, h in known.items() if file != named}
            return others | {named: known.get(named, head[named])}
    groups = [] if _holds_head(known) else groupby(files, key=lambda file: file.parent)
    for _, group in groups:
        head = {file: head_alone(read_header(file)) for file in group}
        if _holds_head(head):
            return known | head
    return known


def _without_head(header: Header) -> Header:
    rest = {name: info for name, info in header.tensors.items() if not is_head(name)}
    return Header(rest, header.metadata)


def _read_headers(path: Path) -> dict[Path, Header]:
    """Read the headers of the files in the index, or of all safetensors files when there is no index."""
    found = [file for file in _weight_files(path) if file.parent == path]
    index = path / INDEX
    if not index.exists():
        if not found:
            raise CheckpointError(f"{path}: no *.safetensors files. Download the checkpoint again.")
        return {file: read_header(file) for file in found}
    weight_map = checked_weight_map(read_json_object(index), index)
    headers = {}
    for name in sorted(set(weight_map.values())):
        if not (path / name).exists():
            raise CheckpointError(f"{path}: {name} is missing, and {INDEX} needs it. Download it again.")
        headers[path / name] = read_header(path / name)
    for tensor, name in weight_map.items():
        if tensor not in headers[path / name].tensors:
            raise CheckpointError(
                f"{path / name}: has no tensor {tensor}, which {INDEX} expects there. Download both again."
            )
    drop_replaced(headers, weight_map)
    return headers


def drop_replaced(headers: dict[Path, Header], weight_map: dict[str, str]) -> None:
    """Remove from `headers` the tensors that the index replaces, so that replacing one rewrites no file.

    A tensor counts only in the file that the index names for it, and a head in the index excludes any other head.
    """
    head_named = any(is_head(name) for name in weight_map)
    for file, header in headers.items():
        for name in list(header.tensors):
            unnamed = None if head_named and is_head(name) else file.name
            if weight_map.get(name, unnamed) != file.name:
                del header.tensors[name]


def checked_weight_map(index: dict[str, Any], source: object) -> dict[str, str]:
    """Return the file name of each tensor in an index. Raises CheckpointError, which names `source`."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{source}: weight_map is not an object with entries. Take another copy or revision.")
    for name in weight_map.values():
        is_name = isinstance(name, str) and name.isprintable()
        if not (is_name and 0 < len(Path(name).name) == len(name)):
            raise CheckpointError(f"{source}: {name!r:.120} is not the name of a file in the same directory.")
    return weight_map


def merge_headers(headers: dict[Path, Header]) -> dict[str, TensorInfo]:
    """Return the tensors of all files by name. Raises CheckpointError for a tensor in two files."""
    tensors: dict[str, TensorInfo] = {}
    for header in headers.values():
        for name, info in header.tensors.items():
            if (other := tensors.setdefault(name, info)) is not info:
                raise CheckpointError(
                    f"{other.file}: tensor {name} is in {info.file.name} as well. Remove the stale file."
                )
    return tensors


def check_not_packed(path: Path, config: ModelConfig) -> None:
    """Raise CheckpointError with the command that converts the checkpoint at `path`, if another program packed it."""
    if config.foreign is not None:
        name = model_name(path)
        raise CheckpointError(
            f"{name}: is packed as {config.foreign.name}, which is not served directly. Convert it once: "
            f"mtp-coord convert --hf-path {name} --mlx-path {name.rpartition('/')[2]}-mlx -q --q-bits 8"
        )


def check_not_head_only(path: Path, config: ModelConfig) -> None:
    """Raise CheckpointError with the command that adds the head, if the repo at `path` holds nothing else."""
    if config.head_only:
        raise CheckpointError(
            f"{path}: holds an MTP head and no model. Add it to the model that it belongs to: "
            f"mtp-coord add-mtp --mlx-path MODEL --hf-path {path}"
        )


def layout_of(path: Path, config: ModelConfig, headers: dict[Path, Header]) -> Layout:
    """Return `detect_layout` of a family that has two layouts."""
    return detect_layout(path, headers, head_only=config.head_only) if config.family.has_raw_layout else "mlx"


def detect_layout(path: Path, headers: dict[Path, Header], *, head_only: bool = False) -> Layout:
    """Return the layout of the whole checkpoint. Raises CheckpointError for contradictions and where nothing tells it.

    The shape of a convolution is `[C, 1, K]` in raw and `[C, K, 1]` in mlx layout. Without a convolution, or if K is 1,
    the metadata decides: `format` is `pt` when transformers wrote the file. In a repo of a head alone without metadata,
    names without `mtp.` are those of a converted head.
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
            f"{path}: raw and converted files are mixed: {votes['raw']} is raw, {votes['mlx']} is converted. "
            "Remove the files of one of them."
        )
    if not votes and head_only:
        raw = any(is_head(name) for header in headers.values() for name in header.tensors)
        return "raw" if raw else "mlx"
    if not votes:
        raise CheckpointError(
            f"{path}: the layout is unknown: the files have neither a conv1d tensor nor format metadata. "
            "Download the checkpoint again, or convert it again."
        )
    return next(iter(votes))
