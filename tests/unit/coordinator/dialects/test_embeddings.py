"""Embeddings in the formats of OpenAI and Ollama: inputs, names, limits and lists."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.dialects import embeddings
from coordinator.web.context import ApiOptions
from tests.support.api.api_client import USER, ApiClient, DisconnectingClient
from tests.support.api.stand_in_embedder import stand_in_embedder


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiClient]:
    embedder = stand_in_embedder(tmp_path)
    await embedder.start()
    yield ApiClient(embedder=embedder, options=ApiOptions(strict_names=False))
    embedder.close()


async def vectors(api: ApiClient, **body: Any) -> list[Any]:
    """Return the vectors of a request in OpenAI's format."""
    response = await api.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "list" and answer["model"] == "vectors"
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["embedding"] for item in answer["data"]]


async def test_inputs_and_formats_of_openai(api: ApiClient) -> None:
    """A text, texts, token ids and lists of them are read; base64 has the numbers of a list."""
    ids = await vectors(api, input=[[1, 2], [3]])
    assert ids == [pytest.approx([0, 0.6, 0.8, 1.6]), pytest.approx([0, 0.6, 2.4, 2.4])]
    assert await vectors(api, input=[1, 2]) == ids[:1]
    one, two = await vectors(api, input=["Hello", "Hi"])
    assert await vectors(api, input="Hi", model="vectors", user="me") == [two]
    (packed,) = await vectors(api, input="Hello", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == one
    (cut,) = await vectors(api, input=[1, 2], dimensions=3)
    assert cut == pytest.approx([0, 0.6, 0.8])  # of unit length again
    usage = (await api.post("/v1/embeddings", {"input": [[1, 2], [3]]})).json()["usage"]
    assert usage == {"prompt_tokens": 3, "total_tokens": 3}


async def test_formats_of_ollama(api: ApiClient) -> None:
    """Both of Ollama's endpoints answer, a long text is cut, and no input only asks for the model."""
    answer = (await api.post("/api/embed", {"model": "vectors:latest", "input": ["Hello", "a" * 99]})).json()
    assert len(answer["embeddings"]) == 2 and answer["model"] == "vectors"
    assert answer["prompt_eval_count"] > 20 and answer["total_duration"] > 0
    assert (await api.post("/api/embed", {"model": "vectors", "input": []})).json()["embeddings"] == []
    older = (await api.post("/api/embeddings", {"model": "vectors", "prompt": "Hello"})).json()
    assert older == {"embedding": answer["embeddings"][0]}
    long = await api.post("/api/embed", {"model": "vectors", "input": "a" * 99, "truncate": False})
    assert long.status_code == 400 and "exceed" in long.json()["error"]


async def test_refused_requests(api: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad inputs are a 400 that names the field, in OpenAI's words where it has some."""
    for body, field in (
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["a"] * 2049}, "input"),
    ):
        response = await api.post("/v1/embeddings", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text
    error = (await api.post("/v1/embeddings", {"input": "a" * 99})).json()["error"]
    assert error["code"] == "context_length_exceeded"
    monkeypatch.setattr(embeddings, "MAX_TOTAL", 10)
    assert "exceed the 10" in (await api.post("/v1/embeddings", {"input": ["Hello"] * 9})).text


async def test_names_and_lists(api: ApiClient) -> None:
    """Lists have both models; each model's name is refused where the other one answers."""
    assert [one["id"] for one in (await api.get("/v1/models")).json()["data"]] == ["tiny", "vectors"]
    assert (await api.get("/v1/models/vectors")).json()["max_model_len"] == 20
    assert [one["name"] for one in (await api.get("/api/tags")).json()["models"]] == ["tiny:latest", "vectors:latest"]
    shown = (await api.post("/api/show", {"model": "vectors"})).json()
    assert shown["capabilities"] == ["embedding"] and shown["model_info"]["qwen3.context_length"] == 20
    assert "completion" in (await api.post("/api/show", {"model": "tiny"})).json()["capabilities"]
    await vectors(api, model="text-embedding-3-small", input="a")
    for path, body in (("/v1/embeddings", {"model": "tiny"}), ("/v1/chat/completions", {"model": "vectors"})):
        response = await api.post(path, {**body, "input": "a", "messages": [USER]})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_client_that_leaves_is_counted(api: ApiClient) -> None:
    """A client that leaves ends its request after the input that runs, and the next client is served."""
    client = DisconnectingClient(api, "/v1/embeddings", {"input": [[1]] * 2000})
    await asyncio.sleep(0.05)
    await client.disconnect()
    await vectors(api, input=[1])
    metrics = (await api.get("/metrics")).text
    assert 'mtp_requests_total{endpoint="embeddings",outcome="cancelled"} 1.0' in metrics
    assert 'mtp_requests_total{endpoint="embeddings",outcome="stop"} 1.0' in metrics
    assert "mtp_prompt_tokens_total 1.0" in metrics


async def test_without_a_model_the_error_names_the_flag() -> None:
    """A server without an embedding model answers 404 with the flag that gives it one."""
    for path in ("/v1/embeddings", "/api/embed", "/embeddings"):
        response = await ApiClient().post(path, {"input": "a"})
        assert response.status_code == 404
        assert "serve --embeddings MODEL" in response.text
