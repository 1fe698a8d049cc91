"""Vectors of texts for `serve --embeddings`: the tokenizer, and the process beside the server that has the weights.

The process computes each input alone, so its vector does not depend on others. Jobs and results are lists in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from coordinator.text.side_process import Process, ask, command_of, end, start_process
from coordinator.text.tokenizer import ContextLengthError, ModelInfo
from mtp.checkpoint.format.config import read_json_object
from proto.errors import CapacityError, CheckpointError, MemoryLimitError, NotReadyError, RequestError
from proto.terminal.progress import format_size
from worker.engine.hardware import default_memory_limit, set_limits

log = logging.getLogger(__name__)

Vector = np.ndarray[Any, np.dtype[np.float32]]

MAX_TOKENS = 8192
"""Tokens of one input: the limit of OpenAI's models and of Qwen's own examples. It bounds time and K/V."""

ROOM = 2 * 2**30
"""Bytes of the process besides its weights: programs, K/V and activations of an input of MAX_TOKENS."""

REQUEST_SECONDS = 600.0
"""Seconds. Deadline of a request. A job that runs then is ended with the process, and the next one starts another."""

MOST_OPEN, MOST_OF_CLIENT = 64, 32
"""Requests that are computed or wait, of all clients and of one client."""


class Embedder:
    """An embedding model. Its async methods run on the event loop.

    The constructor raises CheckpointError, and MemoryLimitError for a model that does not fit into this machine.
    """

    def __init__(self, name: str, path: Path) -> None:
        config, file = read_json_object(path / "config.json"), path / "tokenizer.json"
        limit, memory = min(MAX_TOKENS, config.get("max_position_embeddings") or MAX_TOKENS), default_memory_limit()
        nbytes = sum(each.stat().st_size for each in path.glob("model*.safetensors"))
        self.info = ModelInfo(name, limit, family=str(config.get("model_type", "")), nbytes=nbytes)
        self.needed_bytes = nbytes + ROOM
        self.rest_bytes = memory - self.needed_bytes
        """The memory of this machine for other processes."""
        if self.rest_bytes <= 0:
            sizes = f"{format_size(self.needed_bytes)} exceed the {format_size(memory)} of this machine"
            raise MemoryLimitError(f"the embedding model {name}: {sizes}. Use a smaller one.")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{file}: not readable: {error}. Download it again.") from error
        self._backend.no_padding()
        self._backend.enable_truncation(limit)  # keeps the end token, which Qwen's tokenizer adds
        vocabulary = self._backend.get_vocab()
        self._vocab_size = max(vocabulary.values()) + 1
        self._most_characters = (limit + 1) * max(map(len, vocabulary))
        self.command = command_of(__name__, str(path), str(self.needed_bytes))
        self.size = 0
        """The numbers of a vector, once the process has started."""
        self.process: Process | None = None
        self._lock = asyncio.Lock()
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._open: Counter[str] = Counter()

    def tokenize(self, inputs: Sequence[str | list[int]], *, truncate: bool) -> list[list[int]]:
        """Return the tokens of each input. Blocks. Raises RequestError, without `truncate` for longer ones too."""
        found, limit = [], self.info.context_length
        for index, given in enumerate(inputs):
            if isinstance(given, str):
                (encoded,) = self._backend.encode_batch([given[: self._most_characters]])  # lets other threads run
                tokens, count = encoded.ids, sum(len(each.ids) for each in (encoded, *encoded.overflowing))
            else:
                tokens, count = given[:limit], len(given)
            name = f"input[{index}]"
            if not tokens or not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
                problem = f"a token is not below {self._vocab_size}" if tokens else "empty"
                raise RequestError(f"{name}: {problem}. Send a text, or tokens of this model.", param="input")
            if count > limit and not truncate:
                problem = f"{name}: {count} tokens exceed the model's maximum context length of {limit} tokens"
                raise ContextLengthError(f"{problem}. Shorten it.", count, limit, param="input")
            found.append(tokens)
        return found

    @contextlib.asynccontextmanager
    async def open_request(self, client: str) -> AsyncIterator[None]:
        """Hold a place for a request, whose block runs after those of the client's earlier requests.

        Raises CapacityError without a place, and NotReadyError after REQUEST_SECONDS.
        """
        if self._open.total() >= MOST_OPEN or self._open[client] >= MOST_OF_CLIENT:
            raise CapacityError("Too many requests wait for embeddings. Try again later.", retry_after=5.0)
        self._open[client] += 1
        try:
            async with asyncio.timeout(REQUEST_SECONDS), self._turns.setdefault(client, asyncio.Lock()):
                yield
        except TimeoutError as error:
            raise NotReadyError(f"The embeddings took more than {REQUEST_SECONDS:g} s. Send fewer inputs.") from error
        finally:
            self._open -= Counter([client])  # drops a client without requests

    async def compute(self, tokens: Sequence[int]) -> Vector:
        """Return the vector of an input of an open request. Clients take turns. Raises NotReadyError."""
        async with self._lock:
            answer = await ask(await self.start(), json.dumps(tokens).encode() + b"\n")
        if not answer:
            raise NotReadyError("The process of the embeddings has ended. Send a shorter input.")
        vector = np.array(json.loads(answer), np.float32)
        if not np.isfinite(vector).all():
            raise NotReadyError("The embedding model computed no finite vector. Use other weights.")
        return vector

    async def start(self) -> Process:
        """Return the process, which is started and reads the weights unless it runs. Raises CheckpointError."""
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.close()
        self.process = process = await start_process(self.command)
        facts = json.loads(await ask(process, b"") or '{"error": "its process has ended"}')
        if "error" in facts:
            self.close()
            text = f"the embedding model {self.info.id} cannot be loaded: {facts['error']}"
            raise CheckpointError(text, public="the embedding model cannot be loaded. See the server's log")
        self.size = facts["size"]
        log.info("embedding model loaded", extra={"model": self.info.id, "pooling": facts["pooling"]})
        return process

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            end(self.process)


# ---- in the process


def main() -> None:
    """Load the checkpoint of the command line, and answer the jobs of the standard input until it ends."""
    from mtp.mlx_models.pooled import PooledDecoder  # the server does without its imports

    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print
    try:
        set_limits(int(sys.argv[2]))
        decoder = PooledDecoder(Path(sys.argv[1]))
        facts = {"size": len(decoder.vector([0])), "pooling": decoder.pooling}
    except Exception as error:
        facts = {"error": f"{error!s:.500}"}
    print(json.dumps(facts), file=results)
    for job in sys.stdin if "size" in facts else ():
        print(json.dumps(decoder.vector(json.loads(job)).tolist()), file=results)
