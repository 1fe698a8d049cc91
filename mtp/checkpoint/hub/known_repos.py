"""Short names of published models, such as `qwen3.6:27b` or `qwen3.5-35b-a3b-8bit`, and repos that hold them.

The repos are those that programs for MLX name in their documents (November 2026). `tests/published` has the headers of
some. Where a conversion lacks the head, `fetch_missing_head` gets it from the publisher's own repo.

`published_models.json` has the models that mlx-lm's classes serve. Each `config` has the fields of the publisher's
config.json that decide sizes and limits, as copies in other programs' tests have them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MlxLmModel:
    """A published model of a class of mlx-lm.

    `short` is the name that people type, and `repo` the conversion in 4 bits that they use. `parameters` and `active`
    are the publisher's figures, in billions. `experts_mode` is the format of experts that are published in 4 bits.
    """

    name: str
    short: str
    repo: str
    parameters: float
    active: float
    config: dict[str, Any] = field(repr=False, hash=False)
    experts_mode: str = ""

    @property
    def head_layers(self) -> int:
        """The layers of the MTP head in the publisher's repo. Conversions by mlx-lm lack them."""
        return int(self.config.get("num_nextn_predict_layers", 0))


def read_table() -> dict[str, Any]:
    """Return the facts of published models."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("published_models.json").read_text(encoding="utf-8"))
    return found


MLX_LM_MODELS = tuple(MlxLmModel(**row) for row in read_table()["models"])


@dataclass(frozen=True)
class KnownRepo:
    """A repo with a model that can be served. `bits` None is unquantized. `head` is False where it was lost."""

    name: str
    brand: str
    release: str
    size: str
    bits: int | None = None
    head: bool = True

    @property
    def short(self) -> str:
        """The name that people type, without the bits."""
        return f"{self.brand}{self.release}:{self.size}"


_OFFICIAL = {
    "3.5": "0.8B 2B 4B 9B 27B 35B-A3B 122B-A10B 397B-A17B",
    "3.6": "27B 35B-A3B",
    "3.8": "27B Flash-Next 2.4T-A95B",
}

_CONVERSIONS = (
    ("mlx-community/Qwen3.5-4B-MLX-4bit", 4, False),
    ("mlx-community/Qwen3.5-4B-8bit", 8, False),
    ("mlx-community/Qwen3.5-9B-4bit", 4, False),
    ("mlx-community/Qwen3.5-9B-8bit", 8, False),
    ("mlx-community/Qwen3.5-27B-4bit", 4, False),
    ("mlx-community/Qwen3.5-27B-8bit", 8, False),
    ("mlx-community/Qwen3.5-35B-A3B-4bit", 4, False),
    ("mlx-community/Qwen3.5-35B-A3B-8bit", 8, False),
    ("mlx-community/Qwen3.5-122B-A10B-8bit", 8, False),
    ("mlx-community/Qwen3.5-397B-A17B-4bit", 4, False),
    ("kradih/Qwen3.6-27B-MTP-4bit-MLX", 4, True),
    ("mlx-community/Qwen3.6-27B-4bit", 4, False),
    ("unsloth/Qwen3.6-27B-MLX-8bit", 8, False),
    ("mlx-community/Qwen3.6-35B-A3B-4bit", 4, False),
    ("mlx-community/Qwen3.6-35B-A3B-8bit", 8, False),
    ("mlx-community/Qwen3.8-27B-4bit", 4, False),
    ("Jundot/Qwen3.8-Flash-Next-oQ4e-mtp", 4, True),
    ("Vontra/GLM-5.3-Flash-MLX-4bit-MTP", 4, True),
)
"""Repo, bits, and whether it has the head. Of those with equal bits the first one is taken."""

_NAME = re.compile(
    r"(?i)(?P<brand>qwen|glm)[-_ ]?(?P<release>[35]\.\d)[-_:/ ]?"
    r"(?P<size>flash-next|flash|\d+(?:\.\d+)?[bt](?:-a\d+b)?)(?P<rest>.*)"
)
_BITS = re.compile(r"(?i)(?:[-_@:. ]|q)([2-8])(?:-?bit|_[0k]|\b)")
_OTHER_BITS = re.compile(r"(?i)[235-8]-?bit|[-:_@ ]q[235-8]|bf16|fp8")
"""Formats besides that of the repos of `MLX_LM_MODELS`."""


def _known() -> tuple[KnownRepo, ...]:
    found = []
    for repo, bits, head in _CONVERSIONS:
        match = _NAME.search(repo)
        assert match is not None
        brand, size = match["brand"].lower(), match["size"].lower()
        found.append(KnownRepo(repo, brand, match["release"], size, bits, head))
    for release, sizes in _OFFICIAL.items():
        found += [KnownRepo(f"Qwen/Qwen{release}-{s}", "qwen", release, s.lower()) for s in sizes.split()]
    found.append(KnownRepo("zai-org/GLM-5.3-Flash-BF16", "glm", "5.3", "flash"))
    for model in MLX_LM_MODELS:
        brand, _, size = model.short.partition(":")
        found.append(KnownRepo(model.repo, brand, "", size, 4, head=False))
    return tuple(found)


KNOWN = _known()

DEFAULT_BITS = 4


def known_repo(text: str) -> KnownRepo | None:
    """Return the repo that a short name means, with 4 bits if it names none; None for any other text."""
    match = _NAME.fullmatch(text.strip().removeprefix("qwen/"))
    if match is None or "/" in match["rest"]:
        model = None if _OTHER_BITS.search(text) else find_mlx_lm_model(text)
        return next((one for one in KNOWN if model and one.name == model.repo), None)
    size = match["size"].lower()
    found = _BITS.search(match["rest"])
    full = "16" in match["rest"]
    bits = None if full else int(found[1]) if found else DEFAULT_BITS
    of_size = [
        one
        for one in KNOWN
        if (one.brand, one.release) == (match["brand"].lower(), match["release"])
        and size in (one.size, one.size.partition("-a")[0])
    ]
    exact = [one for one in of_size if one.bits == bits]
    others = [] if found else of_size
    return next(iter((*exact, *others)), None)


def close_names(text: str) -> list[str]:
    """Return up to three short names that `text` may mean."""
    names = list(dict.fromkeys(one.short for one in KNOWN))
    return get_close_matches(text.lower(), names, 2, 0.7)


_REST = r"(-(instruct|thinking|base|mlx|bf16|fp8|mxfp4|q[2-8]|[2-8]-?bit|2[45]\d\d))*"
"""The words behind the name of a model in the names of its repos and conversions."""


def find_mlx_lm_model(text: str) -> MlxLmModel | None:
    """Return the model that a short name or the name of a repo without its owner means; None for any other text."""
    plain = re.sub(r"[:_@ ]", "-", text.strip().lower())
    return next((one for one in MLX_LM_MODELS if re.fullmatch(_pattern(one), plain)), None)


def _pattern(model: MlxLmModel) -> str:
    forms = (model.name.lower(), model.short.replace(":", "-"))
    loose = (re.sub(r"-(a\d+b)$", r"(-\1)?", form.replace(".", r"\.")).replace("-", "-?") for form in forms)
    return f"({'|'.join(loose)}){_REST}"
