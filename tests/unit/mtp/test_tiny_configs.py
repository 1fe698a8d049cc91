"""The tiny configs cover mlx-lm, and each of them builds."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import models

from tests.support.tiny_configs import HELPERS, MISSING, MODEL_TYPES, tiny_config


def test_each_model_type_of_mlx_lm_has_a_tiny_config() -> None:
    """A new file of mlx-lm is a model type with a config, a helper, or listed as missing."""
    modules = {module.name for module in pkgutil.iter_modules(models.__path__)}
    assert modules == HELPERS | set(MISSING) | set(MODEL_TYPES)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_tiny_config_builds_a_small_model(model_type: str) -> None:
    """The model has at least four layers, the wanted vocabulary and few weights."""
    module = import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(tiny_config(model_type, vocabulary=160)))
    arrays = list(dict(tree_flatten(model.parameters())).values())
    mx.eval(arrays)
    assert len(model.layers) >= 4
    assert any(array.shape[:1] == (160,) for array in arrays)
    assert sum(array.size for array in arrays) < 700_000
