"""The families: their names in config.json, and the fields that only one of them has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtp.checkpoint.families import FAMILIES, find_family
from mtp.checkpoint.format.config import ModelConfig
from proto.errors import CheckpointError
from tests.support.checkpoints.published import MODELS

(NEXT,) = [model for model in MODELS if model.model_type == "qwen3_next"]
(EXPERTS,) = [model for model in MODELS if model.name == "Qwen3.5-35B-A3B"]


def test_every_name_belongs_to_one_family() -> None:
    """Each `model_type` finds its family, and the reported type finds the same one."""
    for family in FAMILIES:
        for names, head_only in ((family.model_types, False), (family.head_types, True)):
            for name, reported in names.items():
                assert find_family(name) == (family, reported, head_only)
                assert find_family(reported) == (family, reported, False)


def test_a_head_alone_has_the_family_of_its_model() -> None:
    """A drafter of a mixture of experts is one, although tools write the dense type into config.json."""
    config = EXPERTS.config | {"model_type": "qwen3_5_mtp"}
    found = ModelConfig.parse(Path("config.json"), config)
    assert (found.model_type, found.head_only, found.num_experts) == ("qwen3_5_moe", True, 256)


def test_qwen3_next_has_a_head_that_its_config_does_not_mention() -> None:
    """The published config announces no head. A config with 0 announces none."""
    assert NEXT.parsed().mtp_layers == 1
    assert NEXT.parsed(mtp_num_hidden_layers=0).mtp_layers == 0
    assert NEXT.parsed(num_nextn_predict_layers=1).mtp_layers == 1


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"mlp_only_layers": None}, "mlp_only_layers is None. It must be a list of layers"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers is "),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0. It must be a positive integer"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob is 'no'. It must be true or false"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is missing"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"rope_theta": None}, "rope_theta"),
        ({"num_nextn_predict_layers": 2}, "only heads of one layer without own"),
    ],
    ids=repr,
)
def test_invalid_fields_of_qwen3_next_are_named(fields: dict[str, Any], error: str) -> None:
    """A field that would fail while loading is refused when the config is read."""
    with pytest.raises(CheckpointError, match=error):
        NEXT.parsed(**fields)
