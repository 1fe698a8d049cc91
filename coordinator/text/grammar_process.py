"""The process that compiles output formats, with bounds on its time and memory.

A format of one client may take any time and memory. The process is ended when a job exceeds its bounds or loses its
client, and the next job starts another one. Jobs and results are JSON, so no object of the process is trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import psutil

from coordinator.text.grammars import OutputFormat, compile_format
from mtp.sampling.grammar import tokenizer_of
from proto.errors import CapacityError, NotReadyError, RequestError

JOB_SECONDS = 2.0
"""Seconds. Longest compilation of the format of one request."""

WAIT_SECONDS = 2.0
"""Seconds. Longest wait for the jobs of other requests, after which the client may send its request again."""

START_SECONDS = 30.0
"""Seconds. Deadline of the start. A process reads 250,000 tokens in about 3 s on an idle machine."""

MAX_GROWTH = 256 * 2**20
"""Bytes. Largest growth of the process's memory by one job."""

LOOK_SECONDS = 0.02
"""Seconds between two looks at the memory of the process."""

MAX_RESULTS = 64
"""Results kept for requests with the same format, refusals among them: 16 MB of the largest grammars."""

_LENGTH = struct.Struct("<I")


class GrammarProcess:
    """The compiler of output formats for the tokenizer with the packed `vocabulary`. Use it on one event loop."""

    def __init__(self, vocabulary: bytes) -> None:
        self.vocabulary = vocabulary
        self._results: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        self._turn, self._starting = asyncio.Lock(), asyncio.Lock()
        self._connection: socket.socket | None = None
        self._process: psutil.Process | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    async def compile(self, outputs: Sequence[OutputFormat]) -> bytes:
        """Return the grammar of the first of `outputs`. If it is refused, the first refusal of the others counts.

        Raises RequestError, naming the client's field, for a format that is refused or exceeds a bound, and
        CapacityError if the formats of other requests take too long.
        """
        if not self.vocabulary:
            param = outputs[0].param
            raise RequestError(
                f"{param}: this checkpoint names no end token, which formats require.", param=param
            )
        job = json.dumps([vars(output) for output in outputs]).encode()
        key = hashlib.sha256(job).digest()
        if key not in self._results:
            await self._compile_in_turn(key, job, outputs[0].param)
        self._results.move_to_end(key)
        result = self._results[key]
        if "refusal" in result:
            raise RequestError(result["refusal"], param=result["param"])
        return str(result["grammar"]).encode()

    def close(self) -> None:
        """End the process."""
        if self._stop is not None:
            self._stop()
        self._connection = None

    async def _compile_in_turn(self, key: bytes, job: bytes, param: str) -> None:
        await self._connected()  # the start of the process is no wait for other requests
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise CapacityError(
                "The server compiles the formats of other requests. Try again later.",
                retry_after=WAIT_SECONDS,
            ) from None
        try:
            if key not in self._results:
                self._results[key] = await self._run(job, param)
                if len(self._results) > MAX_RESULTS:
                    self._results.popitem(last=False)
        finally:
            self._turn.release()

    async def _run(self, job: bytes, param: str) -> dict[str, Any]:
        """Return the result of one job. The process is ended when the job exceeds a bound, or is cancelled.

        Raises NotReadyError if the process ends for another reason.
        """
        connection = await self._connected()
        working = asyncio.create_task(_exchange(connection, job))
        try:
            bound = await self._watch(working)
            if not bound:
                return dict(working.result())
        except (OSError, ValueError, psutil.Error) as error:
            # The format need not be the cause, so this is no result to keep.
            raise NotReadyError("The compiler of formats has ended. Try again.") from error
        finally:
            if not working.done() or working.cancelled() or working.exception():
                working.cancel()
                # It reads from the connection, which must be open until it has ended.
                await asyncio.wait({working})
                self.close()
        text = f"{param}: compiling the format {bound}. Send a smaller format."
        return {"refusal": text, "param": param}

    async def _watch(self, working: asyncio.Task[Any]) -> str:
        """Wait for the end of a job. Return the bound that it exceeds, or an empty text."""
        assert self._process is not None
        clock = asyncio.get_running_loop().time
        due, least = clock() + JOB_SECONDS, self._process.memory_info().rss
        while not working.done():
            await asyncio.wait({working}, timeout=LOOK_SECONDS)
            if working.done():
                break
            if clock() >= due:
                return f"takes more than {JOB_SECONDS:g} s"
            if self._process.memory_info().rss - least > MAX_GROWTH:
                return f"takes more than {MAX_GROWTH // 2**20} MiB"
        return ""

    async def _connected(self) -> socket.socket:
        """Return the connection to the process, started if needed. Raises NotReadyError if it does not start."""
        async with self._starting:
            return self._connection or await self._start()

    async def _start(self) -> socket.socket:
        """Start the process and give it the vocabulary."""
        process, own = _start()
        self._stop = weakref.finalize(self, _end, process, own)
        self._process = psutil.Process(process.pid)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _send(own, self.vocabulary)
                await _receive(own)
        except (OSError, TimeoutError) as error:
            self.close()
            raise NotReadyError(
                "The compiler of formats does not start. Try again later."
            ) from error
        except asyncio.CancelledError:
            self.close()
            raise
        self._connection = own
        return own


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process, and return it with this end of its connection."""
    own, other = socket.socketpair()
    own.setblocking(False)
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    null = subprocess.DEVNULL
    with other:
        return subprocess.Popen(command, stdin=other.fileno(), stdout=null, stderr=null), own


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


async def _exchange(connection: socket.socket, job: bytes) -> Any:
    await _send(connection, job)
    return json.loads(await _receive(connection))


async def _send(connection: socket.socket, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, _LENGTH.pack(len(data)) + data)


async def _receive(connection: socket.socket) -> bytes:
    """Return the next message. Raises ConnectionError if the process has ended."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
        piece = await loop.sock_recv(connection, 2**16)
        if not piece:
            raise ConnectionError("the process has ended")
        data += piece
    return bytes(data[_LENGTH.size :])


# ---- in the process


def main() -> None:
    """Compile the jobs of the connection at descriptor 0, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which ends this process
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as stream:
        tokenizer = tokenizer_of(_read(stream))
        _write(stream, b"ready")
        while job := _read(stream):
            signal.alarm(round(3 * JOB_SECONDS))  # ends this process even if its server is gone
            _write(stream, json.dumps(_result(json.loads(job), tokenizer)).encode())
            signal.alarm(0)


def _result(job: list[dict[str, Any]], tokenizer: Any) -> dict[str, str]:
    """Return the grammar of the first format of a job, or the refusal."""
    outputs = [OutputFormat(**fields) for fields in job]
    refusals = []
    for output in outputs:
        try:
            grammar = compile_format(output, tokenizer).decode()
        except RequestError as error:
            refusals.append({"refusal": str(error), "param": error.param or output.param})
            continue
        if not refusals:
            return {"grammar": grammar}
    return refusals[min(1, len(refusals) - 1)]


def _read(stream: Any) -> bytes:
    """Return the next message, or nothing at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    return bytes(stream.read(_LENGTH.unpack(head)[0]))


def _write(stream: Any, data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()
