"""Vectors of texts for `serve --embeddings`: the tokenizer, and the process beside the server that has the weights.

The process computes each input alone, so its vector does not depend on others. A job is a count and the token ids, 32
bits each, and a result the numbers of a vector in fp32. So no object of the process is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import weakref
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from coordinator.text.tokenizer import ContextLengthError, ModelInfo
from mtp.checkpoint.format.config import read_json_object
from proto.errors import CapacityError, CheckpointError, MemoryLimitError, NotReadyError, RequestError
from proto.terminal.progress import format_size
from worker.engine.hardware import default_memory_limit, set_limits

log = logging.getLogger(__name__)

Tokens = np.ndarray[Any, np.dtype[np.uint32]]
Vector = np.ndarray[Any, np.dtype[np.float32]]

MAX_TOKENS = 8192
"""Tokens of one input: the limit of OpenAI's models and of Qwen's own examples. It bounds time and K/V."""

ROOM = 2 * 2**30
"""Bytes of the process besides its weights: programs, K/V and activations of an input of MAX_TOKENS."""

START_SECONDS = 300.0
"""Seconds. Bounds reading the weights from a slow disk."""

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
        program = f"from {__name__} import main; main()"
        self.command: tuple[str, ...] = (sys.executable, "-P", "-c", program, str(path), str(self.needed_bytes))
        self.size = 0
        """The numbers of a vector, once the process has started."""
        self.process: Process | None = None
        self._lock = asyncio.Lock()
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._open: Counter[str] = Counter()

    def tokenize(self, inputs: Sequence[str | list[int]], *, truncate: bool) -> list[Tokens]:
        """Return the tokens of each input. Blocks. Raises RequestError, without `truncate` for longer ones too."""
        found, limit = [], self.info.context_length
        for index, given in enumerate(inputs):
            if isinstance(given, str):
                encoded = self._backend.encode(given[: self._most_characters])
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
            found.append(np.array(tokens, np.uint32))
        return found

    @contextlib.asynccontextmanager
    async def open_request(self, client: str) -> AsyncIterator[Callable[[Tokens], Awaitable[Vector]]]:
        """Yield a function that returns the vector of an input. Clients take turns, one input each.

        Raises CapacityError for too many requests, and NotReadyError after REQUEST_SECONDS or if the process ends.
        """
        if self._open.total() >= MOST_OPEN or self._open[client] >= MOST_OF_CLIENT:
            raise CapacityError("Too many requests wait for embeddings. Try again later.", retry_after=5.0)
        self._open[client] += 1
        turn = self._turns.setdefault(client, asyncio.Lock())
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                yield partial(self._compute_in_turn, turn)
        except TimeoutError as error:
            raise NotReadyError(f"The embeddings took more than {REQUEST_SECONDS:g} s. Send fewer inputs.") from error
        finally:
            self._open -= Counter([client])  # drops a client without requests

    async def _compute_in_turn(self, turn: asyncio.Lock, tokens: Tokens) -> Vector:
        async with turn, self._lock:
            for _ in range(2):  # a process that was killed is replaced at once
                process = await self.start()
                assert process.stdin is not None and process.stdout is not None
                try:
                    process.stdin.write(len(tokens).to_bytes(4, "little") + tokens.astype("<u4").tobytes())
                    await process.stdin.drain()
                    vector = np.frombuffer(await process.stdout.readexactly(4 * self.size), "<f4")
                except (OSError, EOFError):
                    log.warning("the process of the embeddings ended. It starts again", extra={"pid": process.pid})
                    await self.close()
                    continue
                except BaseException:  # the result would be that of the next job
                    await self.close()
                    raise
                if not np.isfinite(vector).all():
                    raise NotReadyError("The embedding model computed no finite vector. Use other weights.")
                return vector
            raise NotReadyError("The process of the embeddings has ended. Send a shorter input.")

    async def start(self) -> Process:
        """Return the process, which is started and reads the weights unless it runs. Raises CheckpointError."""
        if self.process is not None and self.process.returncode is None:
            return self.process
        process = await asyncio.create_subprocess_exec(
            *self.command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        self.process = process
        facts, assumed = {}, '{"error": "its process has ended"}'
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_SECONDS):
                facts = json.loads(await process.stdout.readline() or assumed)
        except TimeoutError:
            facts["error"] = f"it takes more than {START_SECONDS:g} s"
        finally:
            if "size" not in facts:
                await self.close()
        if "error" in facts:
            text = f"the embedding model {self.info.id} cannot be loaded: {facts['error']}"
            raise CheckpointError(text, public="the embedding model cannot be loaded. See the server's log")
        self.size = facts["size"]
        log.info("embedding model loaded", extra={"model": self.info.id, "pooling": facts["pooling"]})
        return process

    async def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# ---- in the process


def main() -> None:
    """Load the checkpoint of the command line, and answer the jobs of the standard input until it ends."""
    from mtp.mlx_models.pooled import PooledDecoder  # the server does without its imports

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print
    facts: dict[str, Any] = {}
    try:
        set_limits(int(sys.argv[2]))
        decoder = PooledDecoder(Path(sys.argv[1]))
        facts = {"size": len(decoder.vector([0])), "pooling": decoder.pooling}
    except Exception as error:
        facts["error"] = f"{error!s:.500}"
    results.write(json.dumps(facts).encode() + b"\n")
    results.flush()
    while "size" in facts and (head := jobs.read(4)):
        tokens = np.frombuffer(jobs.read(4 * int.from_bytes(head, "little")), "<u4")
        results.write(decoder.vector(tokens.tolist()).astype("<f4").tobytes())
        results.flush()
