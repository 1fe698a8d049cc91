"""The config.json of a checkpoint as checked fields."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mtp.checkpoint.families.family import Family, Place
from mtp.checkpoint.families.fields import Rule, find_wrong_field
from mtp.checkpoint.families.shape import Shape
from mtp.checkpoint.format.cut import WHOLE, Cut, cut_fields
from mtp.checkpoint.format.names import local_name
from mtp.checkpoint.format.shard import parse_json_object
from mtp.checkpoint.known_families import count_served_types, find_family
from mtp.head.drafter import MTPHead
from mtp.layers.layer import KVFormat
from proto.errors import CheckpointError, SpanError, UsageError


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in `file`. Raises CheckpointError for an unreadable file, invalid JSON, or another value."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error.strerror}. Give a directory with config.json and *.safetensors."
        ) from error
    return parse_json_object(content, str(file))


QUANTIZATION_FILE = "hf_quant_config.json"
"""The file in which ModelOpt describes its quantization."""

PACKINGS = {
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt",
    "modelopt_mixed": "ModelOpt",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "auto-round": "AutoRound",
    "autoround": "AutoRound",
    "intel/auto-round": "AutoRound",
}
"""The packings of other programs that `mtp-coord convert` reads, by `quant_method`."""

NATIVE: dict[str, dict[str, Any]] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
"""The packings of publishers that are those of MLX, by `quant_method`."""


@dataclass(frozen=True)
class ForeignPacking:
    """A quantization by another program: its `name`, a value of PACKINGS, and the fields of its config."""

    name: str
    fields: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json that decide a stage's modules, memory and stop tokens.

    `text_config` is the raw dict of the fields, by the names that the family gives them. `head_only` is true for a repo
    that holds an MTP head and no model. `quantization` is the raw dict of mlx-lm's own quantization, `foreign` the
    packing of another program. At least one of them is None.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tie_word_embeddings: bool
    max_positions: int
    num_experts: int
    num_kv_heads: int
    head_dim: int
    mtp_layers: int
    eos_token_ids: tuple[int, ...]
    quantization: dict[str, Any] | None = field(repr=False, hash=False)
    text_config: dict[str, Any] = field(repr=False, hash=False)
    foreign: ForeignPacking | None = None
    head_only: bool = False
    head_file: str = ""
    """The file that config.json names for the MTP head, if it names one."""
    cut: Cut = WHOLE
    """The share of the layers that these fields describe."""
    whole: ModelConfig | None = None
    """The config of whole layers, for one of a member of a group."""
    vision: dict[str, Any] | None = field(default=None, repr=False, hash=False)
    """The raw `vision_config`, None for a model of text."""
    image_token: int = 0
    """The token that chat templates write for an image."""

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Read `path/config.json`, and the stop tokens of generation_config.json beside it. Raises CheckpointError."""
        config = read_config(path)
        return cls.parse(path / "config.json", config, _eos_token_ids(path, config))

    @classmethod
    def parse(cls, file: Path, config: dict[str, Any], eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
        """Check the object of the config.json `file`. Raises CheckpointError for an unsupported model or field."""
        config = with_quantization(config, None)
        text = _text(file, config)
        if found := find_family(str(config.get("model_type"))):
            text = found[0].named_fields(found[0].text_part(config))
        return _Reader(file, config, text).read(eos_token_ids)

    def cut_for(self, cut: Cut) -> ModelConfig:
        """Return the config of one member's layers. Raises SpanError for heads or columns that cannot be cut."""
        if cut.size > 1 and not self.shape.can_cut:
            raise SpanError(f"the layers of {self.model_type} cannot be shared. Use a pipeline.")
        text = cut_fields({**self.text_config, "head_dim": self.head_dim}, cut)
        return replace(self, num_kv_heads=text["num_key_value_heads"], text_config=text, cut=cut, whole=self)

    @property
    def family(self) -> Family:
        """The family of the model."""
        found = find_family(self.model_type)
        assert found is not None, f"{self.model_type} was checked when the config was read"
        return found[0]

    @cached_property
    def shape(self) -> Shape:
        """The sizes of the layers and their states."""
        return self.family.shape(self.text_config)

    def place(self, stored: str) -> Place | None:
        """Return the place of a stored tensor, or None when no part of this model has it."""
        local = stored if self.family.as_published else local_name(stored)
        return self.family.place(local or "", self.text_config)

    def backbone(self) -> nn.Module:
        """Return mlx-lm's model without weights: its names begin with `model.` and `lm_head.`."""
        return self.family.backbone(self.text())

    def head(self) -> MTPHead | None:
        """Return the MTP head without weights, None if the family has none."""
        return self.family.head(self.text())

    def kv_format(self, bits: int | None) -> KVFormat:
        """Return the format of K/V for `--kv-bits`. Raises UsageError if this family has no such format."""
        if bits is not None and not self.shape.quantizes_kv:
            raise UsageError(f"--kv-bits is not supported for {self.release}. Leave it out.")
        return KVFormat.of(self.head_dim, bits)

    def check_exact(self) -> None:
        """Raise UsageError if the layers of this family have no exact form."""
        if self.family.is_own:
            raise UsageError(f"--exact is not supported for {self.release}. Leave it out.")

    @property
    def release(self) -> str:
        """The name of the model for people."""
        return self.family.releases if self.family.model_types else self.model_type

    @property
    def image_sections(self) -> tuple[int, int, int]:
        """The pairs of a head that turn by the time, height and width of an image's rows."""
        time, height, width = self.text_config.get("rope_parameters", {}).get("mrope_section", (11, 11, 10))
        return time, height, width

    def text(self) -> dict[str, Any]:
        """Return a copy of `text_config`, since mlx-lm modifies its input."""
        tied = {} if self.family.as_published else {"tie_word_embeddings": self.tie_word_embeddings}
        return copy.deepcopy(self.text_config) | tied

    @property
    def cuts_vocabulary(self) -> bool:
        """True if each member of a group holds its share of lm_head. Otherwise each holds all of it."""
        return self.vocab_size % self.cut.size == 0


_RULES: dict[str, Rule] = {
    "tie_word_embeddings": ("boolean", 0, 0),
    "vision_config": ("nullable object", 0, 0),
    "image_token_id": ("optional integer", 0, 2**31),
}
"""The rules of the fields beside those of the text part."""


@dataclass(frozen=True)
class _Reader:
    """A reader of fields whose errors name the file and the field."""

    file: Path
    config: dict[str, Any]
    text: dict[str, Any]

    def read(self, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Read and check every field. Raises CheckpointError."""
        family, model_type, head_only = self._family()
        text = self.text
        if problem := find_wrong_field(family.rules, text) or family.find_problem(text):
            raise self._error(problem)
        sizes = family.sizes(text)
        tied = self.config.get("tie_word_embeddings", False) if sizes.is_tied is None else sizes.is_tied
        if problem := find_wrong_field(_RULES, {**self.config, "tie_word_embeddings": tied}):
            raise self._error(problem)
        return ModelConfig(
            model_type=model_type,
            hidden_size=sizes.hidden,
            num_layers=sizes.layers,
            vocab_size=sizes.vocabulary,
            tie_word_embeddings=tied,
            max_positions=sizes.positions,
            num_experts=sizes.experts,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            mtp_layers=self._mtp_layers(family),
            eos_token_ids=eos_token_ids,
            quantization=self._quantization(),
            text_config=text,
            foreign=self._foreign(),
            head_only=head_only,
            head_file=self._head_file(),
            vision=self.config.get("vision_config") if family.sees_images else None,
            image_token=self.config.get("image_token_id", 0),
        )

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {message}")

    def _family(self) -> tuple[Family, str, bool]:
        name = self.config.get("model_type")
        found = find_family(name) if isinstance(name, str) else None
        if found is None:
            raise self._error(
                f"model_type {name!r:.60} is not supported: mlx-lm has no such model, and code of a checkpoint is not "
                f"run. Use any of the {count_served_types()} model types of mlx-lm that docs/models.md describes."
            )
        family, model_type, head_only = found
        if head_only and self.text.get("num_experts") and model_type == "qwen3_5":
            model_type = "qwen3_5_moe"
        return family, model_type, head_only

    def _mtp_layers(self, family: Family) -> int:
        layers = int(family.announced_head_layers(self.text) or 0)
        if layers and self.text.get("mtp_use_dedicated_embeddings"):
            raise self._error(
                "mtp_use_dedicated_embeddings is true, and only heads without own embeddings are supported. Set "
                "mtp_num_hidden_layers to 0 to leave the head out."
            )
        return layers

    def _head_file(self) -> str:
        extra = self.config.get("mlx_lm_extra_tensors")
        return str(extra.get("mtp_file", "")) if isinstance(extra, dict) else ""

    def _foreign(self) -> ForeignPacking | None:
        found = self.config.get("quantization_config")
        if self.config.get("quantization") is not None or found is None:
            return None
        fields = found if isinstance(found, dict) else {"quant_method": found}
        method = fields.get("quant_method")
        if method is None:
            return None
        if str(method).lower() not in PACKINGS:
            raise self._error(
                f"quantized by {method!r:.60}, which is not supported. Use the unquantized checkpoint, or one for MLX."
            )
        return ForeignPacking(PACKINGS[str(method).lower()], fields)

    def _quantization(self) -> dict[str, Any] | None:
        if self.config.get("quantize_activations"):
            raise self._error("quantize_activations is not supported. Convert without it.")
        found = self.config.get("quantization")
        if found is None:
            found = self.config.get("quantization_config")
            if found is None or self._foreign() is not None:
                return None
        if not isinstance(found, dict) or not {"bits", "group_size"} <= found.keys():
            raise self._error("quantization is not an object with bits and group_size")
        if problem := find_wrong_field({"bits": ("size", 1, 8), "group_size": ("size", 1, 2**16)}, found):
            raise self._error(f"quantization.{problem}")
        return found


def read_config(path: Path) -> dict[str, Any]:
    """Return the object of `path/config.json`, with ModelOpt's file beside it. Raises CheckpointError."""
    beside = path / QUANTIZATION_FILE
    return with_quantization(
        read_json_object(path / "config.json"),
        read_json_object(beside) if beside.is_file() else None,
    )


def with_quantization(config: dict[str, Any], beside: dict[str, Any] | None) -> dict[str, Any]:
    """Return `config` with its quantization at the usual place.

    ModelOpt has the fields under `quantization`, in the file `beside` or in config.json. The text part may have them
    too.
    """
    text = config.get("text_config")
    places = [config, text if isinstance(text, dict) else {}]
    if config.get("quantization") is None and places[1].get("quantization") is not None:
        config = {**config, "quantization": places[1]["quantization"]}
    stored = (place.get("quantization_config") for place in places)
    found = next((fields for fields in stored if fields is not None), beside)
    native = NATIVE.get(str(found.get("quant_method"))) if isinstance(found, dict) else None
    if native is not None and config.get("quantization") is None:
        return {**config, "quantization": native}
    if found is None or config.get("quantization") is not None:
        return config
    if isinstance(found, dict) and isinstance(inner := found.get("quantization"), dict):
        found = {"quant_method": "modelopt", **inner}
    return {**config, "quantization_config": found}


def _text(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{file}: text_config is not an object")
    return text


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the stop tokens; generation_config.json has precedence, as in mlx-lm."""
    text = _text(path / "config.json", config)
    generation = path / "generation_config.json"
    sources = [read_json_object(generation)] if generation.exists() else []
    for source in [*sources, config, text]:
        found = source.get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise CheckpointError(f"{path}: eos_token_id {found!r:.60} is no token id or list")
            return tuple(ids)
    return ()
