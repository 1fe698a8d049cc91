"""Vectors of texts agree with transformers on a tiny random model, in this process and through the whole path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import ollama
import openai
import pytest
from mlx.utils import tree_flatten

from coordinator.text.embedder import Embedder
from mtp.mlx_models import pooled
from mtp.mlx_models.pooled import PooledDecoder, pooling_of
from mtp.mlx_models.skeleton import make_model
from proto.errors import CheckpointError
from tests.support.api.api_client import ApiClient
from tests.support.api.api_server import serving
from tests.support.api.stand_in_embedder import write_embedding_tokenizer

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip("transformers")

CONFIG = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

TOKENS = [(7 * i * i + 3 * i + 11) % 400 for i in range(40)]


def write_model(path: Path, kind: str = "Qwen3", prefix: str = "", pooling: str | None = None) -> Any:
    """Write a model of transformers with `prefix` before its names, as Qwen publishes them without, and return it."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**CONFIG, tie_word_embeddings=False)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else torch.rand(weight.shape) + 0.5)
    weights = {prefix + name: mx.array(weight.numpy()) for name, weight in model.state_dict().items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    stored = {"model_type": kind.lower(), **CONFIG, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(stored))
    if pooling:
        (path / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "lasttoken")}
        (path / "1_Pooling" / "config.json").write_text(json.dumps({**modes, "include_prompt": True}))
    return model


def their_vector(model: Any, tokens: list[int], pooling: str = "lasttoken") -> np.ndarray[Any, Any]:
    """Return transformers' last hidden state, pooled, of unit length."""
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    vector = rows[-1] if pooling == "lasttoken" else rows.mean(0)
    return np.asarray(vector / np.linalg.norm(vector))


@pytest.mark.parametrize(
    ("kind", "prefix", "pooling"),
    [("Qwen3", "", None), ("Qwen3", "model.", "mean_tokens"), ("Llama", "model.", "lasttoken")],
)
def test_vectors_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, prefix: str, pooling: str | None
) -> None:
    """Both poolings give transformers' vectors to 1e-5, for inputs of one token, one chunk and several chunks."""
    monkeypatch.setattr(pooled, "CHUNK", 16)
    theirs = write_model(tmp_path, kind, prefix, pooling)
    decoder = PooledDecoder(tmp_path)
    for length in (1, 9, 16, 40):
        expected = their_vector(theirs, TOKENS[:length], pooling or "lasttoken")
        np.testing.assert_allclose(decoder.vector(TOKENS[:length]), expected, rtol=0, atol=1e-5)


def test_a_quantized_conversion_is_read(tmp_path: Path) -> None:
    """A conversion for MLX with an lm_head gives the vector of its quantized weights, and the lm_head is left out."""
    config = {"model_type": "qwen3", **CONFIG, "tie_word_embeddings": False}
    model: Any = make_model(config)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 32, "bits": 4}}))
    decoder = PooledDecoder(tmp_path)
    row = model.model(mx.array([TOKENS]))[0, -1]
    assert mx.allclose(mx.array(decoder.vector(TOKENS)), row / mx.linalg.norm(row), atol=1e-5)
    assert "lm_head" not in decoder.model


def test_other_modules_and_directions_are_refused(tmp_path: Path) -> None:
    """A checkpoint whose vectors mlx-lm does not give is refused, with the reason."""
    write_model(tmp_path, pooling="cls_token")
    with pytest.raises(CheckpointError, match="pooling by cls_token"):
        pooling_of(tmp_path)
    types = ("Transformer", "Pooling", "Dense", "Normalize")
    modules = [{"path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(types)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="module 'Dense'"):
        pooling_of(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert pooling_of(tmp_path) == "mean"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **CONFIG, "is_causal": False}))
    with pytest.raises(CheckpointError, match="attend to later ones"):
        PooledDecoder(tmp_path)


@pytest.mark.slow
async def test_clients_get_the_vectors_of_the_process(tmp_path: Path) -> None:
    """OpenAI's and Ollama's own clients get transformers' vectors from the process, whatever else a request holds."""
    model, end = write_model(tmp_path), write_embedding_tokenizer(tmp_path)
    embedder = Embedder("tiny-embedding", tmp_path)
    await embedder.start()
    texts = ["Hello world", "The capital of France is Paris.", "a" * 60]
    inputs = embedder.tokenize(texts, truncate=False)
    assert {each[-1] for each in inputs} == {end}
    embedder.close()  # it belongs to the loop of the test; the server's loop starts its own
    with (
        serving(ApiClient(embedder=embedder).app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as gpt,
        ollama.Client(host=url, timeout=300) as llama,
    ):
        found = gpt.embeddings.create(model="tiny-embedding", input=texts)
        alone = gpt.embeddings.create(model="tiny-embedding", input=texts[1], encoding_format="float")
        older = llama.embed("tiny-embedding", texts)
        for index, (vector, tokens) in enumerate(zip(found.data, inputs, strict=True)):
            np.testing.assert_allclose(vector.embedding, their_vector(model, tokens), rtol=0, atol=1e-5)
            assert list(older.embeddings[index]) == vector.embedding
        assert alone.data[0].embedding == found.data[1].embedding
        assert found.usage.prompt_tokens == older.prompt_eval_count == sum(map(len, inputs))
    embedder.close()
